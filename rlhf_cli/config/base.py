"""The keys of every config: stage, run folder, seed and output; and the options of the command line beside them."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, PrivateAttr

from rlhf_cli.config.machinery.fields import PathField
from rlhf_cli.config.machinery.paths import FUNCTION, path_values
from rlhf_cli.config.machinery.section import AtLeastTwo, Origin, Section, invalid
from rlhf_cli.config.sources import DataSource

DataPath = Annotated[str, PathField("data")]
ModelPath = Annotated[str, PathField("model")]
FolderPath = Annotated[str, PathField("folder")]  # never a hub id, even before it exists
JudgePath = Annotated[str, PathField("judge")]
PACKAGE = Path(__file__).parents[1]
MAX_NAME_BYTES = 255  # Linux's NAME_MAX
MAX_PATH_BYTES = 3500  # its PATH_MAX of 4096 minus paths inside a run
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        hint = "use letters, digits, `_`, `-` and `.`, starting with a letter or digit"
        raise invalid("not a valid name", hint, code="S03")
    return name


def _check_path_length(path: str) -> str:
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > MAX_NAME_BYTES:
        text = f"a path component has {longest} bytes; file systems allow {MAX_NAME_BYTES}"
        raise invalid(text, "set a folder with a shorter name", code="S03")
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        text = f"the path has {length} bytes; at most {MAX_PATH_BYTES} are allowed"
        raise invalid(text, "set a folder with a shorter path", code="S03")
    return path


Name = Annotated[str, AfterValidator(_check_name)]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml"]
TRACKER_NAMES: tuple[str, ...] = get_args(TrackerName)


class Output(Section):
    """Checkpoints, snapshots and trackers of a stage."""

    save_steps: PositiveInt | None = None
    keep: AtLeastTwo = 2
    snapshots: NonNegativeInt = 8
    run_name: Name | None = None
    report_to: list[TrackerName] = Field(default=[])
    project: Name | None = None


@dataclass(frozen=True)
class Options:
    """Options of the command line that are not part of the config."""

    dry_run: bool = False
    fresh: bool = False
    trust_remote_code: bool = False
    debug: bool = False
    nproc: str | None = None  # a number, or auto


class Config(Section):
    """Config of one stage. Path keys hold absolute paths; model keys may also hold a Hub id."""

    # Keys for logging and evaluation intervals and batch sizes, which do not affect the result.
    CADENCE: ClassVar[tuple[str, ...]] = (
        "logging_steps", "eval_steps", "per_device_eval_batch_size", "num_sample_generations",
        "generate_ref_response", "push_to_hub_if_best",
    )  # fmt: skip

    stage: str
    run: Annotated[str, PathField("run"), AfterValidator(_check_path_length)] = "."
    seed: int = Field(0, ge=0, lt=2**32)
    output: Output = Field(default_factory=Output)

    if TYPE_CHECKING:
        data: Any  # each stage has its own class

    _origin: Origin = PrivateAttr()

    @property
    def file(self) -> Path:
        """Return the absolute path of the YAML file."""
        return self._origin.file

    @property
    def other_members(self) -> list[Self]:
        """Return the configs of the stages that this one trains beside its own: members of an ensemble."""
        return []

    @property
    def folder(self) -> Path:
        """Return the absolute path of the stage's output folder."""
        return Path(self.run) / self.stage

    def where(self, key: str) -> str:
        """Return FILE:LINE of a key path such as "data.train" or of the nearest enclosing section, or `--set KEY`."""
        return self._origin.where(key)

    def is_written(self, key: str) -> bool:
        """Return True if the file or a `--set` contains exactly this key."""
        return key in self._origin.lines or self._origin.overridden(key)

    def dump(self, relative_to: Path | None = None) -> dict[str, Any]:
        """Return all keys and values, JSON-serialisable. Paths are relative to `relative_to` (POSIX) or absolute.

        Written as YAML to that folder, the result loads as the same config.
        """
        tree = self.model_dump(mode="json")
        if relative_to is not None:
            folder = Path(os.path.abspath(relative_to))
            for value in path_values(type(self), tree):
                value.replace(value.relative_to(folder))
        return tree

    def identity(self) -> dict[str, Any]:
        """Return the dump without keys that cannot change the result: paths, output, intervals, requirements.

        The content of input files is hashed elsewhere; a chat template file is included here as text.
        """
        tree = self.model_dump(mode="json", exclude={"stage", "output"})
        tree["output"] = {"snapshots": self.output.snapshots}
        for value in list(path_values(type(self), tree)):
            if value.field.kind == "template" and value.is_path:
                value.replace(Path(value.text).read_text(encoding="utf-8", errors="replace"))
            elif value.field.kind in ("data", "model") or value.is_path:
                del value.container[value.name]

        for key in ("subset", "revision", "max_dropped"):  # max_dropped can stop a run but not change its result
            tree["data"].pop(key)
        for key in (*self.CADENCE, "require", "require_reward"):
            tree.get(self.stage, {}).pop(key, None)
        for source in tree.get("rewards", {}).values():  # a run can resume with another timeout
            for key in ("timeout", "retries", "headers", "concurrency"):
                del source[key]
        return tree

    def sources(self) -> dict[str, DataSource]:
        """Return the data sources that the stage reads, by key path."""
        sources: dict[str, DataSource] = self.data.sources(self.where)
        return {key: replace(source, seed=self.seed) for key, source in sources.items()}

    def code(self) -> dict[str, Path]:
        """Return the Python files of `module:function` values, by key path."""
        functions: dict[str, Any] = {}
        for name, source in getattr(self, "rewards", {}).items():
            functions[f"rewards.{name}.function"] = source.function
        for name, judge in getattr(self, "judges", {}).items():
            functions[f"judges.{name}"] = judge

        found: dict[str, Path] = {}
        for key, function in functions.items():
            if isinstance(function, str) and FUNCTION.fullmatch(function):
                module = function.partition(":")[0]
                file = self._find_module(module)
                if file is not None:
                    found[key] = file
        return found

    def _find_module(self, module: str) -> Path | None:
        """Return the file that `import module` would find beside the config, where rlhf runs, or in rlhf."""
        folders = [self.file.parent, Path.cwd()]
        if module.startswith("rlhf_cli."):
            folders.append(PACKAGE.parent)
        for folder in folders:
            stem = folder / module.replace(".", "/")
            for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
                if os.path.isfile(file):  # False for a name that is too long, too
                    return file
        return None
