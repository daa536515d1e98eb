"""Links of the pages lead to a file and a heading, and every page and path that texts name exists."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(path: Path) -> None:
    assert broken_links(path, prose(path)) == []


def test_every_page_that_the_code_names_exists(tracked: list[str]) -> None:
    link = re.compile(r"(?<![\w/])docs/(?!source/)[\w/-]+\.(?:md|txt|svg|png)")
    sources = [name for name in tracked if name.startswith(FOLDERS) and not name.endswith((".gz", ".safetensors"))]
    named = {page for name in sources for page in link.findall((ROOT / name).read_text("utf-8", "ignore"))}
    assert len(named) > 5 and sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_that_a_developers_page_names_exists(page: str) -> None:
    names = {name for name in NAMES.findall((ROOT / page).read_text(encoding="utf-8")) if not name.startswith("..")}
    names -= {"state/step_N", "snapshots/step_N"}  # of a run
    assert "ppo/losses.py" in names and len(names) > 12
    parents = (ROOT, ROOT / "rlhf_cli", ROOT / "tests/helpers/chaos")
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in parents)] == []
