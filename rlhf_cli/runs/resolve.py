"""References to models: by the keys of a config, and by the RUN, --stage and --step of a command."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.eval import judge_kind
from rlhf_cli.config.ppo import VALUE_KEYWORDS, PPOConfig
from rlhf_cli.errors import Problem, RLHFError, did_you_mean, shell_path, shown, translate_read_errors
from rlhf_cli.files import cached_model, find_damage, select_files
from rlhf_cli.runs.checkpoints import state_at, state_steps
from rlhf_cli.runs.discover import POLICY_STAGES
from rlhf_cli.runs.parents import (
    FOREIGN,
    SNAPSHOTS,
    Parent,
    damaged_stage_error,
    finished_stage,
    no_stage_error,
    open_parent,
    read_manifest,
    short_hash,
    verify_parents,
)
from rlhf_cli.runs.report import FILE_NAME, Report, read_report
from rlhf_cli.runs.schemas import schema_error

LAST, SELECTED = "last", "selected"
STAGES = ("ppo", "sft", "dpo", "reward")
DEFAULT_STAGES = STAGES[:2]  # a reward model is resolved on request only


@dataclass(frozen=True)
class Reference:
    """A config key that names a model, its path, and the stages that may have written it."""

    key: str
    path: str
    expect: tuple[str, ...]
    revision: str | None = None  # of a hub id


def references(config: Any) -> list[Reference]:
    """Return the models that a stage's config names, in config order."""
    if config.stage in ("sft", "reward", "dpo"):
        expect = ("sft", "ppo", "dpo") if config.stage == "sft" else ("sft",)
        result = [Reference("model.path", config.model.path, expect, config.model.revision)]
        if config.stage == "sft" and config.best_of:
            result.append(Reference("best_of.reward", config.best_of.reward, ("reward",)))
        return [reference for reference in result if reference.path]
    models = config.models
    if config.stage == "eval":
        expected = {"sft": ("sft",), "ppo": ("ppo", "dpo"), "reward": ("reward",), "base": POLICY_STAGES}
        result = [Reference(f"models.{name}", getattr(models, name), stages) for name, stages in expected.items()]
        result += [Reference(f"policies.{name}", path, POLICY_STAGES) for name, path in config.policies.items()]
        models = {name: judge for name, judge in config.judges.items() if judge_kind(judge) == "model"}
        result += [Reference(f"judges.{name}", path, ("reward",)) for name, path in models.items()]
        return [reference for reference in result if reference.path]
    rewards: dict[str, str | None] = {}
    if models.value == "reward" or not config.rewards:  # reward sources have keys of their own
        rewards["models.reward"] = models.reward
    if models.value not in VALUE_KEYWORDS:
        rewards["models.value"] = models.value
    for name, source in config.rewards.items():
        rewards[f"rewards.{name}.model"] = source.model
        rewards |= {f"rewards.{name}.models.{member}": path for member, path in source.models.items()}
        rewards[f"rewards.{name}.pipeline"] = source.pipeline
    sft = Reference("models.sft", models.sft, ("sft",), models.revision)
    return [sft] + [Reference(key, path, ("reward",)) for key, path in rewards.items() if path]


def weights_bytes(config: Any) -> int:
    """Return the size of the weight files of the models that a stage reads, as far as they are on this machine."""
    folders = {Path(each.path) for each in references(config)}
    folders |= {path for each in references(config) if (path := cached_model(each.path, each.revision))}
    patterns = ("*.safetensors", "model/*.safetensors")
    files = {file for folder in folders for pattern in patterns for file in folder.glob(pattern)}
    return sum(file.stat().st_size for file in files)


def open_parents(config: Config, pending: Collection[Path] = (), *, hashed: bool = True) -> dict[str, Parent]:
    """Open all parents of a stage, by config key (model.path; models.sft, models.reward, rewards.NAME.model,
    judges.NAME).

    Skips the folders in `pending`, whose stages have yet to run. Without `hashed`, foreign models are not read; see
    `open_parent`. Raises RLHFError with the problems of all parents at once.
    """
    parents: dict[str, Parent] = {}
    problems: dict[str, list[Problem]] = {}  # by path, because several keys may name one folder
    for reference in references(config):
        if Path(reference.path) in pending:
            continue
        try:
            parents[reference.key] = open_reference(config, reference, hashed=hashed)
        except RLHFError as error:
            problems.setdefault(reference.path, list(error.problems))
    if problems:
        raise RLHFError.from_problems([problem for path_problems in problems.values() for problem in path_problems])
    return parents


