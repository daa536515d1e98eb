"""PPO in two processes: the numbers of one process, one log, stops, kills, launchers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import group_cases
import pytest
import torch
from ppo_folder import PPO, lines, manifest, ppo, rlhf, untimed, write
from run_cli import is_one_error

from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import parallel
from rlhf_cli.models.parallel import SINGLE_PROCESS

pytestmark = pytest.mark.distributed

HELPERS = Path(__file__).parents[1] / "helpers"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def child(*command: object, timeout: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment() | more)


# The numbers


def one_and_two(folder: Path, *words: str) -> tuple[dict[str, Any], ...]:
    """The results of tests/helpers/group_cases.py in one process, and in each of two, started with `words`."""
    result = child(*TORCHRUN, HELPERS / "group_cases.py", folder / "found", *words)
    assert result.returncode == 0, result.stderr[-3000:]
    ranks = (torch.load(folder / f"found.{rank}", weights_only=False) for rank in (0, 1))
    return group_cases.found(SINGLE_PROCESS), *ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    return one_and_two(tmp_path_factory.mktemp("group"))


NAMES = [f"{name}, torch.float64" for name in group_cases.CASES]
NAMES += [f"{name}, torch.float32" for name in group_cases.ROUGHLY]
NAMES += ["a head on the policy, torch.float64", "one row, torch.float64"]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_like_one(both, name: str) -> None:
    one, first, second = (each[name] for each in both)
    limit = 1e-12 if "float64" in name else 1e-5
    assert one["rollouts"] == first["rollouts"] == second["rollouts"]
    for model in ("policy", "value"):
        assert torch.equal(first[model], second[model])  # to the last bit
        difference = (one[model] - first[model]).norm() / one[model].norm()
        assert difference <= limit, f"{model}: {difference}"
    for ours, theirs, again in zip(one["stats"], first["stats"], second["stats"], strict=True):
        assert theirs == again
        # Only rounding; and the padding depends on the micro-batches.
        noisy = {"policy/first_ratio_error", "val/ratio_var", *(["tokens/padded"] if "padded" in name else [])}
        same, other = ({k: v for k, v in each.items() if k not in noisy} for each in (ours, theirs))
        assert same == pytest.approx(other, rel=1e3 * limit, abs=10 * limit)
    assert first["kl_coef"] == second["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e3 * limit)
    assert first["moments"] == second["moments"]


def test_the_cases_do_what_their_names_say(both) -> None:
    """Otherwise their parity would prove nothing."""
    one = both[0]
    skipped = [stats["policy/skipped_minibatches"] for stats in one["minibatches skipped, torch.float32"]["stats"]]
    epochs = [stats["policy/epochs"] for stats in one["stopped early, torch.float64"]["stats"]]
    assert any(skipped) and min(epochs) < 4
    assert one["scaled scores, adaptive coefficient, torch.float64"]["kl_coef"] != 0.05
    assert one["ptx, torch.float64"]["stats"][0]["loss/ptx_avg"] > 0


@pytest.mark.parametrize(("name", "code"), [("loss", "R01"), ("reward", "R05"), ("reward model", "R05")])
def test_an_error_of_one_process_is_raised_by_all(both, name: str, code: str) -> None:
    one, first, second = (each[f"error in the {name}"] for each in both)
    assert first == second == one
    assert one["output"].startswith(f"error[{code}]") and not one["changed"] and "hint: " in one["output"]
    assert "row 5" in one["output"] or name == "reward"


# The command


TWO = {"per_device_train_batch_size": 2}  # of PPO's 4: the same 8 episodes per update


@pytest.fixture
def group_folder(run_folder: Path) -> Path:
    write(run_folder, "ppo", PPO | {"ppo": PPO["ppo"] | TWO, "output": {"save_steps": 1, "keep": 9, "snapshots": 2}})
    return run_folder


LONG = PPO | {"ppo": PPO["ppo"] | TWO | {"total_episodes": 240}, "output": {"save_steps": 5}}


@pytest.fixture(scope="module")
def straight(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The output of a long run without a stop."""
    folder = shutil.copytree(origin, tmp_path_factory.mktemp("straight") / "run")
    write(folder, "ppo", LONG)
    assert child(*stage(folder)).returncode == 0
    return results_of(folder)


def stage(folder: Path, *more: str) -> list[str]:
    return [*RLHF_COMMAND, "ppo", "-c", str(folder / "ppo.yaml"), "--nproc", "2", *more]


def results_of(folder: Path) -> tuple[object, ...]:
    hashes = {name: entry["sha256"] for name, entry in manifest(folder)["files"].items()}
    kept = {name: sha for name, sha in hashes.items() if name.endswith((".safetensors", "samples.jsonl"))}
    return kept, untimed(folder / "ppo/metrics.jsonl")


