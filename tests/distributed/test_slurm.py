"""The file of `rlhf launch slurm`, submitted to a real Slurm of two nodes: `make slurm-test`, as root."""

import filecmp
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from run_cli import ROOT, child, must_succeed

pytestmark = pytest.mark.slurm
CLUSTER = ROOT / "scripts/slurm_two_nodes.sh"
SECOND_NODE = "127.0.0.3"
WAIT_S = 1200  # for two busy cores; a quiet machine needs a minute
WRITTEN = (
    *(f"{stage}/model/model.safetensors" for stage in ("sft", "reward", "ppo")),
    *("ppo/value/model.safetensors", "ppo/samples.jsonl", "eval/samples.jsonl"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Slurm of two nodes with one core each; this process talks to it."""
    folder = tmp_path_factory.mktemp("slurm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        subprocess.run([CLUSTER, "start", folder], check=True, timeout=60)
        try:
            yield folder
        finally:
            subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain in two processes, without Slurm and without a stop."""
    run = new_run(tmp_path_factory.mktemp("straight"))
    must_succeed(child("run", run, "--nproc", 2, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    return run


def new_run(folder: Path) -> Path:
    """Return a run of the ci preset with a PPO that takes long enough to be stopped twice."""
    run = folder / "ci"
    must_succeed(child("init", "ci", run))
    file = run / "sft.yaml"
    file.write_text(file.read_text().replace("max_steps: 200", "max_steps: 300"))
    ppo = run / "ppo.yaml"
    ppo.write_text(ppo.read_text().replace("total_episodes: 96", "total_episodes: 1280"))
    return run


def printed(run: Path, **edits: str) -> Path:
    """Return the file for two nodes, after edits of its lines: what stands behind NAME= in it."""
    file = run.parent / "ci.sbatch"
    must_succeed(child("launch", "slurm", run, "--nodes", 2, "--cpus", 1, "--out", file))
    text = file.read_text()
    for old, new in edits.items():
        text, count = re.subn(old, new, text)
        assert count == 1, old
    file.write_text(text)
    return file


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not seen: {what}"
        time.sleep(0.5)


class Job:
    """A submitted job of a run."""

    def __init__(self, run: Path, file: Path) -> None:
        self.run = run
        self.number = slurm("sbatch", "--parsable", str(file))

    @property
    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", slurm("scontrol", "show", "job", self.number))[0]

    @property
    def output(self) -> str:
        """What the script printed, in all attempts, and the logs of its steps."""
        files = [self.run / f"slurm-{self.number}.out", *sorted(self.run.glob("launch/*/*.log"))]
        return "\n".join(f"== {file}\n{file.read_text()}" for file in files if file.exists())

    def attempt(self, number: int) -> None:
        """Wait until an attempt has started."""
        folder = self.run / "launch" / f"{self.number}-{number}"
        wait_until(folder.is_dir, f"attempt {number}: {self.output}")

    def progress(self) -> None:
        """Wait until PPO logs its next step."""
        begin = time.time()
        log = self.run / "ppo/metrics.jsonl"
        wait_until(lambda: log.exists() and log.stat().st_mtime > begin, f"a step: {self.output}")


def kill_node(name: str, cluster: Path) -> None:
    """Kill all processes of a node at once, as when its machine loses power."""
    victims = {psutil.Process(int((cluster / f"slurmd-{name}.pid").read_text()))}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if variables.get("SLURMD_NODENAME") == name and variables.get("SLURM_CONF") == str(cluster / "slurm.conf"):
            parent = process.parent()
            victims |= {process, parent} if parent and parent.name().startswith("slurmstepd") else {process}
    for process in victims:
        process.send_signal(signal.SIGKILL)


def test_a_job_stopped_by_its_limit_by_a_signal_and_by_a_dead_node_ends_in_the_same_bytes(
    cluster: Path, straight: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    limit = {r"--time=\S+": "--time=2"}  # minutes: TERM comes within one
    job = Job(run, printed(run, **limit, **{"SECONDS > 600": "SECONDS > 0"}))

    job.attempt(1)
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.progress()
    slurm("scancel", "--batch", "--signal=TERM", job.number)

    job.attempt(2)
    job.progress()
    kill_node(SECOND_NODE, cluster)
    wait_until(lambda: job.state != "RUNNING", f"the end of attempt 2: {job.output}")
    subprocess.run([CLUSTER, "node", cluster, SECOND_NODE.rpartition(".")[2]], check=True, timeout=60)

    job.attempt(3)
    wait_until(lambda: job.state in ("COMPLETED", "FAILED"), f"the end: {job.output}")
    assert job.state == "COMPLETED", job.output
    assert job.output.count("queued again\n") >= 2 and "saved; the same command resumes" in job.output, job.output
    assert "resumes at step" in job.output
    for name in WRITTEN:
        assert filecmp.cmp(run / name, straight / name, shallow=False), name


def test_scancel_ends_the_job_for_good_and_submitted_again_it_ends_in_the_same_bytes(
    cluster: Path, straight: Path, tmp_path: Path
) -> None:
    """Slurm sends TERM, and KILL after KillWait, 30 s: the trainers save, and nothing is queued again."""
    run = new_run(tmp_path)
    file = printed(run)
    job = Job(run, file)
    job.progress()
    slurm("scancel", job.number)
    wait_until(lambda: job.state == "CANCELLED", f"the end: {job.output}")
    assert "queued again" not in job.output and not (run / "eval/manifest.json").exists(), job.output

    again = Job(run, file)
    wait_until(lambda: again.state in ("COMPLETED", "FAILED"), f"the end: {again.output}")
    assert again.state == "COMPLETED" and "resumes at step" in again.output, again.output
    for name in WRITTEN:
        assert filecmp.cmp(run / name, straight / name, shallow=False), name


def test_what_is_wrong_with_the_file_is_told_in_the_words_of_slurm(cluster: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    file = printed(run, **{r"##SBATCH --partition=NAME": "#SBATCH --partition=nowhere"})
    refused = subprocess.run(["sbatch", file], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "invalid partition specified: nowhere" in refused.stderr


def test_a_stage_that_is_wrong_is_not_queued_again(cluster: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    file = printed(run)
    shutil.rmtree(run / "data")
    job = Job(run, file)
    wait_until(lambda: job.state in ("COMPLETED", "FAILED"), "the end")
    assert job.state == "FAILED" and "error[D01]" in job.output and "queued again" not in job.output, job.output
    assert not list(run.glob("launch/*/*.log"))
