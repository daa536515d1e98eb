"""Layers of the house: a package imports only from packages below it, and no module import is circular."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType

import pytest
from run_cli import python

from rlhf_cli import runs
from rlhf_cli.config import loading
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.models import load
from rlhf_cli.stages.ppo.run import run

ROOT = Path(__file__).parents[2] / "rlhf_cli"
# From the ground up; the modules at the top of rlhf_cli/ and the table of error codes are below all packages.
LAYERS = ("config", "tracking", "data", "runs", "judges", "models", "rewards", "evaluation", "ppo", "planning")
LAYERS += ("stages", "demo", "report", "pipeline", "commands", "cli", "__main__")
LAYERS += ("experimental",)  # above all: nothing imports it, but by the name of a config
# Within config/: the machinery knows no schema, and what needs all schemas is above them.
CONFIG_LAYERS = (
    {"sources", "machinery"},
    {"base"},
    {"sections", "judges"},
    {"sft", "reward", "dpo", "ppo", "eval"},
    {"stages"},
    {"messages", "loading", "json_schema"},
)
TORCH_FREE = (
    "cli commands.explain commands.convert.write commands.init.presets report.show pipeline.check "
    "pipeline.run pipeline.status commands.status config config.ppo data.sources distributed errors "
    "evaluation.print_report evaluation.reward_model evaluation.reward_card files jsonl progress runs runs.layout "
    "statistics system terminal tracking.logs tracking.trackers"
)


FILES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix("__init__").removesuffix("."): path for name, path in FILES.items()}


def layer(module: str) -> int:
    package = module.split(".")[0]
    if package in LAYERS:
        return LAYERS.index(package)
    assert package == "" or (ROOT / f"{package}.py").is_file(), f"{package} has no layer"
    return -1


@cache
def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.module and node.level == 0, f"{module}: relative import"
            if node.module.split(".")[0] == "rlhf_cli":
                source = node.module.removeprefix("rlhf_cli").removeprefix(".")
                names = {f"{source}.{alias.name}".removeprefix(".") for alias in node.names}
                found |= names & MODULES.keys() or {source}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("rlhf_cli.") for alias in node.names if "rlhf_cli" in alias.name}
    return found - {module}


@pytest.mark.full
def test_a_package_imports_only_from_below_and_no_module_in_a_circle() -> None:
    for module in MODULES:
        for target in imports(module):
            assert layer(target) <= layer(module), f"{module} imports {target} from a higher layer"
    TopologicalSorter({module: imports(module) & MODULES.keys() for module in MODULES}).prepare()


def config_layer(module: str) -> int:
    name = module.split(".")[1]
    (found,) = (number for number, names in enumerate(CONFIG_LAYERS) if name in names)
    return found


def test_the_machinery_of_configs_is_entered_from_one_side() -> None:
    modules = [module for module in MODULES if module.startswith("config.")]
    assert len(modules) > 15
    for module in modules:
        for target in imports(module) & set(modules):
            assert config_layer(target) <= config_layer(module), f"{module} imports {target} from a higher layer"


def test_stages_share_only_what_is_in_common() -> None:
    """best_of makes the rows of SFT: it is a part of that stage."""
    for module in MODULES:
        stage = module.split(".")[1] if module.startswith("stages.") else None
        for target in imports(module) if stage else ():
            if target.startswith("stages."):
                allowed = {stage, "common"} | ({"best_of"} if stage == "sft" else set())
                assert target.split(".")[1] in allowed, f"{module} imports {target} of another stage"


def test_commands_share_only_what_is_in_common() -> None:
    for module in (name for name in MODULES if name.startswith("commands.")):
        command = module.split(".")[1]
        others = {target for target in imports(module) if target.startswith("commands.")}
        assert all(target.split(".")[1] in (command, "common") for target in others), f"{module} imports {others}"


def test_stages_see_one_module_of_the_planner() -> None:
    for module in (name for name in MODULES if name.startswith("stages")):
        seen = {target for target in imports(module) if target.startswith("planning")}
        assert seen <= {"planning.fits"}, f"{module} imports {seen}"


@pytest.mark.full
def test_light_modules_import_nothing_heavy() -> None:
    names = " ".join(f"import rlhf_cli.{name};" for name in TORCH_FREE.split())
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'numpy', 'scipy', 'rich'} & sys.modules.keys()"
    result = python("-c", f"import sys; {names} print({heavy})")
    assert (result.stdout.strip(), result.stderr) == ("set()", "")


@pytest.mark.full
def test_a_reader_of_the_ppo_stage_follows_the_config_through_few_functions(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of stages/ that hold the config from `rlhf ppo` until the first model is loaded, in a real run."""
    seen: set[str] = set()

    class ModelIsLoaded(BaseException):
        pass

    def profile(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and ROOT / "stages" in file.parents and isinstance(frame.f_locals.get("config"), PPOConfig):
            seen.add(f"{file.name}:{frame.f_code.co_name}")

    def load_causal_lm(*_: object, **__: object) -> None:
        raise ModelIsLoaded

    monkeypatch.setattr(load, "load_causal_lm", load_causal_lm)
    config = loading.load("ppo", run_folder / "ppo.yaml")
    sys.setprofile(profile)
    try:
        with pytest.raises(ModelIsLoaded):
            run(config, Options())
    finally:
        sys.setprofile(None)
        runs.release()
    assert len(seen) <= 13, sorted(seen)


@pytest.mark.full
def test_each_module_has_its_test_file() -> None:
    """At its path, at that of its package, or one whose docstring names it. Modules under 60 lines may have none."""
    tests = Path(__file__).parents[1]
    docstrings = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in tests.rglob("test_*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", "\n".join(text.partition("Modules: ")[2] for text in docstrings if text)))
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []

    for path in MODULES.values():
        module = path.relative_to(ROOT)
        beside = tests / module.parent
        at_its_path = [*beside.glob(f"test_{module.stem}.py"), *beside.glob(f"test_{module.stem}_*.py")]
        of_its_package = beside.with_name(f"test_{beside.name}.py").is_file()
        long = len(path.read_text(encoding="utf-8").splitlines()) >= 60
        assert at_its_path or of_its_package or str(module) in named or not long, f"{module} has no test file"
