"""Which keys of a config name models, and the parents that they name."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli.config.ppo import VALUE_KEYWORDS
from rlhf_cli.errors import Problem, RLHFError, nearest, quoted, reading, shown
from rlhf_cli.files import damage, read_object, results
from rlhf_cli.runs.checkpoints import state_at, state_steps
from rlhf_cli.runs.parents import (
    SNAPSHOTS,
    Parent,
    damaged_stage,
    finished,
    no_such_folder,
    open_parent,
    read_manifest,
    verify,
)
from rlhf_cli.runs.shapes import oddity


@dataclass(frozen=True)
class Reference:
    """A key of a config that names a model: where it points, and what stages may have made it."""

    key: str
    path: str
    expect: tuple[str, ...]
    revision: str | None = None  # of a hub id


def references(config: Any) -> list[Reference]:
    """The models that a stage's config names, in the order of the config."""
    if config.stage in ("sft", "reward"):
        expect = ("sft",) if config.stage == "reward" else ("sft", "ppo")
        return [Reference("model.path", config.model.path, expect, config.model.revision)] if config.model.path else []
    if config.stage == "eval":
        found = [Reference("models.sft", config.models.sft, ("sft",))]
        found.append(Reference("models.ppo", config.models.ppo, ("ppo",)))
        if config.models.reward:
            found.append(Reference("models.reward", config.models.reward, ("reward",)))
        if config.models.base:
            found.append(Reference("models.base", config.models.base, ("sft", "ppo")))
        judges = {name: value for name, value in config.judges.items() if not _is_function(value)}
        return found + [Reference(f"judges.{name}", path, ("reward",)) for name, path in judges.items()]
    found = [Reference("models.sft", config.models.sft, ("sft",), config.models.revision)]
    if _needs_reward(config):
        found.append(Reference("models.reward", config.models.reward, ("reward",)))
    if config.models.value not in VALUE_KEYWORDS:
        found.append(Reference("models.value", config.models.value, ("reward",)))
    models: dict[str, str] = {}
    for name, source in config.rewards.items():
        models |= {f"rewards.{name}.model": source.model} if source.model else {}
        models |= {f"rewards.{name}.models.{member}": path for member, path in source.models.items()}
        models |= {f"rewards.{name}.pipeline": source.pipeline} if source.pipeline else {}
    return found + [Reference(key, path, ("reward",)) for key, path in models.items()]


def _needs_reward(config: Any) -> bool:
    """Whether PPO reads models.reward by that key: to start the value model. As a source it has a key of its own."""
    return config.models.value == "reward" or not config.rewards


def _is_function(value: str) -> bool:
    """Whether a judge is `package.module:function` rather than a path or a hub id."""
    module, colon, name = value.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def open_parents(config: Any, left_out: Collection[Path] = (), *, hashed: bool = True) -> dict[str, Parent]:
    """All parents of a stage, by config key (model.path; models.sft, models.reward, rewards.NAME.model, judges.NAME).

    Those in a folder of `left_out` are passed over: their stages are still to run. Unless `hashed`, foreign models are
    not read, see `open_parent`.
    Raises RLHFError with the problems of all of them at once.
    """
    parents: dict[str, Parent] = {}
    problems: dict[str, list[Problem]] = {}  # by path: several keys may name one folder
    for reference in references(config):
        if Path(reference.path) in left_out:
            continue
        try:
            parents[reference.key] = open_reference(config, reference, hashed=hashed)
        except RLHFError as error:
            problems.setdefault(reference.path, list(error.problems))
    if problems:
        raise RLHFError.of([problem for found in problems.values() for problem in found])
    return parents


def open_reference(config: Any, reference: Reference, *, hashed: bool = True) -> Parent:
    """`open_parent` of one key of a config; raises M10 too where it names the stage's own output."""
    key, where, expect = reference.key, config.where(reference.key), reference.expect
    if Path(reference.path) == config.folder:
        text = f"{key} names the folder that this stage writes"
        raise RLHFError("M10", text, where=where, hint=f"name {finished(expect)}")
    revision = reference.revision
    try:
        return open_parent(reference.path, expect=expect, key=key, where=where, revision=revision, hashed=hashed)
    except RLHFError as error:
        also = _named_too(config, reference)
        raise RLHFError.of([replace(problem, text=problem.text + also) for problem in error.problems]) from error


def _named_too(config: Any, reference: Reference) -> str:
    """The other keys that are written and name the same: what is wrong is told once, of the first."""
    keys = [each.key for each in references(config) if each.path == reference.path]
    if config.stage == "ppo" and config.models.reward == reference.path:  # the reward, where no other is named
        keys.append("models.reward")
    others = [key for key in dict.fromkeys(keys) if key != reference.key and config.is_written(key)]
    return f" ({' and '.join(others)} too)" if others else ""


LAST, SELECTED = "last", "selected"
STAGES = ("ppo", "sft", "reward")
UNASKED = STAGES[:2]  # a reward model is no result of a run: it is given where it is asked for


@dataclass(frozen=True)
class Chosen:
    """A model that a stage left; `model.model` is its folder, which for a point on PPO's way is a snapshot's."""

    model: Parent
    step: int | None  # PPO's updates up to it
    last: bool  # what the stage left as its result
    report: dict[str, Any] | None  # of the evaluation beside the stage, where that is of this stage's very model

    def __str__(self) -> str:
        """What it is, in words."""
        if self.step is None:
            return shown(self.model.path)
        stopped = self.last and self.model.manifest.get("model_is") == "the best step"
        best = ", the best where the run was stopped" if stopped else ""
        return f"{shown(self.model.path)} after update {self.step}{best}"


