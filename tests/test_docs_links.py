"""Every relative link of README, CONTRIBUTING, CHANGELOG and docs/ leads to a file and a heading.

Every page that code, configs, schemas and scripts name exists.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"(?ms)^(`{3,}).*?^\1", "", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(path))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken(path: Path, text: str) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not link.startswith(("http://", "https://")):
            known = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
            found += [] if known else [link]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(path: Path) -> None:
    assert broken(path, prose(path)) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](nowhere.md) [b](README.md#nowhere) [c](https://example.org) [d](README.md)"
    assert broken(ROOT / "README.md", text) == ["nowhere.md", "README.md#nowhere"]


def test_every_page_that_the_code_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    folders = ("rlhf_cli/", "configs/", "schemas/", "scripts/", "benchmarks/", "tests/test_", "Makefile")
    files = [ROOT / name for name in listed.stdout.splitlines() if name.startswith(folders)]
    if not files:
        pytest.skip("not a git checkout")
    named = {
        name
        for path in files
        if path.is_file() and path.suffix not in (".gz", ".safetensors")
        for name in re.findall(
            r"(?<![\w/])docs/(?!source/)[\w/-]+\.(?:md|txt|svg|png)", path.read_text("utf-8", "ignore")
        )
    }
    assert len(named) > 5 and sorted(name for name in named if not (ROOT / name).exists()) == []
