"""SFT, reward, DPO and eval in two processes: the numbers of one process, checkpoints, signals, kills and resumes."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import group_trl_cases
import pytest
import torch
from chaos.fingerprint import differences, fingerprint
from group import HELPERS, TORCHRUN, child, command, stop_and_resume
from ppo_folder import EVAL, lines, must_succeed, rlhf, write
from safetensors.torch import load_file

from rlhf_cli import distributed, runs, system, terminal
from rlhf_cli.cli import errors
from rlhf_cli.config.base import Options
from rlhf_cli.config.loading import load
from rlhf_cli.errors import RLHFError
from rlhf_cli.models.parallel import SINGLE_PROCESS, ProcessGroup
from rlhf_cli.stages import sft
from tests.conftest import SIZES, World

pytestmark = pytest.mark.distributed

# 96 rows, 8 in each optimizer step: with two processes each reads 4.
QUICK = {"max_length": 64, "max_steps": 12, "learning_rate": 1e-3, "logging_steps": 3, "eval_steps": 6}
NEW = {**SIZES, "attention_dropout": 0.1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped by length": ("sft", {}, {}),
    "accumulated gradients": ("sft", {}, {"group_by_length": False, "gradient_accumulation_steps": 2}),
    "packed": ("sft", {}, {"packing": True, "max_steps": 6, "max_length": 32}),
    "adapters": ("sft", {"adapters": {"kind": "lora", "r": 4}}, {"max_steps": 6}),
    "checkpointed": ("sft", {}, {"max_steps": 6, "gradient_checkpointing": True}),
    "pairs": ("reward", {}, {}),
    "preferences": ("dpo", {}, {}),
    "preferences, adapters": ("dpo", {"adapters": {"kind": "lora", "r": 4}}, {"max_steps": 6}),
    "pairs, accumulated, adapters": (
        "reward", {"adapters": {"kind": "lora", "r": 4}}, {"max_steps": 6, "gradient_accumulation_steps": 2},
    ),
}  # fmt: skip
# Two epochs of 12 steps; the checkpoint is in the second.
RESUMED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "resumed: sft": ("sft", {"new": NEW}, {"max_steps": 24, "logging_steps": 4}),
    "resumed: reward": ("reward", {}, {"max_steps": 24, "logging_steps": 4, "group_by_length": False}),
}
STEP = 18
LONG: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "long: sft": ("sft", {}, {"max_steps": 60, "eval_steps": 30}),
    "long: reward": ("reward", {}, {"max_steps": 60, "eval_steps": 30}),
}


def config(world: World, folder: Path, case: tuple[str, dict[str, Any], dict[str, Any]], count: int) -> Path:
    """Write the YAML of a case in a new folder, with the batch size of one of `count` processes."""
    stage, model, settings = case
    source = str(world.sft if stage == "sft" else world.pairs)
    if "new" in model:
        model = {"new": {**model["new"], "tokenizer": {"train": str(world.text), "vocab_size": 320}}}
    sections = {
        "model": model if "new" in model else {"path": str(world.base), **model},
        "data": {"train": source, "eval": source},
        # A long run has the checkpoints of a straight run, wherever it was stopped.
        "output": {"save_steps": 6, "keep": 2} if case in LONG.values() else {"save_steps": 3, "keep": 99},
        stage: {**QUICK, "per_device_train_batch_size": 8 // count, **settings},
    }
    if stage != "sft":  # TRL's eval_max_reward and eval_logits are of the rows that all processes read at once
        sections[stage]["per_device_eval_batch_size"] = 8 // count
    if stage == "reward":
        sections["reward"]["normalize_samples"] = 24
    folder.mkdir(parents=True)
    return world.config(folder, stage, **sections)


@pytest.fixture(scope="module")
def two(world: World, origin: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each case, written by two processes; and an evaluation on one prompt, which only one has."""
    folder = tmp_path_factory.mktemp("two")
    paths = {
        name: config(world, folder / str(i), case, 2) for i, (name, case) in enumerate((CASES | RESUMED | LONG).items())
    }
    shutil.copytree(origin, folder / "few")
    write(folder / "few", "eval", evaluated(n=1))
    paths["few"] = folder / "few/eval.yaml"
    words = [f"{path}@{STEP}" if name in RESUMED else path for name, path in paths.items()]
    must_succeed(child(*TORCHRUN, HELPERS / "group_trl_cases.py", *words))
    return {name: path.with_suffix("") for name, path in paths.items()}


