"""Sections and tables of the pages in docs/."""

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
EVALUATION = (DOCS / "report-json.md").read_text(encoding="utf-8")
ALGORITHM_PAGES = sorted(path.name for path in DOCS.glob("ppo*.md"))
ALGORITHM = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ALGORITHM_PAGES)


def section(text: str, title: str) -> str:
    """Everything below the headings that begin with the title."""
    found = [part for part in re.split(r"^## ", text, flags=re.M) if part.startswith(title)]
    assert found, title
    return "\n".join(found)


def cells(text: str) -> Iterator[list[str]]:
    """The rows of the Markdown tables, heads and rulers left out."""
    table = False
    for line in text.splitlines():
        if re.match(r"\|[-| ]+\|$", line):
            table = True
        elif not line.startswith("|"):
            table = False
        elif table:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]
