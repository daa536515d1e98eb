"""What every config has: strict sections, the run's folder, the output, and where each key was written."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticCustomError

from rlhf_cli.config.keys import PathKey, path_entries
from rlhf_cli.config.paths import FUNCTION, is_path, relative
from rlhf_cli.config.sources import DataSource

DataPath = Annotated[str, PathKey("data")]
ModelPath = Annotated[str, PathKey("model")]
JudgePath = Annotated[str, PathKey("judge")]
LONGEST_NAME, LONGEST_PATH = 255, 3500  # bytes: Linux's NAME_MAX, and its PATH_MAX of 4096 less what lies below a run
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _plain_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise PydanticCustomError(
            "S03",
            "this is no plain name",
            {"hint": "use letters, digits, `_`, `-` and `.`, starting with a letter or digit"},
        )
    return name


def _path_that_can_be(path: str) -> str:
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > LONGEST_NAME:
        text = f"a name in it has {longest} bytes, a file system takes {LONGEST_NAME} at most"
        raise PydanticCustomError("S03", text, {"hint": "name a folder with a shorter name"})
    if (length := len(os.fsencode(path))) > LONGEST_PATH:
        text = f"it has {length} bytes, {LONGEST_PATH} leave room for the names of a stage's files"
        raise PydanticCustomError("S03", text, {"hint": "name a folder that lies less deep"})
    return path


Name = Annotated[str, AfterValidator(_plain_name)]
Tracker = Literal["tensorboard", "wandb", "trackio"]
TRACKERS: tuple[str, ...] = get_args(Tracker)


class Section(BaseModel):
    """Strict and frozen: an unknown key, a text for a number, `true` for a number, nan and inf are refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Output(Section):
    """What a stage leaves on disk while it runs."""

    save_steps: int | None = Field(
        None,
        gt=0,
        description=(
            "Optimizer steps (in PPO: updates) between two checkpoints to resume from; none: ten times over the "
            "run. [`pytest tests/test_defaults.py::test_a_run_can_resume_from_each_tenth_of_it`]"
        ),
    )
    keep: int = Field(
        2,
        ge=2,
        description=(
            "Checkpoints kept to resume from; two, so that a damaged newest one costs little. "
            "[`pytest tests/test_checkpoints_states.py -k damaged_state`]"
        ),
    )
    snapshots: int = Field(
        8,
        ge=0,
        description=(
            "Copies of the policy's weights kept evenly over a PPO run, for the evaluation's curve of reward "
            "against KL. [`pytest tests/test_defaults.py::test_snapshots_stand_at_the_eighths_of_a_run`]"
        ),
    )
    run_name: Name | None = Field(
        None,
        description=(
            "Name of the run in its trackers and its manifest; none: the run folder's name and the stage, such as "
            "demo-ppo, and nothing in the manifest. [transformers 5.23, src/transformers/training_args.py]"
        ),
    )
    report_to: list[Tracker] = Field(
        default=[],
        description=(
            "Experiment trackers that are told each line of metrics.jsonl, the samples and the config: tensorboard, "
            "wandb, trackio. docs/commands.md tells more. [`pytest tests/test_trackers_rules.py -k they_are_named`]"
        ),
    )
    project: Name | None = Field(
        None,
        description=(
            "Project of wandb and trackio that the run is a part of; none: WANDB_PROJECT for wandb where that is set, "
            "else rlhf. [`pytest tests/test_trackers_rules.py -k the_project_unless`]"
        ),
    )


@dataclass(frozen=True)
class Options:
    """What a command line says beyond the config."""

    dry_run: bool = False
    fresh: bool = False
    trust_remote_code: bool = False
    debug: bool = False
    nproc: str | None = None  # a number, or auto


@dataclass(frozen=True)
class Origin:
    """Where a config came from. `name` is the file as the user wrote it, `overrides` the keys given by --set."""

    file: Path
    name: str
    lines: dict[str, int] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """The place of `key`, or of the nearest section around it that was written, or the file."""
        while key:
            if key in self.overrides:
                return f"--set {key}"
            if key in self.lines:
                return f"{self.name}:{self.lines[key]}"
            key = key.rpartition(".")[0]
        return self.name

    def overridden(self, key: str) -> bool:
        """Whether the value at `key` came from --set."""
        return any(key == other or key.startswith(f"{other}.") for other in self.overrides)