def evaluated(**settings: Any) -> dict[str, Any]:
    """Return an eval.yaml of three identical policies."""
    models = {**EVAL["models"], "ppo": "sft_model", "base": "sft_model"}
    return EVAL | {"models": models, "eval": {**EVAL["eval"], "temperature": 0.7, "response_length": 8, **settings}}


# The numbers


def weights(folder: Path) -> torch.Tensor:
    (path,) = (folder / "model").glob("*.safetensors")
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(path).items())])


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_the_weights_of_one(two: dict[str, Path], world: World, tmp_path: Path, name: str) -> None:
    path = config(world, tmp_path / "one", CASES[name], 1)
    group_trl_cases.run(path, SINGLE_PROCESS)
    ours, theirs = path.with_suffix(""), two[name]
    one, other = (lines(folder / "metrics.jsonl") for folder in (ours, theirs))
    assert len(one) > 2
    for mine, yours in zip(one, other, strict=True):
        assert mine | {"time_s": 0} == pytest.approx(yours | {"time_s": 0}, rel=2e-4, abs=2e-5)
    assert (weights(ours) - weights(theirs)).norm() < 1e-4 * weights(ours).norm()
    one, other = (json.loads((folder / "manifest.json").read_text()) for folder in (ours, theirs))
    assert one["step"] == other["step"] and one.keys() == other.keys()
    measured = ("metrics", "reward_mean", "reward_std")  # the last two of responses generated by two processes
    assert near(*([each.get(key, 0) for key in measured] for each in (one, other)), 1e-3)
    kept = [each.get("card", {}).get("kept_step") for each in (one, other)]  # by the margins of both processes
    assert near(*kept, 1e-3) and (kept[0] is None) == (name != "pairs")
    assert near(*([probe["score"] for probe in each.get("probes", [])] for each in (one, other)), 1e-2)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_within_an_epoch_equals_a_straight_run(two: dict[str, Path], name: str) -> None:
    folder = two[name]
    straight = folder.with_name(f"{folder.name}-straight")
    assert {f"checkpoint-{step}" for step in range(3, 25, 3)} == {path.name for path in (folder / "state").iterdir()}
    assert differences(fingerprint(folder), fingerprint(straight)) == []
    for step in (21, 24):  # written by slow processes
        sealed = json.loads((folder / f"state/checkpoint-{step}/state.json").read_text())["files"]
        assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= sealed.keys()


def test_the_last_step_of_an_epoch_may_have_fewer_rows(world: World, tmp_path: Path) -> None:
    """accelerate fills it up; the number of steps follows."""
    settings = load("sft", config(world, tmp_path / "run", ("sft", {}, {"max_steps": None}), 2)).sft
    assert [settings.steps(rows, 2) for rows in (95, 96, 97)] == [12, 12, 13] and settings.steps(97) == 25


def test_accelerate_must_find_the_same_number_of_processes(world: World, tmp_path: Path) -> None:
    loaded = load("sft", config(world, tmp_path / "run", ("sft", {}, {}), 2))
    tokenizer, model = sft.load_tokenizer_and_model(loaded, Options(), runs.open_parents(loaded))
    rows = sft.training_rows.read_train_and_eval(loaded, tokenizer, model.config)
    with pytest.raises(RLHFError, match="accelerate found 1 process, 2 train together"):
        sft.make_trainer(loaded, model, tokenizer, *rows, ProcessGroup(0, 2))


# The command


