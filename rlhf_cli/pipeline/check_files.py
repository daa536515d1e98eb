"""What `rlhf check` finds: its report, and the checks of configs, files and parents. Imports no torch."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_cli import runs, terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.data import sources
from rlhf_cli.errors import Problem, RLHFError, closest_path, shown
from rlhf_cli.pipeline import run as pipeline
from rlhf_cli.runs.parents import Parent
from rlhf_cli.runs.resolve import Reference
from rlhf_cli.runs.status import StageStatus


@dataclass
class Report:
    """Results of a check, printed at its end. Warnings are printed by the terminal as they occur."""

    checked: list[dict[str, Any]] = field(default_factory=list)  # keys stage, what, found; some have numbers
    errors: dict[Problem, None] = field(default_factory=dict)  # an ordered set
    not_checked: list[str] = field(default_factory=list)  # what could not be checked, and why

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add an RLHFError raised in the block to the report, and leave the block."""
        try:
            yield
        except RLHFError as error:
            self.errors |= dict.fromkeys(error.problems)

    def attempt(self, check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of a check, or None after adding its RLHFError to the report."""
        with self.collecting():
            return check(*arguments, **options)
        return None

    def add(self, stage: str, label: str, result: str, **numbers: float) -> None:
        """Add a row to the table of checked items."""
        self.checked.append({"stage": stage, "what": label, "found": result, **numbers})

    def show(self, *, as_json: bool) -> int:
        """Print the report; return the exit code."""
        order = list(CONFIGS)
        self.checked.sort(key=lambda item: order.index(item["stage"]))
        if as_json:
            levels = [(problem, "error") for problem in self.errors]
            levels += [(problem, "warning") for problem in terminal.emitted_problems()]
            problems = [{**asdict(problem), "level": level} for problem, level in levels]
            report = {"ok": not self.errors, "problems": problems, "checked": self.checked}
            terminal.out(json.dumps({**report, "not_checked": self.not_checked}, indent=2))
            return 2 if self.errors else 0
        if self.checked:
            columns = ["stage", "what", "found"]
            terminal.table(columns, [[item[name] for name in columns] for item in self.checked])
        for text in self.not_checked:
            terminal.out(f"not checked: {text}")
        if not self.errors:
            dropped = [
                f"{item['stage']} {item['what']} {count} of {item['asked']} ({count / item['asked']:.1%})"
                for item in self.checked
                if (count := item.get("left_out"))
            ]
            summary = f"ok, but for {len(self.not_checked)} that could not be checked" if self.not_checked else "ok"
            terminal.out(summary + (f"; rows dropped: {', '.join(dropped)}" if dropped else ""))
        return self.show_errors()

    def show_errors(self) -> int:
        """Print the errors only; return the exit code."""
        for problem in self.errors:
            terminal.say(str(problem))
        return 2 if self.errors else 0


MODEL_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")  # a model id of the hub


@dataclass
class StageCheck:
    """State of the check of one stage."""

    config: Config
    valid: bool = True  # if False, invalid values were replaced by defaults, and only the files are checked
    parents: dict[str, Parent] = field(default_factory=dict)  # those that exist
    pending: dict[str, Path] = field(default_factory=dict)  # key -> folder that an earlier stage has yet to write
    data: set[str] = field(default_factory=set)  # keys whose files exist
    status: StageStatus | None = None  # of its output; None if unknown or rejected

    @property
    def finished(self) -> bool:
        return self.status is not None and self.status.state == "finished"


def check_files(stages: Sequence[StageCheck], report: Report, unreadable: Collection[Path], *, whole_run: bool) -> None:
    """Check the data, parents and output of all stages.

    In a whole run, outputs of earlier stages may be missing, and stale output is allowed. `unreadable` are the folders
    of stages whose configs could not be read; no error is reported for the stages that read them.
    """
    to_make = set(unreadable)
    for stage in stages:
        config = stage.config
        for key, source in config.sources().items():
            if not sources.is_local(source):
                outcome = "and HF_HUB_OFFLINE is set" if sources.is_offline() else "the stage would fetch it"
                text = f"{config.stage} {key}: {source.shown()} is not in the hub's cache; {outcome}"
                report.not_checked.append(text)
                continue
            with report.collecting():
                sources.locate({key: source})
                stage.data.add(key)
        _find_parents(stage, to_make, report)
        if not stage.valid:
            text = f"{config.stage}: rows and models, until the errors in {config.file.name} are fixed"
            report.not_checked.append(text)
            continue
        complete = len(stage.parents) == len(runs.references(config)) and len(stage.data) == len(config.sources())
        if complete and not stage.pending:  # the C15 or M05 with which the stage would fail
            with report.collecting():
                identity = runs.compute_identity(config, stage.parents, config.sources())
                stage.status = (runs.stage_status if whole_run else runs.require_current)(config, identity)
        output = f"; output: {pipeline.describe_status(stage.status)}" if stage.status else ""
        report.add(config.stage, shown(config.file), f"config read{output}")
        for folder, key in {folder: key for key, folder in reversed(stage.pending.items())}.items():
            report.add(config.stage, key, f"{shown(folder)}, which the {folder.name} stage is to make")
        if whole_run and not stage.finished:
            to_make.add(config.folder)


def _find_parents(stage: StageCheck, to_make: Collection[Path], report: Report) -> None:
    config, rejected = stage.config, set()
    for reference in runs.references(config):
        if Path(reference.path) in to_make:
            stage.pending[reference.key] = Path(reference.path)
        elif _is_uncached_hub_id(config, reference):
            text = f"{reference.path} is not in the hub's cache; fetch it first: hf download {reference.path}"
            report.not_checked.append(f"{config.stage} {reference.key}: {text}")
        elif reference.path not in rejected:  # several keys may name one folder
            try:
                stage.parents[reference.key] = runs.open_reference(config, reference)
            except RLHFError as error:
                rejected.add(reference.path)
                report.errors |= dict.fromkeys(error.problems)


def _is_uncached_hub_id(config: Config, reference: Reference) -> bool:
    """Return True if a name can only be a hub id that is not cached, not a misspelt folder beside the config."""
    name, config_folder = reference.path, config.file.parent
    if not MODEL_ID.fullmatch(name) or runs.is_available_locally(name, reference.revision):
        return False
    owner, slash, _ = name.partition("/")
    return not os.path.isdir(config_folder / owner) if slash else closest_path(config_folder / name) is None