def choose(run: Path, stage: str | None, step: str) -> Chosen:
    """The model that a run's folder, or a stage's, stands for, its files verified hash by hash.

    Without `stage` the policy: PPO's, or the SFT model where no PPO was begun. `step` is `last`, `selected`, or the
    number of a snapshot. Raises RLHFError C07 for an unknown stage or step, C11 for a step of another stage than PPO,
    M01 where there is no such stage, M10 where it is unfinished, damaged, or no evaluation has selected, C06 for a step
    that is not there, M05 for a damaged snapshot, M04 for a base that is gone or has changed.
    """
    if stage is not None and stage not in STAGES:
        near = nearest(stage, STAGES)
        text = f"--stage {stage}: not one of {', '.join(STAGES)}"
        raise RLHFError("C07", text, hint=near and f"did you mean {near}?")
    require_step(step)
    with reading(run):
        folder = _folder(run, stage)
    found = open_parent(str(folder), expect=(stage,) if stage else STAGES, key="RUN", where="")
    verify({found.key: found})
    problem = oddity("manifest.json", found.manifest)
    if problem or (found.stage == "ppo" and "step" not in found.manifest):
        raise damaged_stage(found.key, found.path, found.stage, problem or "manifest.json names no step", "")
    report = _report(found)
    if found.stage != "ppo":
        if step != LAST:
            text = f"--step {step}: the {found.stage} stage leaves one model alone"
            raise RLHFError("C11", text, hint="leave --step out; PPO's policies have steps")
        return Chosen(found, None, True, report)
    end = found.manifest["step"]
    number = end if step == LAST else _selected(found, report) if step == SELECTED else int(step)
    if number == end:
        return Chosen(found, end, True, report)
    snapshots = found.path / SNAPSHOTS
    there = {*state_steps(snapshots), end}
    if number not in there:
        names = ", ".join(map(str, sorted(there)))
        text = f"--step {number}: {shown(found.path)} keeps no policy of that step"
        raise RLHFError("C06", text, hint=f"there are {names}; output.snapshots in ppo.yaml keeps more")
    return Chosen(replace(found, model=state_at(snapshots, number)), number, False, report)


def require_step(step: str) -> None:
    """Raises RLHFError C07 for what names no point on PPO's way."""
    if not (step in (LAST, SELECTED) or step.isdecimal()):
        raise RLHFError("C07", f"--step {step}: not {LAST}, {SELECTED} or a number")


def _folder(run: Path, stage: str | None) -> Path:
    """The folder of the stage that is asked for. Raises RLHFError M01, and M10 for a PPO that is not finished."""
    if (run / "identity.json").is_file():
        return run
    begun = [name for name in ([stage] if stage else UNASKED) if (run / name / "identity.json").is_file()]
    if not run.exists():
        raise no_such_folder(run, "", "name the folder of a run, e.g. runs/demo")
    if not begun:
        inner = next((path for path in run.resolve().parents if (path / "identity.json").is_file()), None)
        what = f"no {stage} stage" if stage else "neither ppo/ nor sft/ of a run"
        there = [name for name in STAGES if (run / name / "identity.json").is_file()]
        hint = f"it holds {' and '.join(there)}" if there else "name the folder of a run, e.g. runs/demo"
        hint = f"name the stage's folder: {shown(inner)}" if inner else hint
        raise RLHFError("M01", f"{shown(run)} holds {what}", hint=hint)
    if stage is None and begun == list(UNASKED) and not (run / "ppo/manifest.json").exists():
        text = f"{shown(run / 'ppo')} is not finished (its manifest.json is missing)"
        raise RLHFError("M10", text, hint=f"finish it: rlhf run {quoted(run)}; or take the SFT model: --stage sft")
    return run / begun[0]


def _report(found: Parent) -> dict[str, Any] | None:
    """report.json of RUN/eval, where it is as it was written and of the model that was found."""
    folder = found.path.resolve().parent / "eval"
    manifest, problem = read_manifest(folder)
    if problem or oddity("manifest.json", manifest):
        return None
    if manifest.get("parents", {}).get(f"models.{found.stage}", {}).get("sha256") != found.sha256:
        return None
    kept = results(manifest["files"], "report.json")
    report = None if damage(folder, kept, where=str(folder), content=True) else read_object(folder / "report.json")
    return None if report is None or oddity("report.json", report) else report


def _selected(ppo: Parent, report: dict[str, Any] | None) -> int:
    """The step that the evaluation picked. Raises RLHFError M10 where there is no evaluation, C06 where it did not."""
    folder = shown(ppo.path.resolve().parent / "eval")
    if report is None:
        text = f"--step {SELECTED}: {folder} holds no finished evaluation of {shown(ppo.path)} as it is"
        raise RLHFError("M10", text, hint="run `rlhf eval`; eval.select in eval.yaml names the judge that picks")
    if "selected_step" not in report:
        why = report["selected"]["rule"] if "selected" in report else "eval.select names no judge"
        text = f"--step {SELECTED}: the evaluation in {folder} picked no policy ({why})"
        raise RLHFError("C06", text, hint="set eval.select in eval.yaml and evaluate again, or give a step's number")
    return int(report["selected_step"])
