"""A small world, and the real CLI on it in forked processes: what takes seconds to import is imported once."""

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import faults

STAGES = ("sft", "reward", "ppo")
STEPS = int(os.environ.get("CHAOS_STEPS", 24))
ROWS = 4 * STEPS  # batches of 8: two epochs
TRL = "num_train_epochs: 2, per_device_train_batch_size: 8, learning_rate: 3e-3, logging_steps: 1"
# Dropout, so that the state of the random numbers matters; in PPO everything that is carried from update to update:
# moments, coefficient, schedule, alarms and best policy.
CONFIGS = {
    "sft": f"""
model:
  new:
    {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 4,
     max_position_embeddings: 256, tie_word_embeddings: true, initializer_range: 0.15, attention_dropout: 0.1,
     tokenizer: {{train: data/sft.jsonl, vocab_size: 320}}}}
data: {{train: data/sft.jsonl, eval: data/sft_eval.jsonl}}
sft: {{{TRL}, max_length: 128, eval_steps: {STEPS // 3}}}
output: {{save_steps: 3}}
""",
    "reward": f"""
data: {{train: data/pairs.jsonl, eval: data/pairs_eval.jsonl}}
reward: {{{TRL}, max_length: 160, normalize_samples: 16}}  # evaluated at the end of each epoch
output: {{save_steps: 3}}
""",
    "ppo": f"""
data: {{prompts: data/prompts.jsonl}}
ppo:
  {{total_episodes: {8 * STEPS}, per_device_train_batch_size: 8, gradient_accumulation_steps: 1, num_ppo_epochs: 2,
   response_length: 8, learning_rate: 1e-3, temperature: 1.0, num_sample_generations: {STEPS // 3},
   use_score_scaling: true, use_score_norm: true, adap_kl_ctrl: true, target: 0.5, horizon: 100, value_only_updates: 2}}
output: {{save_steps: 3, snapshots: 3}}
""",
}


@dataclass(frozen=True)
class World:
    """`origin` holds configs, data and a finished chain; each trial has its own run folder beside it."""

    folder: Path

    @property
    def origin(self) -> Path:
        return self.folder / "origin"

    def trial(self, stage: str, name: str) -> Path:
        """Make a run folder for one stage: its config and data, and links to its finished parents."""
        folder = self.folder / "trials" / f"{stage}-{name}"
        shutil.copytree(self.origin / "data", folder / "data")
        shutil.copy(self.origin / f"{stage}.yaml", folder)
        for parent in STAGES[: STAGES.index(stage)]:
            (folder / parent).symlink_to(self.origin / parent)
        return folder


def make_world(folder: Path) -> World:
    """Make the data of `rlhf init ci`, shortened, with our configs, and record an uninterrupted run of each stage."""
    from rlhf_cli.commands.init import presets

    world = World(folder)
    presets.init("ci", world.origin, seed=0)
    for path in (world.origin / "data").iterdir():
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(rows[: 16 if path.stem.endswith("_eval") else ROWS]), encoding="utf-8")
    (world.origin / "eval.yaml").unlink()
    for stage, text in CONFIGS.items():
        (world.origin / f"{stage}.yaml").write_text(text, encoding="utf-8")
    for stage in STAGES:
        _import(f"rlhf_cli.stages.{stage}")
        record(stage, world.origin)
        for name in recorded(stage, world.origin, "modules"):
            _import(name)
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # slower than any import, and cached
    gc.freeze()  # otherwise each collection in a forked run copies every page that the imports fill
    return world


def record(stage: str, folder: Path) -> dict[str, int]:
    """Run a stage to its end; return its calls with their counts."""
    run = Run(stage, folder, before=faults.install)
    assert run.wait() == 0, run.output()
    return recorded(stage, folder)


def recorded(stage: str, folder: Path, what: str = "calls") -> Any:
    """Return the calls, or the imported modules, of a recorded run."""
    return json.loads((folder / f"{stage}.seen.json").read_text())[what]


def _import(name: str) -> None:
    if name not in sys.modules and name != "__main__":
        try:
            importlib.import_module(name)
        except Exception:  # created by a library for itself
            sys.modules.pop(name, None)


class Run:
    """One stage in a forked process, which calls `before` with the stage's folder."""

    def __init__(self, stage: str, folder: Path, before: Callable[[Path], object] = lambda folder: None) -> None:
        self.stage, self.run, self.folder, self.log = stage, folder, folder / stage, folder / f"{stage}.log"
        self.code: int | None = None
        self._earlier_lines = _lines(self.folder)
        sys.stdout.flush()
        sys.stderr.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(before)

    def _child(self, before: Callable[[Path], object]) -> None:
        from rlhf_cli.cli import app

        code = 70
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            calls = before(self.folder)
            try:
                app([self.stage, "--config", str(self.run / f"{self.stage}.yaml")])
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            if isinstance(calls, faults.Calls):
                seen = {"calls": calls.seen, "modules": list(sys.modules)}
                (self.run / f"{self.stage}.seen.json").write_text(json.dumps(seen))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def alive(self) -> bool:
        """Return True while it runs; then its exit code is in `code`."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self, seconds: float = 120) -> int:
        """Return its exit code, -n after signal n."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"{self.folder}: still running after {seconds} s: {self.output()}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def wait_for_step(self, step: int) -> None:
        """Wait until this process has made a step and the log has reached `step`, or it has ended."""
        while self.alive():
            lines = _lines(self.folder)
            if any(line not in self._earlier_lines for line in lines) and self.step() >= step:
                return
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        return last_step(self.folder)


def last_step(folder: Path) -> int:
    """Return the last step in the log of a stage's folder, or 0."""
    for line in reversed(_lines(folder)):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # the line is being written
            continue
    return 0


def _lines(folder: Path) -> list[bytes]:
    try:
        return (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return []
