"""A finished chain of tiny stages, three checkpoints each, and copies of it that were killed, damaged and run again."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from damages import SILENT
from ppo_folder import untimed
from typer.testing import CliRunner

from rlhf_cli import runs, terminal
from rlhf_cli.cli import app

OUTPUT = {"save_steps": 2, "keep": 3}
TRAINING = {"max_length": 64, "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 3e-3}
FINISHED = ("manifest.json", "model", "value")  # what a stage writes after its last step
FOUND = "found"
TRL_FILES = (
    "config.json model.safetensors optimizer.pt rng_state.pth scheduler.pt state.json tokenizer.json "
    "tokenizer_config.json trainer_state.json"
)
STATE_FILES = {  # of a checkpoint, by stage; SFT's has more
    "sft": TRL_FILES.split(),
    "reward": TRL_FILES.split(),
    "ppo": ["state.json", "structure.json", "tensors.safetensors"],
}


@dataclass(frozen=True)
class Chain:
    """`folder` holds the configs and the finished stages; every run of a test is a copy of one of them."""

    folder: Path

    def killed(self, stage: str, run: Path) -> Path:
        """A copy as it would be had it been killed after its second checkpoint, of step 4; returns that checkpoint."""
        whole = self.finished(stage, run)
        for name in FINISHED:
            path = whole / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for kept in ("state", "snapshots"):
            for path in (whole / kept).glob("*6"):
                shutil.rmtree(path)
        newest = max((whole / "state").iterdir())
        assert newest.name in ("checkpoint-4", "step_000004")
        return newest

    def finished(self, stage: str, run: Path) -> Path:
        """A copy of a finished stage with its config; returns its folder."""
        run.mkdir(parents=True)
        shutil.copy(self.folder / f"{stage}.yaml", run)
        return Path(shutil.copytree(self.folder / stage, run / stage))

    def ends_alike(self, stage: str, run: Path, *, logs: bool = True) -> bool:
        """Whether a run left what the straight run did: models, snapshots, metrics and samples, times left out."""
        return _end(self.folder / stage, logs) == _end(run / stage, logs)

    def verdict(self, stage: str, run: Path, harmed: Path, name: str, *, before: Path | None) -> str:
        """Run the stage again and say what it made of the damage done to the file `name` of the checkpoint `harmed`.

        FOUND: a warning M05 names both, the training went on from the checkpoint `before`, and ended as ever.
        """
        result = rlhf(stage, run)
        if result.exit_code:
            return refusal(result)
        right = "right" if self.ends_alike(stage, run) else "WRONG END"
        start = f"resuming from {before.name}" if before else "starting from the beginning"
        if not any(harmed.name in line and name in line and start in line for line in reported_damage(result)):
            return f"{SILENT}, {right}"
        step = re.search(r"resumes at step (\d+) ", result.stderr)
        if (step and int(step[1])) != (before and int(re.findall(r"\d+", before.name)[0])):
            return "found, WRONG START"
        return FOUND if right == "right" else f"found, {right}"


def rlhf(stage: str, run: Path, *more: str) -> Any:
    """`rlhf STAGE` on a run's folder, as in a process of its own."""
    terminal.reset()
    try:
        return CliRunner().invoke(app, [stage, "--config", str(run / f"{stage}.yaml"), *more])
    finally:
        runs.release()


def refusal(result: Any) -> str:
    """The codes of the errors that ended a command."""
    codes = re.findall(r"^error\[(\w+)\]", result.stderr, re.MULTILINE)
    return f"refused, {' '.join(codes)}" if codes else f"CRASH: {result.exception!r}"


def reported_damage(result: Any) -> list[str]:
    """The warnings of damage that a command gave."""
    return [line for line in result.stderr.splitlines() if line.startswith("warning[M05]")]


def _end(folder: Path, logs: bool) -> dict[str, Any]:
    files = [path for name in ("model", "value", "snapshots") for path in (folder / name).rglob("*") if path.is_file()]
    end: dict[str, Any] = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    end["headline"] = json.loads((folder / "manifest.json").read_text())["metrics"]
    if logs:
        end |= {path.name: untimed(path) for path in folder.glob("*.jsonl")}
    return end


def write_configs(folder: Path, world: Any, **changes: Any) -> None:
    """sft, reward, ppo and eval.yaml of a chain in `folder`; `changes` go into each."""
    base = folder / "base"
    shutil.copytree(world.base, base)
    body = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(body | {"attention_dropout": 0.1}))  # the RNG's state must matter
    parents = {"sft": str(folder / "sft"), "reward": str(folder / "reward")}
    ppo = {
        "total_episodes": 48,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "response_length": 8,
        "num_sample_generations": 3,
        "learning_rate": 1e-3,
    }
    configs: dict[str, dict[str, Any]] = {
        "sft": {
            "model": {"path": str(base)},
            "data": {"train": str(world.sft)},
            "sft": TRAINING | {"logging_steps": 1},
        },
        "reward": {
            "model": {"path": parents["sft"]},
            "data": {"train": str(world.pairs), "eval": str(world.pairs)},
            "reward": TRAINING | {"logging_steps": 1, "normalize_samples": 8},
        },
        "ppo": {"models": parents, "data": {"prompts": str(world.sft)}, "ppo": ppo},
        "eval": {
            "models": parents | {"ppo": str(folder / "ppo")},
            "data": {"prompts": str(world.sft)},
            "eval": {"n": 4},
        },
    }
    for stage, config in configs.items():
        output = {} if stage == "eval" else {"output": OUTPUT | ({"snapshots": 3} if stage == "ppo" else {})}
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(config | output | changes))


@pytest.fixture(scope="module")
def make_chain(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chain]:
    """Makes chains of sft, reward and ppo: all their steps, in one go."""

    def make(**changes: Any) -> Chain:
        folder = tmp_path_factory.mktemp("chain")
        write_configs(folder, world, **changes)
        for stage in ("sft", "reward", "ppo"):
            result = rlhf(stage, folder)
            assert result.exit_code == 0, result.stderr
        return Chain(folder)

    return make


@pytest.fixture(scope="module")
def chain(make_chain: Callable[..., Chain]) -> Chain:
    return make_chain()


@pytest.fixture(scope="module")
def other_chain(make_chain: Callable[..., Chain]) -> Chain:
    """The same from another seed: files of the same names, and mostly of the same sizes."""
    return make_chain(seed=1)
