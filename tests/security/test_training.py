"""Training leaves no secret and no pickle, however it ends, and executes no code. The chain: tests/chain."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import canaries
import pytest
import torch
from bad_inputs import replace, rlhf
from canaries import Trap, leaks
from run_cli import must_succeed

from rlhf_cli import jsonl, runs
from rlhf_cli.stages.common.trl_callback import TrainingCallback
from tests.security.test_hostile_files import ACTIVE, HOSTILE

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("stage", "call", "end", "code"),
    [
        ("sft", "on_step_end", lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        ("reward", "on_save", lambda: os._exit(137), 137),
    ],
)
def test_no_token_stays_however_a_training_ends(folder: Path, stage: str, call: str, end: Any, code: int) -> None:
    """Stopped within a step; killed after transformers wrote a checkpoint and before rlhf sealed it."""
    replace(f"{stage}.yaml", "max_steps: 1", "max_steps: 5")
    with Path(f"{stage}.yaml").open("a") as file:
        file.write("output: {save_steps: 1}\n")
    real = getattr(TrainingCallback, call)

    def at(self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if state.global_step == 3:
            end()
        return real(self, args, state, control, **more)

    command = (folder / "home", stage, "-c", f"{stage}.yaml")
    done = canaries.rlhf(*command, before=lambda: setattr(TrainingCallback, call, at))
    assert done.returncode == code, done.stderr
    assert (folder / stage / "state/checkpoint-2/trainer_state.json").is_file()
    assert leaks(folder) == [] and not list(folder.rglob("training_args.bin"))
    must_succeed(canaries.rlhf(*command), "resumes at step")
    assert leaks(folder) == [] and not list(folder.rglob("training_args.bin"))


@pytest.fixture
def interrupted(folder: Path) -> Path:
    """Return the newest checkpoint of an unfinished sft."""
    replace("sft.yaml", "max_steps: 1", "max_steps: 4")
    with Path("sft.yaml").open("a") as file:
        file.write("output: {save_steps: 2}\n")
    assert rlhf("sft").exit_code == 0
    Path("sft/manifest.json").unlink()
    shutil.rmtree("sft/model")
    shutil.rmtree("sft/state/checkpoint-4")
    return folder / "sft/state/checkpoint-2"


def reseal(checkpoint: Path) -> None:
    """Write matching hashes: whoever plants a file can write them, too."""
    runs.seal_state(checkpoint, keep=2)


def test_a_pickle_that_would_run_code_is_refused_in_one_line(interrupted: Path) -> None:
    """And pickled arguments are never read."""
    whole = shutil.copytree(interrupted, "whole")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"):
        if name == "pytorch_model.bin":
            (interrupted / "model.safetensors").unlink()
        torch.save({"state": Trap(interrupted / "it ran")}, interrupted / name)
        reseal(interrupted)
        result = rlhf("sft")
        errors = [line for line in result.stderr.splitlines() if line.startswith(("error", "hint"))]
        assert result.exit_code == 1 and "Traceback" not in result.stderr and len(errors) == 2, result.stderr
        assert errors[0].startswith("error[M05]: sft/state/checkpoint-2 contains non-tensor objects")
        assert "weights_only" not in result.stderr, "torch's advice how to execute it is not printed"
        assert not (interrupted / "it ran").exists() and not Path("sft/manifest.json").exists()
        shutil.rmtree(interrupted)
        shutil.copytree(whole, interrupted)
    torch.save(Trap(interrupted / "it ran"), interrupted / "training_args.bin")
    reseal(interrupted)
    assert rlhf("sft").exit_code == 0 and not (interrupted / "it ran").exists()


def test_hostile_texts_and_names_go_through_a_training_and_do_nothing(folder: Path) -> None:
    """Texts of rows, a data file's and a model folder's name reach no terminal, log, manifest or card unescaped."""
    name, model = (HOSTILE.replace("/", "") + ending for ending in (".jsonl", ".model"))
    row = {"prompt": f"Tell me {HOSTILE}", "completion": f" {HOSTILE}"}
    jsonl.write_jsonl(folder / name, [{**row, "prompt": f"{n} {row['prompt']}"} for n in range(8)])
    shutil.move("model", model)
    config = {"model": {"path": f"./{model}"}, "data": {"train": name, "eval": name}, "sft": {"max_steps": 2}}
    Path("sft.yaml").write_text(json.dumps(config))
    done = rlhf("sft")
    assert done.exit_code == 0, done.output
    assert not ACTIVE.search(done.output)
    written = [path for path in Path("sft").rglob("*") if path.suffix in (".json", ".jsonl", ".yaml", ".md")]
    assert len(written) > 8
    for path in written:
        assert path.name == "tokenizer.json" or not ACTIVE.search(path.read_text(encoding="utf-8")), path
