"""Plain words: phrases of an earlier private dialect do not return to docs, --help, docstrings and messages."""

import ast
import re
from pathlib import Path

import pytest
from run_cli import ROOT, rlhf
from typer.main import get_command

from rlhf_cli.cli import app

TABLES = sorted((ROOT / "rlhf_cli").rglob("*.toml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *TABLES]
MODULES = sorted((ROOT / "rlhf_cli").rglob("*.py"))
# Each is nearly always wrong: a standard verb or noun says it better.
DIALECT = re.compile(
    r"(?<!be )\btold\b|\b(is|are) held\b(?! out)|\bof (its|their|your|our) own\b|\bgo(es)? on (from|where|with)\b"
    r"|\bgone on\b|\banew\b|\bin vain\b|\bheld against\b|\bby right\b|\bcut up\b|\blaid end to end\b"
    r"|\b(no|some)body\b|\b(is|are) (not )?there\b|\bof (ours|theirs)\b"
)
CODE_DIALECT = re.compile(rf"{DIALECT.pattern}|\bleft out\b|\bstands? beside\b|\bis asked for\b|\bso many\b")


def dialect(text: str, pattern: re.Pattern[str] = DIALECT) -> list[str]:
    return [text[max(0, match.start() - 40) : match.end() + 20] for match in pattern.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_plain_words(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # recorded output
    assert dialect(text) == []


def test_help_and_explanations_have_plain_words() -> None:
    texts = [rlhf("explain", "--all").stdout]
    texts += [rlhf(name, "--help").stdout for name in get_command(app).commands]  # type: ignore[attr-defined]
    assert [dialect(text) for text in texts if dialect(text)] == []


def test_docstrings_and_messages_have_plain_words() -> None:
    """String literals with a space: one word may be a key of a file, such as `told`."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                phrases = dialect(node.value, CODE_DIALECT)
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {phrase}" for phrase in phrases]
    assert not found, "\n" + "\n".join(found)
