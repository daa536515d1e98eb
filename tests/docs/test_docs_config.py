"""docs/config.md is what scripts/config_reference.py generates from the code."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "scripts/config_reference.py"))["page"]()
    assert made == (ROOT / "docs/config.md").read_text(encoding="utf-8"), "run: python scripts/config_reference.py"
