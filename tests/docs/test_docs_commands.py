"""Commands and YAML of the documents: every command, flag and key exists."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml
from run_cli import ROOT

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
    return ", ".join(key for key in keys if not any(config.accepts_key(stage, key) for stage in stages))


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