def test_the_stage_in_two_processes(group_folder: Path) -> None:
    result = child(*stage(group_folder))
    assert result.returncode == 0, result.stderr
    output = result.stderr.splitlines()
    assert output[0] == "ppo      2 processes" and "2 x 2 x 2 processes = 8 episodes" in result.stderr
    assert len([line for line in output if "checkpoints took" in line]) == 1  # one process logs
    assert result.stdout.count("samples at step 2") == 1
    two = lines(group_folder / "ppo/metrics.jsonl")
    assert json.loads((group_folder / "ppo/identity.json").read_text())["environment"]["processes"] == 2
    replayed = rlhf("replay", group_folder, "--step", "2")
    assert replayed.exit_code == 0, replayed.output
    (group_folder / "ppo/manifest.json").unlink()  # one process does not resume what two began
    other = ppo(group_folder)
    assert is_one_error(other, "E04") and "was started with 2 processes and cannot resume with 1" in other.stderr
    assert "hint: resume with --nproc 2, or start over with --fresh" in other.stderr
    alone = ppo(group_folder, "--fresh", "-s", "ppo.per_device_train_batch_size=4")
    assert alone.exit_code == 0
    keys = ["objective/scores", "objective/kl", "policy/grad_norm", "loss/policy_avg", "loss/value_avg", "episode"]
    for ours, theirs in zip(lines(group_folder / "ppo/metrics.jsonl"), two, strict=True):
        assert [ours[key] for key in keys] == pytest.approx([theirs[key] for key in keys], rel=1e-4, abs=1e-5)


def workers(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def when(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not (folder / f"ppo/state/step_{step:06d}/state.json").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.02)


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(stage(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_by_a_signal_all_save_once_and_resume_to_the_same_bytes(
    group_folder: Path, straight: tuple[object, ...], number: int
) -> None:
    write(group_folder, "ppo", LONG)
    process = started(group_folder)
    when(group_folder, 5, process)
    process.send_signal(number)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert output.count("saved; the same command resumes") == 1
    again = child(*stage(group_folder))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    assert results_of(group_folder) == straight


@pytest.mark.parametrize("which", [0, 1])
def test_if_one_process_is_killed_the_other_ends(group_folder: Path, straight: tuple[object, ...], which: int) -> None:
    """With an error, soon; the same command resumes to the bytes of a straight run."""
    write(group_folder, "ppo", LONG)
    process = started(group_folder)
    when(group_folder, 10, process)
    pids = workers(process.pid)
    environments = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids}
    (victim,) = [pid for pid, variables in environments.items() if f"RANK={which}" in variables]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    _, output = process.communicate(timeout=60)
    assert time.monotonic() - began < 60 and process.returncode == 1, output
    assert f"error[R14]: process {which} of 2 was killed by SIGKILL" in output and "Traceback" not in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    again = child(*stage(group_folder))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    assert results_of(group_folder) == straight


def test_the_best_policy_is_kept_if_a_limit_stops_the_run(group_folder: Path) -> None:
    result = child(*stage(group_folder, "-s", "ppo.kl_stop=1e-6", "-s", "ppo.learning_rate=0.01"))
    assert result.returncode == 1 and result.stderr.count("error[R04]") == 1, result.stderr
    assert manifest(group_folder)["model_is"] == "the best step"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_external_launchers(group_folder: Path, launcher: str) -> None:
    words = ["-m", "rlhf_cli", "ppo", "-c", group_folder / "ppo.yaml"]
    plain = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    command = [*TORCHRUN, *words] if launcher == "torchrun" else [sys.executable, "-m", *plain, *words]
    if launcher == "accelerate" and not torch.cuda.is_available():
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", *words]
        result = child(*command)
        assert result.returncode != 0 and "error[E04]: MASTER_ADDR" in result.stderr, result.stderr
        assert not (group_folder / "ppo").exists()
        return
    result = child(*command)
    assert result.returncode == 0 and "ppo      2 processes" in result.stderr, result.stderr


def test_a_wrong_config_is_reported_once_and_starts_no_process(group_folder: Path) -> None:
    result = child(*stage(group_folder, "-s", "ppo.gamma=2"))
    assert result.returncode == 2 and result.stderr.count("error[") == 1
    late = child(*stage(group_folder, "-s", "models.sft=nowhere"))  # found by the processes
    assert late.returncode == 2 and late.stderr.count("error[") == 1, late.stderr


def test_processes_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(RLHFError, match="2 processes were requested, 1 started") as error:
        parallel.init_process_group()
    assert error.value.exit_code == 2
