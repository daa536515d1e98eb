"""Stage folders and a run made without any training, and processes that lock them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fake_stage
import pytest

from rlhf_cli import runs

CONFIGS = {
    "sft": "model: {path: ./base}\ndata: {train: sft.jsonl}\nsft: {learning_rate: 1e-5, weight_decay: 0.0}\n",
    "reward": "data: {train: pairs.jsonl}\nreward: {learning_rate: 1e-5}\n",
    "ppo": "data: {prompts: prompts.jsonl}\nppo: {kl_coef: 0.05, total_episodes: 64}\n",
    "eval": "data: {prompts: held-out.jsonl}\n",
}


def write_configs(folder: Path) -> Path:
    """Write CONFIGS with their data and a base model, for the stages of fake_stage.py."""
    for stage, text in CONFIGS.items():
        (folder / f"{stage}.yaml").write_text(text)
    for name in ("sft", "pairs", "prompts", "held-out"):
        (folder / f"{name}.jsonl").write_text("{}\n")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def fake_chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose configs, data and parents all fit: of stages that train nothing, with logs. Read only."""
    folder = write_configs(tmp_path_factory.mktemp("fake"))
    for stage in CONFIGS:
        assert fake_stage.main([stage, "--config", str(folder / f"{stage}.yaml")]) == 0
    return folder


@dataclass
class FakeConfig:
    """The part of a config that `runs` reads."""

    model_fields: ClassVar[dict[str, Any]] = {}

    run: Path
    stage: str = "sft"
    seed: int = 0
    output: Any = field(default_factory=lambda: SimpleNamespace(run_name=None, keep=2))
    settings: dict[str, Any] = field(default_factory=lambda: {"sft": {"learning_rate": 1e-05}})
    model: Any = field(default_factory=lambda: SimpleNamespace(path=None, revision=None))
    best_of: None = None

    @property
    def file(self) -> Path:
        return self.run / f"{self.stage}.yaml"

    @property
    def folder(self) -> Path:
        return self.run / self.stage

    def where(self, key: str) -> str:
        return f"{self.stage}.yaml:3"

    def identity(self) -> dict[str, Any]:
        return self.settings

    def code(self) -> dict[str, Path]:
        return {}

    def dump(self, relative_to: Path | None = None) -> dict[str, Any]:
        return {"run": os.path.relpath(self.run, relative_to), **self.settings}


def write_model(folder: Path, weights: bytes = b"weights") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text("a card")


def begin(config: FakeConfig, parents: Any = None, *, fresh: bool = False, device: str | None = None) -> str:
    """Start a stage that reads no data; return new, resume or finished."""
    identity = runs.compute_identity(config, parents or {}, {})
    return runs.start_stage(config, identity, parents or {}, fresh=fresh, device=device)


def complete(config: FakeConfig, parents: Any = None, weights: bytes = b"weights", **fields: Any) -> Path:
    """Write the model and the manifest of a stage that has started; return its folder."""
    write_model(config.folder / "model", weights)
    identity = runs.compute_identity(config, parents or {}, {})
    runs.complete_stage(config, identity, parents=parents or {}, fields=fields)
    return config.folder


def make_stage(run: Path, stage: str, weights: bytes = b"weights", **fields: Any) -> Path:
    """Make the folder of a finished stage."""
    run.mkdir(exist_ok=True)
    config = FakeConfig(run, stage)
    assert begin(config) == "new"
    return complete(config, weights=weights, **fields)


def open_parent(path: Path | str, *expect: str, key: str = "model.path", **more: Any) -> runs.Parent:
    return runs.open_parent(str(path), expect=expect, key=key, where="ppo.yaml:4", **more)


@contextmanager
def other_process(lock: str, folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Another process that has locked a folder with `lock_folder` or `lock_folder_shared`; it is killed at the end."""
    script = (
        "import sys, pathlib; from rlhf_cli.runs import locks;"
        "getattr(locks, sys.argv[1])(pathlib.Path(sys.argv[2])); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, lock, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()