@pytest.mark.parametrize(("name", "number"), [("long: sft", signal.SIGTERM), ("long: reward", signal.SIGKILL)])
def test_a_signal_to_one_process_ends_both_and_resume_equals_a_straight_run(
    two: dict[str, Path], world: World, name: str, number: int
) -> None:
    """SFT is resumed by plain torchrun."""
    folder = two[name].parent  # the same relative paths
    path = config(world, folder.with_name(f"{folder.name}-again"), LONG[name], 2)
    torchrun = (*TORCHRUN, "-m", "rlhf_cli", "sft", "-c", path) if name == "long: sft" else ()
    resumed = stop_and_resume(path, "checkpoint-6", number, 1, torchrun)
    assert f"{path.stem:<9}2 processes\n" in resumed.stderr and "4 x 1 x 2 processes = 8 " in resumed.stderr
    assert differences(fingerprint(path.with_suffix("")), fingerprint(two[name])) == []


JUDGES = "seen = []\ndef short(prompts, responses):\n    assert not seen or len(responses) == 10\n    seen.append(1)\n"
JUDGES += "    return [-len(response) for response in responses]\n"


def test_eval_in_two_processes_equals_one_process(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "judges.py").write_text(JUDGES)  # called once with all ten responses
    write(run_folder, "eval", evaluated())
    result = must_succeed(child(*command(run_folder / "eval.yaml")))
    shutil.copytree(run_folder / "eval", run_folder / "two")
    alone = must_succeed(rlhf("eval", "-c", run_folder / "eval.yaml", "--fresh"))
    assert result.stdout == alone.stdout
    ours, theirs = (json.loads((run_folder / name / "report.json").read_text()) for name in ("eval", "two"))
    ours_rows, theirs_rows = (lines(run_folder / name / "samples.jsonl") for name in ("eval", "two"))
    flips = sum(one["response"] != other["response"] for one, other in zip(ours_rows, theirs_rows, strict=True))
    with capsys.disabled():
        print(f"\n{flips} of {len(ours_rows)} responses differ")
    assert flips == 0
    for one, other in zip(ours_rows, theirs_rows, strict=True):
        assert near(one, other, 1e-5)
    assert near(ours, theirs, 1e-4)


def test_eval_on_fewer_prompts_than_processes(two: dict[str, Path]) -> None:
    report = json.loads((two["few"] / "report.json").read_text())
    assert report["n"] == 1 and report["win_rate"]["ppo_vs_sft"]["short"]["ties"] == 1
    assert len(lines(two["few"] / "samples.jsonl")) == report["n"] * 8


def near(one: Any, other: Any, limit: float) -> bool:
    """Return whether numbers are close and other values equal."""
    one, other = flat(one), flat(other)
    close = {key: pytest.approx(value, rel=limit, abs=limit) for key, value in other.items() if type(value) is float}
    return one == other | close


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, inner in items for name, each in flat(inner, f"{prefix}.{key}").items()}
    return {prefix: value}


# What goes wrong


def test_an_error_of_all_processes_is_printed_once(world: World, tmp_path: Path) -> None:
    path = config(world, tmp_path / "run", ("sft", {}, {"per_device_train_batch_size": 50}), 2)
    result = child(*command(path))
    assert result.returncode == 2 and result.stderr.count("error[") == 1, result.stderr
    assert "= 100 usable rows)" in result.stderr
    assert "hint: set sft.per_device_train_batch_size to 48 at most" in result.stderr


@pytest.mark.parametrize(
    ("rank", "code", "ended", "message"),
    [
        ("0", "D05", False, "error[D05]"),
        ("1", "D05", True, ""),  # the first process printed it and ended, so the launcher ends this one
        ("1", "D05", False, "process 1: error[D05]"),
        ("0", "R14", False, "error[R14]"),
        ("1", "R14", False, ""),
        ("1", "R14", True, ""),
    ],
)
def test_which_rank_prints_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, code: str, ended: bool, message: str
) -> None:
    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if ended:
            raise system.Terminated

    waited: list[float] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(time, "sleep", sleep)
    assert errors._report_error(RLHFError(code, "so it is")) in (1, 2)
    output = capsys.readouterr().err
    assert output.startswith(message) if message else not output
    assert bool(waited) == ((rank, code) != ("0", "D05"))


def test_only_the_first_process_prints_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    assert not distributed.is_main_process()
    terminal.table(["a"], [["b"]])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    terminal.table(["a"], [["b"]])
    assert "b" in capsys.readouterr().out
