"""The floors of the house: a module imports only from floors below its own, and stands on exactly one of them."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "rlhf_cli"
# From the ground up. `name.*` is a folder: one room, whose modules may import one another.
FLOORS = [
    {"__init__", "codes"},
    {"errors"},
    {"rows", "terminal", "statistics", "signals", "ppo.settings", "ppo.records", "ppo.formulas", "ppo.seeds"},
    {"config.*", "checkpoints.*", "verdict"},
    {"models.*", "data.*", "tracking", "ppo.advantages", "ppo.optimizer"},
    {"ppo.rollout", "ppo.rewards"},
    {"ppo.trainer"},
    {"ppo"},
    {"stages.trl_training", "demo.*"},
    {"stages", "stages.sft", "stages.reward", "stages.ppo.*", "stages.eval", "pipeline", "presets"},
    {"cli", "__main__"},
]
TORCH_FREE = "cli checkpoints config pipeline ppo.settings presets rows signals statistics terminal verdict"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def stands(module: str) -> tuple[int, str]:
    """The floor and the room of a module; fails where there is not exactly one."""
    names = {module, f"{module}.*", f"{module.rpartition('.')[0]}.*"}
    found = [(height, room) for height, floor in enumerate(FLOORS) for room in floor & names]
    assert len(found) == 1, f"{module} stands on {found or 'no floor'}"
    return found[0]


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.removeprefix("rlhf_cli.") for name in found if name.startswith("rlhf_cli.")} & MODULES.keys() - {
        module
    }


def test_every_module_imports_only_from_below() -> None:
    for module in MODULES:
        floor, room = stands(module)
        for other in imports(module):
            below, its_room = stands(other)
            assert below < floor or its_room == room, f"{module} (floor {floor}) imports {other} (floor {below})"


def test_no_circles_inside_a_room() -> None:
    rooms = {module: {other for other in imports(module) if MODULES[other].name != "__init__.py"} for module in MODULES}
    TopologicalSorter(rooms).prepare()


def test_floors_name_only_what_exists() -> None:
    rooms = {stands(module)[1] for module in MODULES}
    assert rooms == set().union(*FLOORS)


def test_light_modules_import_nothing_heavy() -> None:
    names = " ".join(f"import rlhf_cli.{name};" for name in TORCH_FREE.split())
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'numpy', 'scipy', 'rich'} & sys.modules.keys()"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; {names} print({heavy})"], capture_output=True, text=True
    )
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
