"""The lowest version that pyproject.toml allows of each library, as a constraints file: what CI's job `bounds` takes.

`python scripts/lowest.py torch==2.13.0 > lowest.txt`: what is named takes the place of the lower bound.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def lowest(names: list[str]) -> list[str]:
    """`name==version` of each dependency, extras' too; those of the tests as constraints.txt pins them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for name, each in extras.items() if name != "test" for text in each)]
    bounds = {}
    for wanted in map(Requirement, texts):
        (bounds[wanted.name],) = (each.version for each in wanted.specifier if each.operator == ">=")
    for name, _, version in (text.partition("==") for text in names):
        bounds[name] = version
    return [f"{name}=={version}" for name, version in bounds.items()]


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
