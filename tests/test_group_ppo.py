"""PPO in two processes: the numbers of one, one that writes and speaks, stops, kills, launchers."""

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
import tiny
import torch
from ppo_folder import PPO, lines, ppo, rlhf, write
from test_cli import is_one_error

from rlhf_cli.data.sampling import derive_seed
from rlhf_cli.distributed import RLHF_COMMAND
from rlhf_cli.errors import RLHFError
from rlhf_cli.models import parallel
from rlhf_cli.models.parallel import SINGLE_PROCESS
from rlhf_cli.ppo import rollout as rollout_module

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}


def child(*command: object, timeout: float = 240, **more: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, env=environment() | more)


# The numbers


def one_and_two(folder: Path, *words: str) -> tuple[dict[str, Any], ...]:
    """What one process finds of tests/group_cases.py, and each of two that are told `words`."""
    result = child(*TORCHRUN, HERE / "group_cases.py", folder / "found", *words)
    assert result.returncode == 0, result.stderr[-3000:]
    return group_cases.found(SINGLE_PROCESS), *(
        torch.load(folder / f"found.{rank}", weights_only=False) for rank in (0, 1)
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], ...]:
    return one_and_two(tmp_path_factory.mktemp("group"))


NAMES = [f"{name}, torch.float64" for name in group_cases.CASES]
NAMES += [f"{name}, torch.float32" for name in group_cases.ROUGHLY]
NAMES += ["a head on the policy, torch.float64", "nobody has a row to spare, torch.float64"]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_learn_what_one_learns(both, name: str) -> None:
    one, first, second = (each[name] for each in both)
    limit = 1e-12 if "float64" in name else 1e-5
    assert one["rollouts"] == first["rollouts"] == second["rollouts"]
    for model in ("policy", "value"):
        assert torch.equal(first[model], second[model])  # to the last bit
        apart = (one[model] - first[model]).norm() / one[model].norm()
        assert apart <= limit, f"{model}: {apart}"
    for ours, theirs, again in zip(one["stats"], first["stats"], second["stats"], strict=True):
        assert theirs == again
        # Of rounding alone; and what is padded up to in a micro-batch.
        noisy = {"policy/first_ratio_error", "val/ratio_var", *(["tokens/padded"] if "padded" in name else [])}
        assert {k: v for k, v in ours.items() if k not in noisy} == pytest.approx(
            {k: v for k, v in theirs.items() if k not in noisy}, rel=1e3 * limit, abs=10 * limit
        )
    assert first["kl_coef"] == second["kl_coef"] == pytest.approx(one["kl_coef"], rel=1e3 * limit)
    assert first["moments"] == second["moments"]


def test_the_cases_do_what_their_names_say(both) -> None:
    """Else their parity would prove nothing."""
    one = both[0]
    skipped = [stats["policy/skipped_minibatches"] for stats in one["minibatches skipped, torch.float32"]["stats"]]
    epochs = [stats["policy/epochs"] for stats in one["stopped early, torch.float64"]["stats"]]
    assert any(skipped) and min(epochs) < 4
    assert one["scaled scores, adaptive coefficient, torch.float64"]["kl_coef"] != 0.05
    assert one["ptx, torch.float64"]["stats"][0]["loss/ptx_avg"] > 0


@pytest.mark.parametrize(("name", "code"), [("loss", "R01"), ("reward", "R05"), ("reward model", "R05")])
def test_what_one_process_finds_wrong_all_of_them_raise(both, name: str, code: str) -> None:
    one, first, second = (each[f"error in the {name}"] for each in both)
    assert first == second == one
    assert one["said"].startswith(f"error[{code}]") and not one["changed"] and "hint: " in one["said"]
    assert "row 5" in one["said"] or name == "reward"


def test_a_flipped_token_is_a_near_tie(both, capsys: pytest.CaptureFixture[str]) -> None:
    """Of float32 rollouts that went on from weights apart by rounding: counted, and told."""
    flips, near = 0, 0
    for name in NAMES:
        for ours, theirs in zip(both[0][name]["rollouts"], both[1][name]["rollouts"], strict=True):
            flips += ours != theirs
    made = group_cases.trainer(SINGLE_PROCESS, torch.float32)
    rollout = made.generate(tiny.prompts(8))
    gaps = closest(made, rollout)
    near = sum(gap < 1e-5 for gap in gaps)
    with capsys.disabled():
        print(f"\n{flips} of {len(NAMES)} pairs of rollouts differ; {near} of {len(gaps)} tokens won by less than 1e-5")
    assert flips == 0 or near


def closest(made: Any, rollout: Any) -> list[float]:
    """How far the token that was drawn lay before the next best, of each response token."""
    found = []
    for row in range(len(rollout)):
        prompt, response = rollout.prompt_tokens(row), rollout.response_tokens(row)
        with torch.no_grad():
            logits = made.policy(input_ids=torch.tensor([prompt + response])).logits[0]
        keys = rollout_module.row_keys([derive_seed(0, "sample", 0, row)], torch.device("cpu"))
        counters = rollout_module.token_counters(logits.shape[1], torch.device("cpu"))
        for step, token in enumerate(response):
            z = logits[len(prompt) - 1 + step] / 0.7 - rollout_module.log_exponential(keys, step, counters)[0]
            first, second = z.topk(2)[0].tolist()
            assert int(z.argmax()) == token
            found.append(first - second)
    return found


