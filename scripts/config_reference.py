"""Generate docs/config.md: every key of every file, as `rlhf explain --all` prints it.

The keys, their bounds, defaults and sources are those of rlhf_cli/config and rlhf_cli/ppo/settings.
"""

import re
from itertools import groupby
from pathlib import Path

from rlhf_cli.explain import Entry, every_key

PAGE = Path(__file__).parents[1] / "docs/config.md"
HEAD = """# Configuration reference

Every key of sft.yaml, reward.yaml, ppo.yaml and eval.yaml, with its default, allowed values and meaning. In brackets:
the source of the default (a paper, another system, or a test of this repository). `rlhf explain KEY` prints the same in
a terminal; `rlhf schema STAGE` prints a JSON Schema for [editors](commands.md#editor-support).

`python scripts/config_reference.py` generates this page.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for title, entries in every_key().items():
        parts.append(f"## {title}\n")
        for section, keys in groupby(entries, _section):
            parts += [f"### `{section}`\n"] if section else []
            parts += [_item(entry) for entry in keys]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _section(entry: Entry) -> str:
    return entry.keys[0].partition(".")[0] + ":" if "." in entry.keys[0] else ""


def _item(entry: Entry) -> str:
    facts, names = entry.facts, ", ".join(f"`{key}`" for key in entry.keys)
    lines = [f"- {names} = `{facts.default}`: {_plain(facts.value)}. {_plain(facts.meaning)}"]
    lines += [f"[{_plain(facts.source)}]"] if facts.source else []
    lines += [f"<br>{_plain(recipe)}" for recipe in facts.recipes]
    return " ".join(lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, but for what stands in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*<\[\]|])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