def open_reference(config: Config, reference: Reference, *, hashed: bool = True) -> Parent:
    """Open the parent that a config key names. Raises as `open_parent`, and M10 for the stage's own output."""
    path, key, where, expect = reference.path, reference.key, config.where(reference.key), reference.expect
    if Path(path) == config.folder:
        text = f"{key} names the folder that this stage writes"
        raise RLHFError("M10", text, where=where, hint=f"name {finished_stage(expect)}")
    try:
        return open_parent(path, expect=expect, key=key, where=where, revision=reference.revision, hashed=hashed)
    except RLHFError as error:
        # other keys with the same path: a problem is reported once, for the first of them
        keys = [other.key for other in references(config) if other.path == path]
        if isinstance(config, PPOConfig) and config.models.reward == path:  # the default reward source
            keys.append("models.reward")
        others = [other for other in dict.fromkeys(keys) if other != key and config.is_written(other)]
        suffix = f" ({' and '.join(others)} too)" if others else ""
        problems = [replace(problem, text=problem.text + suffix) for problem in error.problems]
        raise RLHFError.from_problems(problems) from error


def check_same_tokenizer(
    a: Parent,
    b: Parent,
    *,
    where: str,
    foreign: Mapping[str, Mapping[str, str | None]] | None = None,
    difference: Callable[[Parent, Parent], str | None] = lambda *_: None,
) -> None:
    """Raise T04 if two parents have different tokenizers, T05 for different chat templates, with both hashes.

    The hashes are those of the manifests, for foreign parents those in `foreign`, by parent key. Unknown tokenizers are
    not compared, nor is the template of a foreign parent without one. The hash covers vocabulary, merges and special
    tokens; `difference` returns any other difference that changes the token ids.
    """
    left, right = ((foreign or {}).get(parent.key, parent.manifest) for parent in (a, b))

    def hashes(name: str) -> str:
        return f"({short_hash(right.get(name))} at {shown(b.path)}, {short_hash(left.get(name))} at {shown(a.path)})"

    differs = len({side.get("tokenizer_sha256") for side in (left, right)} - {None, ""}) == 2
    reason = None if differs else difference(a, b)
    if differs or reason:
        details = f"({shown(b.path)} beside {shown(a.path)}: {reason})" if reason else hashes("tokenizer_sha256")
        instead = {"models.value": "policy_head", "models.reward": "policy_head, or a PATH, not to copy it"}.get(b.key)
        hint = f"train the model of {b.key} from the checkpoint of {a.key}"
        hint += f"; or set models.value: {instead}" if instead else ""
        raise RLHFError("T04", f"{b.key} has another tokenizer than {a.key} {details}", where=where, hint=hint)
    templates = [(parent, side.get("template_sha256")) for parent, side in ((a, left), (b, right))]
    both_known = "template_sha256" in left and "template_sha256" in right
    compared = both_known and not any(parent.stage == FOREIGN and not sha256 for parent, sha256 in templates)
    if compared and templates[0][1] != templates[1][1]:
        text = f"{b.key} has another chat template than {a.key} {hashes('template_sha256')}"
        hint = "set the same model.chat_template in both stages' files and run the later stage again"
        raise RLHFError("T05", text, where=where, hint=hint)


@dataclass(frozen=True)
class ResolvedModel:
    """A model of a finished stage; `model.model` is its folder, for an earlier step of PPO that of a snapshot."""

    model: Parent
    step: int | None  # number of PPO updates
    last: bool  # the model is the stage's result, not a snapshot
    report: Report | None  # of RUN/eval, if it evaluated this model

    def __str__(self) -> str:
        if self.step is None:
            return shown(self.model.path)
        stopped = self.last and self.model.manifest.get("model_is") == "the best step"
        best = ", the best where the run was stopped" if stopped else ""
        return f"{shown(self.model.path)} after update {self.step}{best}"


