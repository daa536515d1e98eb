"""Show where the code is hard to read: AST nodes a line by package and file, and ruff's complexity rules.

Run `make complexity`. A place to look at, not a limit: nothing fails. Below seven nodes a line a reader need not unfold
lines; torchtitan, tinker-cookbook, TRL and nanochat have four to six.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlhf_cli"
RULES = "C901,PLR0911,PLR0912,PLR0913,PLR0914,PLR0915"
NUM_FILES = 10


def measure(path: Path) -> tuple[int, int]:
    """Return the AST nodes and the lines of a file."""
    text = path.read_text(encoding="utf-8")
    nodes = sum(1 for _ in ast.walk(ast.parse(text)))
    return nodes, text.count("\n")


def print_density() -> None:
    """Print a line for each package, and the densest files."""
    packages: dict[str, list[tuple[int, int]]] = defaultdict(list)
    files: list[tuple[float, int, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes, lines = measure(path)
        name = path.relative_to(PACKAGE)
        package = name.parts[0] if len(name.parts) > 1 else "(top level)"
        packages[package].append((nodes, lines))
        if lines >= 20:
            files.append((nodes / lines, lines, name.as_posix()))
    packages["all"] = [sizes for each in list(packages.values()) for sizes in each]

    print(f"{'package':<14}{'files':>6}{'lines':>8}{'nodes':>9}{'a line':>8}")
    for package, sizes in packages.items():
        nodes = sum(size[0] for size in sizes)
        lines = sum(size[1] for size in sizes)
        print(f"{package:<14}{len(sizes):>6}{lines:>8}{nodes:>9}{nodes / max(1, lines):>8.1f}")

    print("\ndensest files:")
    for density, lines, name in sorted(files, reverse=True)[:NUM_FILES]:
        print(f"  {density:4.1f} nodes a line, {lines:3d} lines: {name}")


def main() -> None:
    """Print both."""
    print_density()
    print("\nruff:", flush=True)
    ruff = Path(sys.executable).with_name("ruff")
    options = ["--select", RULES, "--preview", "--output-format", "concise", "--exit-zero"]
    subprocess.run([ruff, "check", *options, PACKAGE], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
