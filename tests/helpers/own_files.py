"""The tests' own files, wherever they stand."""

from pathlib import Path


def source_of(name: str) -> str:
    (path,) = Path(__file__).parents[1].rglob(name)
    return path.read_text(encoding="utf-8")
