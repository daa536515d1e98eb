"""The files of `rlhf launch`, as bash, shellcheck, Kubernetes, Kubeflow and SkyPilot read them.

Modules: `commands/launch/run.py`.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from bad_inputs import replace
from run_cli import ROOT, must_succeed, rlhf

from rlhf_cli.commands.launch.engines import ENGINES, render
from rlhf_cli.commands.launch.job import Job

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_progress_lines")]
JOBSET = yaml.safe_load(Path(__file__).with_name("jobset_schema.yaml").read_text())
KUBERNETES = "1.34"
EXTRA = "pip install -e '.[launch-test]'"
SECRET = "hf_" + 30 * "x"
ARGUMENTS = ("--gpu", "h100", "--gpus", "2", "--nodes", "3")
EXAMPLE = Job(
    command="rlhf launch slurm runs/first --nodes 2 --gpus 8 --gpu h100",
    name="rlhf-first",
    run=Path("/shared/runs/first"),
    python="/shared/venv/bin/python",
    stages=("sft", "reward", "ppo", "eval"),
    nodes=2,
    servers=0,
    server=None,
    gpus=8,
    gpu="h100",
    cpus=64,
    memory_gib=258,
    planned_seconds=41000.0,
    is_bound=True,
    is_measured=False,
    stop_seconds=210,
    image=None,
    partition=None,
)
# name -> engine, with a server, whose model is written by PPO
CASES = {
    "slurm": ("slurm", False, False),
    "slurm with a server": ("slurm", True, False),
    "slurm with a server of a tied model": ("slurm", True, True),
    "skypilot": ("skypilot", False, False),
    "skypilot with a server": ("skypilot", True, False),
    "jobset": ("jobset", False, False),
    "jobset with a server": ("jobset", True, False),
    "jobset with a server of a tied model": ("jobset", True, True),
    "trainjob": ("trainjob", False, False),
}


def print_file(name: str) -> str:
    """Return the file of a case, for the run in the working directory."""
    engine, has_server, is_tied = CASES[name]
    servers = ["--servers", "2"] if has_server else []
    if has_server:
        replace("ppo.yaml", "scorer}", "scorer, engine: {vllm: {url: http://127.0.0.1:8000}}}")
    if not is_tied:
        replace("model/config.json", '"tie_word_embeddings": true', '"tie_word_embeddings": false')
    return str(must_succeed(rlhf("launch", engine, ".", *ARGUMENTS, *servers)).stdout)


def documents(text: str) -> list[Any]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in a YAML document."""
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(each)


def scripts(text: str) -> list[str]:
    """Return the shell scripts of a file."""
    if text.startswith("#!"):
        return [text]
    found = [each for document in documents(text) for each in strings(document) if "set -euo pipefail" in each]
    return [f"#!/bin/bash\n{script}" for script in found]


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("jobset with a server", r"http://(rlhf-[a-z0-9-]+)-rollouts-0-{number}\.\1:8000"),
        ("skypilot with a server", r"http://rollouts-{number}\.rlhf-[a-z0-9-]+:8000"),
    ],
)
def test_the_trainers_know_the_address_of_each_server(name: str, url: str, three: Path) -> None:
    (found,) = re.findall(r"export RLHF_ROLLOUT_URLS=(\S+)", print_file(name))
    first, second = found.split(",")
    assert re.fullmatch(url.format(number=0), first) and re.fullmatch(url.format(number=1), second)


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_right_for_bash_and_shellcheck_and_hold_no_secret(
    name: str, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, SECRET)
    text = print_file(name)
    assert SECRET not in text

    found = scripts(text)
    has_server_of_its_own = CASES[name][1] and not text.startswith("#!")
    assert len(found) == 1 + has_server_of_its_own
    for script in found:
        bash = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (bash.returncode, bash.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: only bash -n has read the scripts")
    for script in found:
        options = "SC2154" if not text.startswith("#!") else "SC0000"  # variables that the scheduler sets
        check = subprocess.run(
            ["shellcheck", f"--exclude={options}", "-"], input=script, capture_output=True, text=True, check=False
        )
        assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("name", [name for name in CASES if "jobset" in name])
def test_jobset_and_its_jobs_are_valid(name: str, three: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=EXTRA).validate
    claim, jobset = documents(print_file(name))
    validate(claim, KUBERNETES, strict=True)
    jsonschema.validate(jobset, JOBSET)
    for job in jobset["spec"]["replicatedJobs"]:
        template = job["template"]
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **template},
            KUBERNETES,
            strict=True,
        )
        (container,) = template["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**jobset, "spec": {**jobset["spec"], "restarts": 3}}, JOBSET)


def test_trainjob_is_valid(three: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=EXTRA).validate
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=EXTRA)
    claim, job = documents(print_file("trainjob"))
    validate(claim, KUBERNETES, strict=True)
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read is not None and read.to_dict() == job  # a key that the model does not have would be lost
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    containers = [{"name": "node", "image": "rlhf", **container} for container in pod["containers"]]
    spec = {**pod, "containers": containers}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": spec}, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", [name for name in CASES if "skypilot" in name])
def test_skypilot_reads_its_file(name: str, three: Path) -> None:
    sky = pytest.importorskip("sky", reason=EXTRA)
    from sky.utils import dag_utils

    text = print_file(name)
    *header, trainer = documents(text) if len(documents(text)) == 1 else documents(text)[:2]
    task = sky.Task.from_yaml_config(trainer)
    assert (task.num_nodes, task.run.splitlines()[0]) == (3 - 2 * len(header), "rank=$SKYPILOT_NODE_RANK")
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 2}
    if header:
        group = dag_utils.load_job_group_from_yaml_str(text)
        assert [task.name for task in group.tasks] == ["trainer", "rollouts"] and group.primary_tasks == ["trainer"]


def test_the_page_shows_lines_of_the_files() -> None:
    page = (ROOT / "docs/launch.md").read_text()
    sections = dict(
        zip(("slurm", "jobset", "trainjob", "skypilot"), re.findall(r"```text\n(.*?)```", page, re.S), strict=True)
    )
    for name, excerpt in sections.items():
        lines = render(ENGINES[name], EXAMPLE).splitlines()
        assert [line for line in excerpt.splitlines() if line not in ("...", *lines)] == [], name


def test_every_engine_has_a_case() -> None:
    assert {engine for engine, _, _ in CASES.values()} == set(ENGINES)
