"""Plain words: phrases of an earlier private dialect do not come back into docs, --help and explanations."""

import re
from pathlib import Path

import pytest
from test_cli import rlhf
from typer.main import get_command

from rlhf_cli.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Each is nearly always wrong: a standard verb or noun says it better.
DIALECT = re.compile(
    r"(?<!be )\btold\b|\bis held\b(?! out)|\bof (its|their|your|our) own\b|\bgo(es)? on (from|where|with)\b|\bgone on\b"
    r"|\bmade anew\b|\bin vain\b|\bheld against\b|\bby right\b|\bcut up\b|\blaid end to end\b|\b(no|some)body\b"
    r"|\bis (not )?there\b"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_plain_words(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # recorded output
    assert [text[max(0, m.start() - 40) : m.end() + 20] for m in DIALECT.finditer(text)] == []


def test_help_and_explanations_have_plain_words() -> None:
    texts = [rlhf("explain", "--all").stdout]
    texts += [rlhf(name, "--help").stdout for name in get_command(app).commands]  # type: ignore[attr-defined]
    for text in texts:
        assert [text[max(0, m.start() - 40) : m.end() + 20] for m in DIALECT.finditer(text)] == []
