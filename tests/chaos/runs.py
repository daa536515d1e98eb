"""A small world, and the real CLI on it in forked processes: what takes seconds to import is imported once."""

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chaos import faults

STAGES = ("sft", "reward", "ppo")
STEPS = int(os.environ.get("CHAOS_STEPS", 24))
ROWS = 4 * STEPS  # batches of 8: two epochs
SAVE = {"save_steps": 3}
TRL_KEYS = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "logging_steps": 1}
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
    "attention_dropout": 0.1,  # so that the state of the random numbers matters
    "tokenizer": {"train": "data/sft.jsonl", "vocab_size": 320},
}
# Everything that PPO carries from update to update is at work: moments, coefficient, schedule, alarms, best.
PPO = {
    "total_episodes": 8 * STEPS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_ppo_epochs": 2,
    "response_length": 8,
    "learning_rate": 1e-3,
    "temperature": 1.0,
    "num_sample_generations": STEPS // 3,
    "use_score_scaling": True,
    "use_score_norm": True,
    "adap_kl_ctrl": True,
    "target": 0.5,
    "horizon": 100,
    "value_only_updates": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sft": {
        "model": {"new": MODEL},
        "data": {"train": "data/sft.jsonl", "eval": "data/sft_eval.jsonl"},
        "sft": {**TRL_KEYS, "max_length": 128, "eval_steps": STEPS // 3},
        "output": SAVE,
    },
    "reward": {
        "data": {"train": "data/pairs.jsonl", "eval": "data/pairs_eval.jsonl"},
        "reward": {**TRL_KEYS, "max_length": 160, "normalize_samples": 16},  # evaluated at the end of each epoch
        "output": SAVE,
    },
    "ppo": {"data": {"prompts": "data/prompts.jsonl"}, "ppo": PPO, "output": {**SAVE, "snapshots": 3}},
}


@dataclass(frozen=True)
class World:
    """ORIGIN holds configs, data and a finished chain; each trial has a run's folder of its own beside it."""

    folder: Path

    @property
    def origin(self) -> Path:
        return self.folder / "origin"

    def trial(self, stage: str, name: str, *, data: bool = False) -> Path:
        """A run's folder for one stage: its config, links to its finished parents, and its data (a copy on wish)."""
        folder = self.folder / "trials" / f"{stage}-{name}"
        folder.mkdir(parents=True)
        config = (self.origin / f"{stage}.yaml").read_text(encoding="utf-8")
        (folder / f"{stage}.yaml").write_text(config, encoding="utf-8")
        for parent in STAGES[: STAGES.index(stage)]:
            (folder / parent).symlink_to(self.origin / parent)
        if not data:
            (folder / "data").symlink_to(self.origin / "data")
            return folder
        (folder / "data").mkdir()
        for path in (self.origin / "data").iterdir():
            (folder / "data" / path.name).write_bytes(path.read_bytes())
        return folder


def make_world(folder: Path) -> World:
    """The data of `rlhf init ci`, cut short, configs of our own, and a straight run of each stage, recorded."""
    from rlhf_cli.commands import init

    world = World(folder)
    init.init("ci", world.origin, seed=0)
    for path in (world.origin / "data").iterdir():
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(rows[: 16 if path.stem.endswith("_eval") else ROWS]), encoding="utf-8")
    (world.origin / "eval.yaml").unlink()
    for stage, config in CONFIGS.items():
        (world.origin / f"{stage}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    for stage in STAGES:
        _import(f"rlhf_cli.stages.{stage}")
        record(stage, world.origin)
        for name in json.loads((world.origin / f"{stage}.seen.json").read_text())["modules"]:
            _import(name)
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # which takes longer than any import, and is kept
    gc.freeze()  # else each collection in a forked run copies every page that the imports fill
    return world


def record(stage: str, folder: Path) -> dict[str, int]:
    """Run a stage to its end: what it called, and how often; also what it imported, so that those to come need not."""
    calls: list[faults.Calls] = []
    seen = folder / f"{stage}.seen.json"
    run = Run(
        stage,
        folder,
        before=lambda place: calls.append(faults.install(place)),
        after=lambda _: seen.write_text(json.dumps({"calls": calls[0].seen, "modules": list(sys.modules)})) and None,
    )
    assert run.wait() == 0, run.said()
    return recorded(stage, folder)


def recorded(stage: str, folder: Path) -> dict[str, int]:
    """What a recorded run called."""
    return json.loads((folder / f"{stage}.seen.json").read_text())["calls"]


def _import(name: str) -> None:
    if name not in sys.modules and name != "__main__":
        try:
            importlib.import_module(name)
        except Exception:  # made up by a library for itself: nobody misses it
            sys.modules.pop(name, None)


class Run:
    """One command in a forked process of its own. `before` and `after` are called in there, with the stage's folder."""

    def __init__(
        self,
        stage: str,
        folder: Path,
        *,
        before: Callable[[Path], None] | None = None,
        after: Callable[[Path], None] | None = None,
    ) -> None:
        self.stage, self.run, self.folder, self.log = stage, folder, folder / stage, folder / f"{stage}.log"
        self.code: int | None = None
        self._lines = _lines(self.folder)
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._be(before, after)

    def _be(self, before: Callable[[Path], None] | None, after: Callable[[Path], None] | None) -> None:
        """The child: never comes back."""
        code = 70
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if before:
                before(self.folder)
            code = self._command()
            if after:
                after(self.folder)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _command(self) -> int:
        from rlhf_cli.cli import app

        try:
            app([self.stage, "--config", str(self.run / f"{self.stage}.yaml")])
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    def alive(self) -> bool:
        """Whether it still runs; its code is kept once it does not."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self, seconds: float = 120) -> int:
        """Its exit code, -n where signal n ended it. Kills what hangs."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"{self.folder}: still running after {seconds} s: {self.said()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        """The last step in its log, 0 where there is none."""
        return last_step(self.folder)

    def made(self, step: int) -> bool:
        """Whether this process, not one before it, has made a step, and the log has come to `step`."""
        return any(line not in self._lines for line in _lines(self.folder)) and self.step() >= step


def last_step(folder: Path) -> int:
    """The last step in the log of a stage's folder, 0 where there is none."""
    for line in reversed(_lines(folder)):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # the process is in the middle of it
            continue
    return 0


def _lines(folder: Path) -> list[bytes]:
    try:
        return (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return []
