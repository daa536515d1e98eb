"""A model of a run as its user names it: by the run's folder, a stage, and for PPO a point on its way."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli.checkpoints.files import damage, read_object, results
from rlhf_cli.checkpoints.parents import (
    SNAPSHOTS,
    Parent,
    damaged_stage,
    no_such_folder,
    open_parent,
    read_manifest,
    verify,
)
from rlhf_cli.checkpoints.shapes import oddity
from rlhf_cli.checkpoints.states import state_at, state_steps
from rlhf_cli.errors import RLHFError, nearest, quoted, reading, shown

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
