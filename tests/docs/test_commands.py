"""Commands and YAML of the documents: every command, flag and key exists."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from run_cli import ROOT, rlhf
from typer.main import get_command

from rlhf_cli import config
from rlhf_cli.cli import app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def blocks(text: str, *languages: str) -> list[str]:
    return [code for language, code in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text) if language in languages]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield every command line in code blocks and in `code` of a sentence, as words."""
    shell = "\n".join(blocks(text, "", "sh", "bash", "console"))
    prose = re.sub(r"(?ms)^```.*?^```", "", text)
    lines = re.sub(r"\\\n", " ", shell).splitlines() + re.findall(r"(?s)`((?:rlhf|make) [^`|]+)`", prose)
    for line in lines:
        for part in re.split(r"&&|;|\bdo\b|(?<!\S)\|(?!\S)", line.removeprefix("$ ")):
            if re.match(r"\s*(rlhf|make)\s+[a-z-]", part):
                yield shlex.split(part, comments=True)


def problem(words: list[str]) -> str:
    """Return what is wrong with a command line; unknown flags raise."""
    if words[0] == "make":
        targets = re.findall(r"(?m)^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"))
        known = {name for line in targets for name in line.split()}
        return ", ".join({word for word in words[1:] if "=" not in word} - known)
    group: Any = typer.main.get_command(app)
    if words[1].startswith("--"):
        return "" if words[1] in {option for each in group.params for option in each.opts} else words[1]
    if (command := group.commands.get(words[1])) is None:
        return words[1]
    given, _, _ = command.make_parser(command.context_class(command)).parse_args(words[2:])
    keys = [text.partition("=")[0] for text in (*(given.get("set_") or []), *(given.get("assignments") or []))]
    stages = [words[1]] if words[1] in config.CONFIGS else list(config.CONFIGS)
    return ", ".join(key for key in keys if not is_key(key, stages))


def is_key(key: str, stages: Sequence[str]) -> bool:
    """Return True for a key of one of the stages, or `STAGE:KEY`."""
    stage, colon, rest = key.partition(":")
    return config.accepts_key(stage, rest) if colon else any(config.accepts_key(stage, key) for stage in stages)


@pytest.mark.full
@pytest.mark.parametrize("page", TEXTS)
def test_every_command_exists_with_its_flags_and_keys(page: str) -> None:
    assert {" ".join(words): text for words in shell_commands(TEXTS[page]) if (text := problem(words))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "rlhf ppo -c x --actor.path y",
        "rlhf ppo -c x -s ppo.chosen_key=1",
        "rlhf run d max_len=1",
        "rlhf train x",
        "make it",
    ],
)
def test_an_invented_command_flag_or_key_is_found(line: str) -> None:
    text = f"```\nfor s in 1 2; do rlhf init \\\n  ci d  # so\ndone\n```\nor `{line}`"
    first, second = shell_commands(text)
    assert not problem(first) and second == line.split()
    try:
        assert problem(second)
    except Exception as error:
        assert "No such option" in str(error)


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if blocks(text, "yaml")])
def test_every_yaml_has_keys_that_exist(page: str) -> None:
    for block in blocks(TEXTS[page], "yaml"):
        keys = list(leaves(yaml.safe_load(block)))
        assert keys and any(all(config.accepts_key(stage, key) for key in keys) for stage in config.CONFIGS), block


# Links


ROOT = Path(__file__).parents[2]
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("rlhf_cli/", "configs/", "schemas/", "scripts/", "benchmarks/", "tests/", "Makefile")
NAMES = re.compile(r"`([\w./]*/[\w./]*|\w+\.(?:py|txt|toml))`")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of the project."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return names or pytest.skip("not a git checkout")


def prose(path: Path) -> str:
    """Return the page without its code blocks."""
    return re.sub(r"(?ms)^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub builds them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(path))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        known = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        if not known and not link.startswith(("http://", "https://")):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(path: Path) -> None:
    assert broken_links(path, prose(path)) == []


def test_every_page_that_the_code_names_exists(tracked: list[str]) -> None:
    link = re.compile(r"(?<![\w/])docs/(?!source/)[\w/-]+\.(?:md|txt|svg|png)")
    sources = [name for name in tracked if name.startswith(FOLDERS) and not name.endswith((".gz", ".safetensors"))]
    named = {page for name in sources for page in link.findall((ROOT / name).read_text("utf-8", "ignore"))}
    assert len(named) > 5 and sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/extending.md"])
def test_every_path_that_a_developers_page_names_exists(page: str) -> None:
    names = {name for name in NAMES.findall((ROOT / page).read_text(encoding="utf-8")) if not name.startswith("..")}
    names -= {"state/step_N", "snapshots/step_N"}  # of a run
    assert "ppo/losses.py" in names and len(names) > 12
    parents = (ROOT, ROOT / "rlhf_cli", ROOT / "tests/helpers/chaos")
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in parents)] == []


# Words


TABLES = sorted((ROOT / "rlhf_cli").rglob("*.toml"))
WORDED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *TABLES]
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


@pytest.mark.parametrize("page", WORDED, ids=lambda page: page.name)
def test_pages_have_plain_words(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)  # recorded output
    assert dialect(text) == []


def test_help_and_explanations_have_plain_words() -> None:
    texts = [rlhf("explain", "--all").stdout]
    texts += [rlhf(name, "--help").stdout for name in get_command(app).commands]  # type: ignore[attr-defined]
    assert [dialect(text) for text in texts if dialect(text)] == []


@pytest.mark.full
def test_docstrings_and_messages_have_plain_words() -> None:
    """String literals with a space: one word may be a key of a file, such as `told`."""
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                phrases = dialect(node.value, CODE_DIALECT)
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {phrase}" for phrase in phrases]
    assert not found, "\n" + "\n".join(found)
