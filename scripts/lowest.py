"""Print a constraints file with the lowest version of each library that pyproject.toml allows, for CI's job `bounds`.

`python scripts/lowest.py torch==2.13.0 > lowest.txt`: arguments replace the lower bound of a library.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def lowest(names: list[str]) -> list[str]:
    """Return `name==version` of each dependency, including extras except those of tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = list(project["dependencies"])
    for name, extra in extras.items():
        if name not in ("test", "browser"):
            texts += extra
    bounds = {}
    for requirement in map(Requirement, texts):
        (bounds[requirement.name],) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    for name, _, version in (text.partition("==") for text in names):
        bounds[name] = version
    return [f"{name}=={version}" for name, version in bounds.items()]


if __name__ == "__main__":
    print("\n".join(lowest(sys.argv[1:])))
