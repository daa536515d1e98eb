"""docs/from-trl.md: its tables are those of the code, and its example says and writes what the page shows."""

import re
import runpy
from pathlib import Path

import pytest
from test_cli import rlhf

from rlhf_cli.config.foreign import FOREIGN
from rlhf_cli.from_trl.versions import NEW, OLD, OPTIONS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/from-trl.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


def test_the_tables_are_current() -> None:
    made = runpy.run_path(str(ROOT / "scripts/from_trl_tables.py"))["page"](PAGE)
    assert made == PAGE, "run: python scripts/from_trl_tables.py"


@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_option_and_every_reason_is_on_the_page(version: str) -> None:
    table = PAGE.partition(f"<!-- options of TRL {version} -->")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(OPTIONS[version])
    assert all(foreign.why in PAGE for foreign in FOREIGN.values() if foreign.key is None)


def test_the_example_says_and_writes_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (text for language, text in BLOCKS if language == "python")
    (written,) = (text for language, text in BLOCKS if language == "yaml")
    Path("train.py").write_text(script, encoding="utf-8")
    result = rlhf("init", "--from-trl", "train.py", "runs/mine")
    assert result.stdout in [text for language, text in BLOCKS if not language]
    assert Path("runs/mine/ppo.yaml").read_text(encoding="utf-8") == written
