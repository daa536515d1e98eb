"""The wheel outside of the repository, the pinned versions, and the Makefile."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from run_cli import ROOT

PRESETS = sorted(path.name for path in (ROOT / "configs").iterdir() if path.is_dir())


def pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder outside of the repository."""
    folder = tmp_path_factory.mktemp("site")
    pip("install", "-q", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


def installed(site: Path, cwd: Path, *arguments: str) -> str:
    """Run the installed `rlhf` with this environment's libraries; return its stdout."""
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(site / "bin/rlhf"), *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_every_file_of_the_package_and_each_config_once(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    files = [path for folder in ("rlhf_cli", "configs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    expected = {re.sub(r"^configs/", "rlhf_cli/configs/", name) for name in expected}
    assert sorted(names) == sorted(expected)
    assert any(name.startswith("rlhf_cli/configs/demo/") for name in names)


@pytest.mark.full
def test_the_installed_command_runs_from_the_wheel_with_every_preset(site: Path, tmp_path: Path) -> None:
    listed = [line.split()[0] for line in installed(site, tmp_path, "init", "--list").splitlines()[1:]]
    assert sorted(listed) == PRESETS
    assert "Inspect:" in installed(site, tmp_path, "--help")
    installed(site, tmp_path, "init", "ci", "run")
    planned = installed(site, tmp_path, "run", "run", "--dry-run").splitlines()
    assert [line.split()[0] for line in planned] == ["sft", "reward", "ppo", "eval"]


def test_every_dependency_is_pinned_inside_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    expected = [text for text in (*project["dependencies"], *extras) if not text.startswith("rlhf-cli[")]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {name.lower(): version for name, _, version in (line.partition("==") for line in lines) if version}
    for requirement in map(Requirement, expected):
        assert pins[requirement.name.lower()] in requirement.specifier, requirement
    assert pins["torch"] == "2.13.0"


def roots_of(name: str) -> set[str]:
    """What an installed distribution lets one import."""
    with suppress(metadata.PackageNotFoundError):
        top_level = metadata.distribution(name).read_text("top_level.txt") or ""
        return set(top_level.split()) or {file.parts[0].removesuffix(".py") for file in metadata.files(name) or ()}
    return set()


@pytest.mark.full
def test_imported_packages_are_the_declared_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: {Requirement(text).name for text in texts} for name, texts in project["optional-dependencies"].items()
    }
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    theirs = {root: name for name in sorted(declared.union(*extras.values())) for root in roots_of(name)}
    found: set[str] = set()
    for path in (ROOT / "rlhf_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"rlhf_cli"}
            found |= {canonicalize_name(theirs.get(root, root)) for root in roots}
    # torch has tensorboard's writer; DeepSpeed, MLflow and Comet are the user's to install; pydantic pins its own core.
    others = extras["judge"] | extras["label"] | extras["qlora"] | extras["verifiers"]
    others |= extras["trackers"] - {"tensorboard"}
    others |= {"deepspeed", "pydantic-core", "mlflow", "comet-ml"}
    assert found - declared == others
    assert declared <= found


# make


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout


def test_make_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    listed = {name for line in make().splitlines() for name in line[:24].split()}
    assert listed == set(phony[1].split())


@pytest.mark.parametrize(("target", "stamp"), [("demo", ".installed"), ("test", ".installed-test")])
def test_a_second_make_installs_nothing_until_a_pin_changes(tmp_path: Path, target: str, stamp: str) -> None:
    venv = f"VENV={tmp_path}"
    assert "-m pip install" in make("-n", target, venv)
    (tmp_path / stamp).touch()
    assert "-m pip install" not in make("-n", target, venv)
    os.utime(tmp_path / stamp, (1, 1))
    assert "-m pip install" in make("-n", target, venv)


@pytest.mark.parametrize(
    ("config", "run", "preset"),
    [("configs/ci", "runs/ci", "ci"), ("configs/ci/ppo.yaml", "runs/ci", "ci"), ("some/run/", "some/run", None)],
)
def test_make_runs_a_stage_of_a_preset_or_of_a_folder(config: str, run: str, preset: str | None) -> None:
    planned = make("-n", "ppo", f"CONFIG={config}")
    assert f"rlhf ppo --config {run}/ppo.yaml" in planned
    assert (f'rlhf init "{preset}" "{run}"' in planned) == (preset is not None)
    assert f"rlhf run {run}" in make("-n", "pipeline", f"CONFIG={config}")


# Workflows


PAGE = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
OURS = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```yml\n(.*?)```", PAGE, re.DOTALL)


def steps(workflow: str, job: str) -> list[str]:
    jobs = yaml.safe_load(workflow)
    assert jobs[True], "YAML 1.1 reads `on` as True"
    return [step["run"] for step in jobs["jobs"][job]["steps"] if "run" in step]


def test_our_workflow_runs_the_targets_of_the_script_and_tests_both_bounds() -> None:
    """`scripts/lowest.py` prints each lower bound of pyproject.toml, extras included."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    made = " ".join(re.findall(r"^make VENV=\S+ ([^|\n]*)", script, re.MULTILINE)).split()
    targets = [word for word in made if word.isalpha()]
    assert sorted(steps(OURS, "test")) == sorted(f"make {target}" for target in targets)
    job = yaml.safe_load(OURS)["jobs"]["bounds"]
    assert job["strategy"]["matrix"] == {"versions": ["newest", "lowest"]}
    *_, tests = steps(OURS, "bounds")
    files = re.findall(r"tests/[\w/]+\.py", tests)
    assert len(files) > 5 and all((ROOT / file).is_file() for file in files)
    lowest = runpy.run_path(str(ROOT / "scripts/lowest.py"))["lowest"](["torch==2.13.0"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["qlora"]]
    versions = dict(line.split("==") for line in lowest)
    assert versions.pop("torch") == "2.13.0"
    assert [text for text in texts if f">={versions.get(Requirement(text).name, '')}" not in text] == []


def test_the_example_workflow_is_the_tiny_chain_and_keeps_its_report() -> None:
    install, *rest = steps(EXAMPLE, "smoke")
    assert install.startswith("pip install ") and install.endswith(" -c rlhf-cli/constraints.txt ./rlhf-cli")
    assert rest == ["rlhf init ci smoke", "rlhf run smoke", "rlhf report smoke --markdown"]
    assert "smoke/eval/report.html" in EXAMPLE


def test_a_release_is_cited_by_its_version_and_tried_as_here() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == metadata.version("rlhf-cli")
    release = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    (trial,) = steps(release, "try")
    assert trial == "scripts/try_wheel.sh dist/*.whl python"
    assert trial.removesuffix("python") + "$(PYTHONS)" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_image_copies_files_that_are_there_and_installs_extras_that_are_declared() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (extras,) = re.findall(r"'\.\[(.*)\]'", "\n".join(lines))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