class Config(Section):
    """A stage's whole config. Path keys hold absolute paths; model keys may also hold a hub id."""

    # Keys that say how often to look and how much at once, not what comes out.
    CADENCE: ClassVar[tuple[str, ...]] = (
        "logging_steps",
        "eval_steps",
        "per_device_eval_batch_size",
        "num_sample_generations",
        "generate_ref_response",
        "push_to_hub_if_best",
    )

    stage: str
    run: Annotated[str, PathKey("run"), AfterValidator(_path_that_can_be)] = Field(
        ".",
        description=(
            "The run's folder, relative to the config's own; this stage writes RUN/STAGE. "
            "[`pytest tests/test_pipeline.py::test_a_run_can_be_moved`]"
        ),
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description=(
            "Seed of all randomness: the same seed gives the same run. "
            "[`pytest tests/test_ppo_trainer.py::test_same_seed_same_run_bit_for_bit`]"
        ),
    )
    output: Output = Field(default_factory=Output, description="What is saved while the stage runs.")

    _origin: Origin = PrivateAttr()

    @property
    def file(self) -> Path:
        """The YAML file, absolute."""
        return self._origin.file

    @property
    def folder(self) -> Path:
        """The folder that this stage writes, absolute."""
        return Path(self.run) / self.stage

    def where(self, key: str) -> str:
        """FILE:LINE of a key path such as "data.train", or of the nearest section around it; or `--set KEY`."""
        return self._origin.where(key)

    def is_written(self, key: str) -> bool:
        """Whether the file or a `--set` has this very key."""
        return key in self._origin.lines or self._origin.overridden(key)

    def dump(self, relative_to: Path | None = None) -> dict[str, Any]:
        """Every key with its value, JSON-able. Paths are relative to `relative_to` (POSIX), without it absolute.

        Written as YAML into that folder it loads again as the same config.
        """
        tree = self.model_dump(mode="json")
        if relative_to is not None:
            folder = Path(os.path.abspath(relative_to))
            for container, name, _, mark in path_entries(type(self), tree):
                container[name] = relative(container[name], mark, folder)
        return tree

    def identity(self) -> dict[str, Any]:
        """The dump without what cannot change the result: places, output, logging and evaluation cadence, requirements.

        Files count by content elsewhere; a chat template's file counts here, as its text.
        """
        tree = self.model_dump(mode="json", exclude={"stage", "output"})
        for container, name, _, mark in list(path_entries(type(self), tree)):
            if mark.kind == "template" and is_path(container[name], mark):
                container[name] = Path(container[name]).read_text(encoding="utf-8", errors="replace")
            elif mark.kind in ("data", "model") or is_path(container[name], mark):
                del container[name]
        for key in ("subset", "revision", "max_dropped"):  # the last one stops a run, and changes nothing in it
            tree["data"].pop(key)
        for key in (*self.CADENCE, "require", "require_reward"):
            tree.get(self.stage, {}).pop(key, None)
        return {**tree, "output": {"snapshots": self.output.snapshots}}

    def sources(self) -> dict[str, DataSource]:
        """Key path -> source, of all data that the stage reads."""
        raise NotImplementedError

    def code(self) -> dict[str, Path]:
        """Key path -> Python file, of each function `module:function` whose module lies beside the config."""
        return {}

    def _beside(self, functions: Mapping[str, str | None]) -> dict[str, Path]:
        """`code` of functions by key path; what is no `module:function` is passed over."""
        modules = {key: name.partition(":")[0] for key, name in functions.items() if name and FUNCTION.fullmatch(name)}
        files = {key: self.file.parent / f"{module.replace('.', '/')}.py" for key, module in modules.items()}
        return {key: path for key, path in files.items() if os.path.isfile(path)}
