"""Every figure of the README is in a file that the same section links to."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Phrases with digits that are not results. Add one only if no file could contain it.
NO_FIGURES = [
    "TRL 1.12", "until 1.12", "As of 2026", "Python 3.11",
]  # fmt: skip
NUMBER = r"(?<![\w.:=/-])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w-]|\.\d)"
# With its interval; or a whole number with the next word, because "8" alone occurs everywhere.
FIGURE = re.compile(rf"{NUMBER} \[{NUMBER}, {NUMBER}\]|{NUMBER}(?: ?%| \w+)?")


def flat(text: str) -> str:
    return " ".join(text.split())


def figures(text: str) -> Iterator[str]:
    """Yield the figures of a text as they must occur in the source."""
    for found in FIGURE.findall(flat(text)):
        number = found.split()[0]
        if "[" in found or re.fullmatch(r"-?\d+%?", number):
            yield found
        else:
            yield f"{float(number):g}" if "e" in number else number


def sections(readme: str) -> Iterator[tuple[str, list[str], list[Path]]]:
    """Yield each section's prose, the lines of its output blocks, and the linked files."""
    for part in re.split(r"^## ", readme, flags=re.M):
        links = re.findall(r"\]\((docs/[\w/.-]+\.(?:md|txt))\)", part)
        fences = re.findall(r"^```(\w*)\n(.*?)^```", part, flags=re.M | re.S)
        blocks = [block for language, block in fences if not language]  # a block with a language is not output
        lines = [_without_phrases(line) for block in blocks for line in block.splitlines()]
        prose = re.sub(r"^```.*?^```|`[^`]+`|\]\([^)]*\)", " ", part, flags=re.M | re.S)
        yield _without_phrases(prose), lines, [ROOT / link for link in links if (ROOT / link).exists()]


def _without_phrases(text: str) -> str:
    text = flat(text)
    for phrase in NO_FIGURES:
        text = text.replace(phrase, "")
    return text


def unsourced(readme: str) -> list[str]:
    """Return the figures and lines of output that no linked file of their section has."""
    missing = []
    for prose, output, files in sections(readme):
        source = " ".join(flat(file.read_text(encoding="utf-8")) for file in files)
        known = set(figures(source))
        known |= {figure.split()[0] for figure in known if "[" in figure}  # quoted without the interval
        missing += [figure for figure in figures(prose) if figure not in known]
        lines = [line.removesuffix(" ...") for line in output if any(figures(line))]
        missing += [line for line in lines if line not in source]
    return missing


def test_every_figure_is_in_a_file_that_its_section_links_to() -> None:
    assert unsourced(README) == []


def test_a_figure_or_a_line_of_output_without_a_source_is_found() -> None:
    linked = "as [docs/results/demo.md](docs/results/demo.md) has it."
    for figure in ("0.123", "0.895 [0.851, 0.927]", "77 %", "19 minutes", "-0.5", "3e-09"):
        assert unsourced(f"{README}\n## New\n\nIt is {figure}, {linked}\n") == [figure]
    (line,) = unsourced(README.replace("0.898 [0.875, 0.919]\n", "0.899 [0.875, 0.919]\n"))
    assert line.startswith("PPO ") and line.endswith("0.899 [0.875, 0.919]")
