"""The floors of the house: a module imports only from floors below its own, and stands on exactly one of them."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "rlhf_cli"
# From the ground up. `name.*` is a folder: one room, whose modules may import one another.
FLOORS = [
    {"__init__", "codes.*", "redaction", "run_folders", "times"},
    {"errors"},
    {"processes"},
    {"told"},
    {"rows", "terminal", "statistics", "signals", "room", "ppo.settings.*"},
    {"progress"},
    {"config.*"},
    {"sources.*"},
    {"checkpoints.*"},
    {"trackers.*"},
    {"models.*", "data.*", "tracking", "evaluation.*", "from_trl.*", "ppo.losses"},
    {"report.*", "replay.naive.*", "rewards.*"},
    {"explain", "ending", "init_folder", "ppo.scores", "ppo.rollout", "ppo.optimizer"},
    {"ppo.experience"},
    {"ppo.metrics"},
    {"ppo.monitor"},
    {"ppo.forward_backward"},
    {"ppo.trainer"},
    {"ppo"},
    {"inputs.*"},
    {"stages", "stages.trl_training", "demo.*", "preferences.*"},
    {"stages.ppo_setup", "stages.eval_setup"},
    {"stages.ppo_samples"},
    {"stages.sft", "stages.reward", "stages.ppo", "stages.eval", "pipeline", "presets"},
    {
        "check.*",
        "plan.*",
        "export.sameness",
        "chat.*",
        "status.*",
        "replay.compare",
        "replay.float64",
        "replay.recorded",
    },
    {"replay.observe", "export.card.*"},
    {"replay", "export"},
    {"launch"},
    {"cli.*"},
    {"__main__"},
]
TORCH_FREE = (
    "check cli checkpoints config ending evaluation.render evaluation.summary explain from_trl pipeline ppo.settings "
    "presets processes progress report room rows run_folders signals sources statistics status terminal times told "
    "trackers"
)
FILES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def stands(module: str) -> tuple[int, str]:
    """The floor and the room of a module; fails where there is not exactly one."""
    names = {module, f"{module}.*", f"{module.rpartition('.')[0]}.*"}
    found = [(height, room) for height, floor in enumerate(FLOORS) for room in floor & names]
    assert len(found) == 1, f"{module} stands on {found or 'no floor'}"
    return found[0]


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{module}: relative import"
            source = node.module.removeprefix("rlhf_cli").removeprefix(".")
            names = {f"{source}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= names & MODULES.keys() or {source}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("rlhf_cli.") for alias in node.names if "rlhf_cli" in alias.name}
    return found & MODULES.keys() - {module}


def test_every_module_imports_only_from_below() -> None:
    for module in MODULES:
        floor, room = stands(module)
        for other in imports(module):
            below, its_room = stands(other)
            assert below < floor or its_room == room, f"{module} (floor {floor}) imports {other} (floor {below})"


def test_no_module_imports_in_a_circle() -> None:
    TopologicalSorter({module: imports(module) for module in MODULES}).prepare()


def test_floors_name_only_what_exists() -> None:
    assert {stands(module)[1] for module in MODULES} == set().union(*FLOORS)


def test_light_modules_import_nothing_heavy() -> None:
    names = " ".join(f"import rlhf_cli.{name};" for name in TORCH_FREE.split())
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'numpy', 'scipy', 'rich'} & sys.modules.keys()"
    command = [sys.executable, "-c", f"import sys; {names} print({heavy})"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