# The command


TWO = {"per_device_train_batch_size": 2}  # of PPO's 4: the same 8 episodes an update


@pytest.fixture
def group_folder(run_folder: Path) -> Path:
    write(run_folder, "ppo", PPO | {"ppo": PPO["ppo"] | TWO, "output": {"save_steps": 1, "keep": 9, "snapshots": 2}})
    return run_folder


LONG = PPO | {"ppo": PPO["ppo"] | TWO | {"total_episodes": 240}, "output": {"save_steps": 5}}


@pytest.fixture(scope="module")
def straight(origin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """What a long run leaves that nothing stopped."""
    folder = shutil.copytree(origin, tmp_path_factory.mktemp("straight") / "run")
    write(folder, "ppo", LONG)
    assert child(*stage(folder)).returncode == 0
    return left(folder)


def stage(folder: Path, *more: str) -> list[str]:
    return [*RLHF_COMMAND, "ppo", "-c", str(folder / "ppo.yaml"), "--nproc", "2", *more]


def left(folder: Path) -> tuple[object, ...]:
    files = json.loads((folder / "ppo/manifest.json").read_text())["files"]
    weights = {name: told["sha256"] for name, told in files.items() if name.endswith((".safetensors", "samples.jsonl"))}
    return weights, [
        {k: v for k, v in line.items() if not k.endswith("_s")} for line in lines(folder / "ppo/metrics.jsonl")
    ]


def test_the_stage_in_two_processes(group_folder: Path) -> None:
    result = child(*stage(group_folder))
    assert result.returncode == 0, result.stderr
    said = result.stderr.splitlines()
    assert said[0] == "ppo      2 processes" and "2 x 2 x 2 processes = 8 episodes" in said[1]
    assert len([line for line in said if "checkpoints took" in line]) == 1  # one of them speaks
    assert result.stdout.count("samples at step 2") == 1
    two = lines(group_folder / "ppo/metrics.jsonl")
    assert json.loads((group_folder / "ppo/identity.json").read_text())["environment"]["processes"] == 2
    replayed = rlhf("replay", group_folder, "--step", "2")
    assert replayed.exit_code == 0, replayed.output
    (group_folder / "ppo/manifest.json").unlink()  # one process does not go on with what two began
    other = ppo(group_folder)
    assert is_one_error(other, "E04") and "was started with 2 processes and cannot resume with 1" in other.stderr
    assert "hint: resume with --nproc 2, or start over with --fresh" in other.stderr
    alone = ppo(group_folder, "--fresh", "-s", "ppo.per_device_train_batch_size=4")
    assert alone.exit_code == 0
    for ours, theirs in zip(lines(group_folder / "ppo/metrics.jsonl"), two, strict=True):
        for key in (
            "objective/scores",
            "objective/kl",
            "policy/grad_norm",
            "loss/policy_avg",
            "loss/value_avg",
            "episode",
        ):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key


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
def test_stopped_by_a_signal_all_save_once_and_go_on_to_the_same_bytes(
    group_folder: Path, straight: tuple[object, ...], number: int
) -> None:
    write(group_folder, "ppo", LONG)
    process = started(group_folder)
    when(group_folder, 5, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert said.count("saved; the same command goes on from here") == 1
    again = child(*stage(group_folder))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    assert left(group_folder) == straight


@pytest.mark.parametrize("which", [0, 1])
def test_one_is_killed_and_the_other_ends(group_folder: Path, straight: tuple[object, ...], which: int) -> None:
    """Non-zero, soon, with a line; the same command goes on to the bytes of a straight run."""
    write(group_folder, "ppo", LONG)
    process = started(group_folder)
    when(group_folder, 10, process)
    pids = workers(process.pid)
    ranks_of = {
        int(
            dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)[
                "RANK"
            ]
        ): pid
        for pid in pids
    }
    began = time.monotonic()
    os.kill(ranks_of[which], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - began < 60 and process.returncode == 1, said
    assert f"error[R14]: process {which} of 2 was killed by SIGKILL" in said and "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    again = child(*stage(group_folder))
    assert again.returncode == 0 and "resumes at step" in again.stderr, again.stderr
    assert left(group_folder) == straight


def test_the_best_policy_is_kept_where_a_limit_stops_the_run(group_folder: Path) -> None:
    result = child(*stage(group_folder, "-s", "ppo.kl_stop=1e-6", "-s", "ppo.learning_rate=0.01"))
    assert result.returncode == 1 and result.stderr.count("error[R04]") == 1, result.stderr
    assert json.loads((group_folder / "ppo/manifest.json").read_text())["model_is"] == "the best step"


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_of_others_that_start_several(group_folder: Path, launcher: str) -> None:
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


def test_a_wrong_config_is_told_once_and_starts_nobody(group_folder: Path) -> None:
    result = child(*stage(group_folder, "-s", "ppo.gamma=2"))
    assert result.returncode == 2 and result.stderr.count("error[") == 1
    late = child(*stage(group_folder, "-s", "models.sft=nowhere"))  # what the processes find
    assert late.returncode == 2 and late.stderr.count("error[") == 1, late.stderr


def test_processes_that_do_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "RENDEZVOUS_TIMEOUT_S", 1.0)
    with pytest.raises(RLHFError, match="2 processes were asked for, 1 came up") as error:
        parallel.init_process_group()
    assert error.value.exit_code == 2
