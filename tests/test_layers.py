"""Layers of the house: a package imports only from packages below it, and no module import is circular."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "rlhf_cli"
# From the ground up; the modules at the top of rlhf_cli/ and the table of error codes are below all packages.
LAYERS = ("config", "tracking", "data", "runs", "models", "rewards", "evaluation", "ppo", "stages", "demo")
LAYERS += ("commands", "cli", "__main__")
TORCH_FREE = (
    "cli commands.explain commands.check commands.convert commands.init commands.report commands.run commands.status "
    "config distributed errors files jsonl progress runs statistics system terminal tracking"
)


def layer(module: str) -> int:
    package = module.split(".")[0]
    return LAYERS.index(package) if package in LAYERS else -1


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("rlhf_cli"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("rlhf_cli"))


def test_a_package_imports_only_from_below() -> None:
    for path in ROOT.rglob("*.py"):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for name in imports(path):
            target = name.removeprefix("rlhf_cli").removeprefix(".")
            assert layer(target) <= layer(module), f"{module} imports {target} from a higher layer"


def test_the_counts_of_the_house() -> None:
    entries = [path for path in ROOT.iterdir() if path.name != "__pycache__"]
    folders = [path for path in entries if path.is_dir()]
    modules = [path for path in entries if path.suffix == ".py" and not path.name.startswith("__")]
    assert len(folders) <= 14 and len(modules) <= 8 and len(entries) <= 24
    longest = max(ROOT.rglob("*.py"), key=lambda path: path.read_text(encoding="utf-8").count("\n"))
    assert longest.read_text(encoding="utf-8").count("\n") <= 400, longest


def test_light_modules_import_nothing_heavy() -> None:
    names = " ".join(f"import rlhf_cli.{name};" for name in TORCH_FREE.split())
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'numpy', 'scipy', 'rich'} & sys.modules.keys()"
    command = [sys.executable, "-c", f"import sys; {names} print({heavy})"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
