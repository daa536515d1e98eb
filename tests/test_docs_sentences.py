"""What pages and messages name is there: sentences that were false once."""

import re
import subprocess
from pathlib import Path

import pytest
from test_library_page import PROGRAM

ROOT = Path(__file__).parents[1]
READ = {".md", ".py", ".yaml", ".yml", ".txt", ".jinja", ".html", ".json", ".toml"}
NAMES = re.compile(r"`([\w./]*/[\w./]*|\w+\.(?:py|txt|toml))`")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_that_a_developers_page_names_exists(page: str) -> None:
    names = {name for name in NAMES.findall((ROOT / page).read_text(encoding="utf-8")) if not name.startswith("..")}
    names -= {"state/step_N", "snapshots/step_N"}  # of a run
    assert "ppo/losses.py" in names and len(names) > 12
    above = (ROOT, ROOT / "rlhf_cli", ROOT / "tests/chaos")
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in above)] == []


def test_no_text_installs_from_an_index_that_has_no_such_project() -> None:
    """An extra of the clone, `pip install -e '.[trackers]'`, is all there is."""
    wrong = re.compile(r"pip install (-\S+ )*['\"]?rlhf[-_]cli")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    named = listed.stdout.splitlines()
    if not named:
        pytest.skip("no git, which says what belongs to the project")
    files = [ROOT / name for name in named if Path(name).suffix in READ]
    assert len(files) > 400
    found = [path for path in files if path.exists() and wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_librarys_program_imports_nothing_twice() -> None:
    imports = [line for line in PROGRAM.splitlines() if line.startswith(("import ", "from "))]
    assert len(set(imports)) == len(imports)
