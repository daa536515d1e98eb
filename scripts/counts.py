"""Print the size of the project and its limits: `python scripts/counts.py`; exits 1 if a limit is exceeded."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROWTH = 1.22  # of files and lines since the limits were set, for the features that came after


def sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}


def lines(files: dict[Path, str]) -> int:
    return sum(text.count("\n") for text in files.values())


def function_lengths(text: str) -> list[int]:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [(node.end_lineno or 0) - node.lineno + 1 for node in functions]


def counts() -> dict[str, tuple[int, int]]:
    """Return {description: (count, limit)}."""
    package = sources("rlhf_cli")
    entries = [path for path in (ROOT / "rlhf_cli").iterdir() if path.name != "__pycache__"]
    folders = sum(path.is_dir() for path in entries)
    return {
        "folders at the top of rlhf_cli/": (folders, 14),
        "entries at the top of rlhf_cli/": (len(entries), 24),
        "files in rlhf_cli/": (len(package), round(140 * GROWTH)),
        "lines in rlhf_cli/": (lines(package), round(27_500 * GROWTH)),
        "lines of the longest file": (max(text.count("\n") for text in package.values()), 400),
        "lines of the longest function": (max(n for text in package.values() for n in function_lengths(text)), 60),
        "lines in tests/": (lines(sources("tests")), round(27_000 * GROWTH)),
        "pages in docs/": (len(list((ROOT / "docs").glob("*.md"))), 12),
    }


if __name__ == "__main__":
    rows = counts()
    for description, (count, limit) in rows.items():
        print(f"{description:<34}{count:>8,}  limit {limit:,}{'' if count <= limit else '  EXCEEDED'}")
    sys.exit(any(count > limit for count, limit in rows.values()))