def resolve_model(run: Path, stage: str | None, step: str) -> ResolvedModel:
    """Return the model of a run's or a stage's folder, after checking its files by hash.

    Without `stage`, returns PPO's policy, or the SFT model if PPO was never started. `step` is `last`, `selected` or
    the number of a snapshot.

    Raises RLHFError C07 for an unknown stage or step, C11 for a step of a stage other than PPO, M01 for a missing
    stage, M10 for an unfinished or damaged one or one without a selected step, C06 for a missing step, M05 for a
    damaged snapshot, M04 for a missing or changed base.
    """
    if stage is not None and stage not in STAGES:
        text = f"--stage {stage}: not one of {', '.join(STAGES)}"
        raise RLHFError("C07", text, hint=did_you_mean(stage, STAGES))
    require_step(step)
    with translate_read_errors(run):
        folder = _folder(run, stage)
    parent = open_parent(str(folder), expect=(stage,) if stage else STAGES, key="RUN", where="")
    verify_parents({parent.key: parent})
    problem = schema_error("manifest.json", parent.manifest)
    if problem or (parent.stage == "ppo" and "step" not in parent.manifest):
        raise damaged_stage_error(parent.key, parent.path, parent.stage, problem or "manifest.json names no step")
    report = _report(parent)
    if parent.stage != "ppo":
        if step != LAST:
            text = f"--step {step}: the {parent.stage} stage has one model only"
            raise RLHFError("C11", text, hint="omit --step; only PPO's policies have steps")
        return ResolvedModel(parent, None, True, report)
    end = parent.manifest["step"]
    number = end if step == LAST else _selected(parent, report) if step == SELECTED else int(step)
    if number == end:
        return ResolvedModel(parent, end, True, report)
    snapshots = parent.path / SNAPSHOTS
    steps = {*state_steps(snapshots), end}
    if number not in steps:
        names = ", ".join(map(str, sorted(steps)))
        text = f"--step {number}: {shown(parent.path)} has no policy of that step"
        raise RLHFError("C06", text, hint=f"there are {names}; output.snapshots in ppo.yaml keeps more")
    return ResolvedModel(replace(parent, model=state_at(snapshots, number)), number, False, report)


def require_step(step: str) -> None:
    """Raise RLHFError C07 unless `step` is `last`, `selected` or a number."""
    if not (step in (LAST, SELECTED) or step.isdecimal()):
        raise RLHFError("C07", f"--step {step}: not {LAST}, {SELECTED} or a number")


def _folder(run: Path, stage: str | None) -> Path:
    """Return the folder of the requested stage. Raises RLHFError M01, and M10 for an unfinished PPO stage."""
    if (run / "identity.json").is_file():
        return run
    started = [name for name in ([stage] if stage else DEFAULT_STAGES) if (run / name / "identity.json").is_file()]
    if not started:
        stage_folder = next((path for path in run.resolve().parents if (path / "identity.json").is_file()), None)
        missing = f"no {stage} stage" if stage else "neither ppo/ nor sft/ of a run"
        present = [name for name in STAGES if (run / name / "identity.json").is_file()]
        hint = f"it holds {' and '.join(present)}" if present else None
        hint = f"name the stage's folder: {shown(stage_folder)}" if stage_folder else hint
        raise no_stage_error(run, missing, hint)
    if stage is None and started == list(DEFAULT_STAGES) and not (run / "ppo/manifest.json").exists():
        text = f"{shown(run / 'ppo')} is not finished (its manifest.json is missing)"
        raise RLHFError("M10", text, hint=f"finish it: rlhf run {shell_path(run)}; or take the SFT model: --stage sft")
    return run / started[0]


def _report(parent: Parent) -> Report | None:
    """Return report.json of RUN/eval if it is undamaged and of this model."""
    folder = parent.path.resolve().parent / "eval"
    manifest, problem = read_manifest(folder)
    if problem or schema_error("manifest.json", manifest):
        return None
    if manifest.get("parents", {}).get(f"models.{parent.stage}", {}).get("sha256") != parent.sha256:
        return None
    if find_damage(folder, select_files(manifest["files"], FILE_NAME), where=str(folder), content=True):
        return None
    try:
        return read_report(folder)
    except RLHFError as error:
        if error.problems[0].code != "M05":
            raise
        return None


def _selected(ppo: Parent, report: Report | None) -> int:
    """Return the step that the evaluation selected. Raises RLHFError M10 without an evaluation, C06 if it selected
    none.
    """
    folder = shown(ppo.path.resolve().parent / "eval")
    if report is None:
        text = f"--step {SELECTED}: {folder} holds no finished evaluation of {shown(ppo.path)} as it is"
        raise RLHFError("M10", text, hint="run `rlhf eval`; eval.select in eval.yaml names the judge that selects")
    if report.selected_step is None:
        reason = report.selected.rule if report.selected else "eval.select names no judge"
        text = f"--step {SELECTED}: the evaluation in {folder} selected no policy ({reason})"
        raise RLHFError("C06", text, hint="set eval.select in eval.yaml and evaluate again, or give a step's number")
    return report.selected_step


POLICY_KEYS = ("model.path", "models.sft", "models.ppo", "models.base")


def is_policy_key(key: str) -> bool:
    """Return True for keys that name a language model, which may generate."""
    return key in POLICY_KEYS or key.startswith("policies.")


def is_scorer_key(key: str) -> bool:
    """Return True for keys that name a one-label model: reward, value or judge."""
    return not is_policy_key(key) and not key.endswith(".pipeline")
