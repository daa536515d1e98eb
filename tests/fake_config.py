"""Stage folders for tests of what lies on disk, made without any training."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from rlhf_cli import runs


@dataclass
class FakeConfig:
    """What checkpoints asks of a config, with nothing of the schema behind it."""

    model_fields: ClassVar[dict[str, Any]] = {}

    run: Path
    stage: str = "sft"
    seed: int = 0
    output: Any = field(default_factory=lambda: SimpleNamespace(run_name=None, keep=2))
    settings: dict[str, Any] = field(default_factory=lambda: {"sft": {"learning_rate": 1e-05}})
    model: Any = field(default_factory=lambda: SimpleNamespace(path=None, revision=None))

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


def make_stage(run: Path, stage: str, weights: bytes = b"weights", **fields: Any) -> Path:
    """A finished stage folder, made through begin and finish."""
    run.mkdir(exist_ok=True)
    config = FakeConfig(run, stage)
    wanted = runs.compute_identity(config, {}, {})
    assert runs.start_stage(config, wanted, {}, fresh=False) == "new"
    write_model(config.folder / "model", weights)
    runs.complete_stage(config, wanted, parents={}, fields=fields)
    return config.folder
