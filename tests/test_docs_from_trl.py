"""docs/results/trl-options.md: tables and example are current."""

import re
import runpy
from pathlib import Path

import pytest

from rlhf_cli.commands.convert.versions import NEW, OLD, OPTIONS
from rlhf_cli.config.aliases import ALIASES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/results/trl-options.md").read_text(encoding="utf-8")


def test_the_tables_and_the_example_are_current() -> None:
    made = runpy.run_path(str(ROOT / "scripts/from_trl_page.py"))["page"](PAGE)
    assert made == PAGE, "run: python scripts/from_trl_page.py"


@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_option_and_every_reason_is_on_the_page(version: str) -> None:
    table = PAGE.partition(f"<!-- options of TRL {version} -->")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(OPTIONS[version])
    assert all(alias.note in PAGE for alias in ALIASES.values() if alias.key is None)
