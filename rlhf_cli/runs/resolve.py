"""References to models: by the keys of a config, and by the RUN, --stage and --step of a command."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

from rlhf_cli import terminal
from rlhf_cli.config.base import Config
from rlhf_cli.config.dpo import DPOConfig
from rlhf_cli.config.eval import EvalConfig, judge_kind
from rlhf_cli.config.ppo import VALUE_KEYWORDS, PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sft import SFTConfig
from rlhf_cli.config.stages import TRLConfig
from rlhf_cli.data.labels import is_labels_folder
from rlhf_cli.errors import Problem, RLHFError, did_you_mean, shell_path, shown, translate_read_errors
from rlhf_cli.files import cached_model, find_damage, select_files
from rlhf_cli.runs.checkpoints import state_at, state_steps
from rlhf_cli.runs.integrity import verify_parents
from rlhf_cli.runs.layout import MODEL_STAGES, POLICY_STAGES, REPORT, SNAPSHOTS
from rlhf_cli.runs.manifest import Manifest, read_manifest
from rlhf_cli.runs.parents import (
    FOREIGN,
    Parent,
    damaged_stage_error,
    finished_stage,
    is_hub_id,
    no_stage_error,
    open_parent,
    short_hash,
)
from rlhf_cli.runs.report import RecommendedPolicy, Report, read_report

LAST = "last"
RECOMMENDED = "recommended"
SELECTED = "selected"  # the same
MEMBERS = ".members."  # between the key of a reward model that evaluates and the number of another member
DEFAULT_STAGES = MODEL_STAGES[:2]  # the others are resolved on request only


# A config key, the path there, the stages that may have written it, and the revision of a hub id.
Named = tuple[str, str | None, tuple[str, ...], str | None]


@dataclass(frozen=True)
class Reference:
    """A config key that names a model, its path, and the stages that may have written it."""

    key: str
    path: str
    expect: tuple[str, ...]
    revision: str | None = None  # of a hub id


def references(config: Config) -> list[Reference]:
    """Return the models that a stage's config names, in config order."""
    if config.stage == "eval":
        found = _references_of_evaluation(cast(EvalConfig, config))
    elif config.stage == "ppo":
        found = _references_of_ppo(cast(PPOConfig, config))
    else:
        found = _references_of_training(cast(TRLConfig, config))
    return [Reference(key, path, expect, revision) for key, path, expect, revision in found if path]


def _references_of_training(config: TRLConfig) -> list[Named]:
    """Return the models that SFT, the reward model or DPO starts from, and the scorer of best-of-n SFT."""
    expect = ("sft", "ppo", "dpo") if config.stage == "sft" else ("sft",)
    found: list[Named] = [("model.path", config.model.path, expect, config.model.revision)]
    if isinstance(config, SFTConfig) and config.best_of:
        found.append(("best_of.reward", config.best_of.reward, ("reward",), None))
    if isinstance(config, RewardConfig):
        found.append(("model.start", config.model.start, ("reward",), None))
    return found


def _references_of_evaluation(config: EvalConfig) -> list[Named]:
    models = config.models
    found: list[Named] = [
        ("models.sft", models.sft, ("sft",), None),
        ("models.ppo", models.ppo, ("ppo", "dpo"), None),
        ("models.reward", models.reward, ("reward",), None),
        ("models.base", models.base, POLICY_STAGES, None),
        ("models.previous", models.previous, POLICY_STAGES, None),
    ]
    found += [(f"policies.{name}", path, POLICY_STAGES, None) for name, path in config.policies.items()]
    scorers = {"models.reward": models.reward}
    for name, judge in config.judges.items():
        if judge_kind(judge) == "model":
            found.append((f"judges.{name}", str(judge), ("reward",), None))
            scorers[f"judges.{name}"] = str(judge)
    for key, path in scorers.items():
        found += [(f"{key}{MEMBERS}{number}", path, ("reward",), None) for number, path in _other_members(path).items()]
    return found


def other_member_keys(key: str, parents: Iterable[str]) -> dict[str, str]:
    """Return the keys of an ensemble's members but the first, which has `key` itself, by number."""
    prefix = f"{key}{MEMBERS}"
    return {name.removeprefix(prefix): name for name in parents if name.startswith(prefix)}


def _references_of_ppo(config: PPOConfig) -> list[Named]:
    models = config.models
    scorers: dict[str, str | None] = {}
    if models.value == "reward" or not config.rewards:  # reward sources have keys of their own
        scorers["models.reward"] = models.reward
    if models.value not in VALUE_KEYWORDS:
        scorers["models.value"] = models.value
    for name, source in config.rewards.items():
        scorers[f"rewards.{name}.model"] = source.model
        members = source.models or _other_members(source.model)
        scorers |= {f"rewards.{name}.models.{member}": path for member, path in members.items()}
        scorers[f"rewards.{name}.pipeline"] = source.pipeline

    found: list[Named] = [
        ("models.sft", models.sft, ("sft",), models.revision),
        ("models.policy", models.policy, POLICY_STAGES, None),
    ]
    found += [(key, path, ("reward",), None) for key, path in scorers.items()]
    return found


def _other_members(path: str | None) -> dict[str, str]:
    """Return the folders of an ensemble's members but the first, whose finished stage is in `path`, by number.

    If the first one cannot be read (E08), there are none here: opening it says so.
    """
    manifest = Manifest()
    if path:
        with suppress(RLHFError):
            manifest, _ = read_manifest(Path(path))
    return {number: os.path.normpath(Path(str(path), entry.path)) for number, entry in manifest.members.items()}


def weights_bytes(config: Config) -> int:
    """Return the size of the weight files of the models that a stage reads, as far as they are on this machine."""
    folders: set[Path] = set()
    for reference in references(config):
        folders.add(Path(reference.path))
        cached = cached_model(reference.path, reference.revision)
        if cached:
            folders.add(cached)

    files: set[Path] = set()
    for folder in folders:
        files.update(folder.glob("*.safetensors"))
        files.update(folder.glob("model/*.safetensors"))
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
        raise RLHFError.from_problems(list(chain.from_iterable(problems.values())))
    return parents


def open_reference(config: Config, reference: Reference, *, hashed: bool = True) -> Parent:
    """Open the parent that a config key names. Raises as `open_parent`, and M10 for the stage's own output."""
    key = reference.key
    where = config.where(reference.key)
    if Path(reference.path) == config.folder:
        text = f"{key} names the folder that this stage writes"
        raise RLHFError("M10", text, where=where, hint=f"name {finished_stage(reference.expect)}")
    if key.startswith("judges.") and is_labels_folder(Path(reference.path)):
        text = f"{key} names a folder of labels, and a path is a reward model's"
        path = os.path.relpath(reference.path, config.file.parent)
        raise RLHFError("M01", text, where=where, hint=f"name labels by their key: {{labels: {path}}}")

    try:
        return open_parent(
            reference.path,
            expect=reference.expect,
            key=key,
            where=where,
            revision=reference.revision,
            hashed=hashed,
        )
    except RLHFError as error:
        others = _other_keys(config, reference)
        suffix = f" ({' and '.join(others)} too)" if others else ""
        problems = [replace(problem, text=problem.text + suffix) for problem in error.problems]
        raise RLHFError.from_problems(problems) from error


def _other_keys(config: Config, reference: Reference) -> list[str]:
    """Return the other written keys with the same path: a problem is reported once, for the first of them."""
    named = [other for other in references(config) if other.path == reference.path]
    keys = dict.fromkeys(other.key for other in named)
    if isinstance(config, PPOConfig) and config.models.reward == reference.path:  # the default reward source
        keys["models.reward"] = None
    keys.pop(reference.key, None)
    return [key for key in keys if config.is_written(key)]


def check_same_tokenizer(
    a: Parent,
    b: Parent,
    *,
    where: str,
    foreign: Mapping[str, Manifest] | None = None,
    difference: Callable[[Parent, Parent], str | None] = lambda *_: None,
) -> None:
    """Raise T04 if two parents have different tokenizers, T05 for different chat templates, with both hashes.

    The hashes are those of the manifests, for foreign parents those in `foreign`, by parent key. Unknown tokenizers are
    not compared, nor is the template of a foreign parent without one. The hash covers vocabulary, merges and special
    tokens; `difference` returns any other difference that changes the token ids.
    """
    manifests = foreign or {}
    left = manifests.get(a.key, a.manifest)
    right = manifests.get(b.key, b.manifest)

    def hashes(of_a: str | None, of_b: str | None) -> str:
        return f"({short_hash(of_b)} at {shown(b.path)}, {short_hash(of_a)} at {shown(a.path)})"

    are_known = bool(left.tokenizer_sha256 and right.tokenizer_sha256)
    differs = are_known and left.tokenizer_sha256 != right.tokenizer_sha256
    reason = None if differs else difference(a, b)
    if differs or reason:
        details = hashes(left.tokenizer_sha256, right.tokenizer_sha256)
        if reason:
            details = f"({shown(b.path)} beside {shown(a.path)}: {reason})"
        instead = {"models.value": "policy_head", "models.reward": "policy_head, or a PATH, not to copy it"}.get(b.key)
        hint = f"train the model of {b.key} from the checkpoint of {a.key}"
        hint += f"; or set models.value: {instead}" if instead else ""
        raise RLHFError("T04", f"{b.key} has another tokenizer than {a.key} {details}", where=where, hint=hint)

    compared = _has_comparable_template(a, left) and _has_comparable_template(b, right)
    if compared and left.template_sha256 != right.template_sha256:
        templates = hashes(left.template_sha256, right.template_sha256)
        text = f"{b.key} has another chat template than {a.key} {templates}"
        hint = "set the same model.chat_template in both stages' files and run the later stage again"
        raise RLHFError("T05", text, where=where, hint=hint)


def _has_comparable_template(parent: Parent, manifest: Manifest) -> bool:
    """Return True if the template is known, and not missing because the model was not trained here."""
    is_known = manifest.records("template_sha256")
    return is_known and (parent.stage != FOREIGN or bool(manifest.template_sha256))


@dataclass(frozen=True)
class MergedPolicy:
    """Another policy in a weighted mean of weights; the policy itself has what the others leave of 1."""

    model: Parent
    weight: float

    def __str__(self) -> str:
        folder = self.model.path.resolve()
        return f"{self.weight:g} of {folder.parent.name}/{folder.name}"


@dataclass(frozen=True)
class ResolvedModel:
    """A model of a finished stage; `model.model` is its folder, for an earlier step of PPO that of a snapshot."""

    model: Parent
    step: int | None  # number of PPO updates
    last: bool  # the model is the stage's result, not a snapshot
    report: Report | None  # of RUN/eval, if it evaluated this model
    merged: tuple[MergedPolicy, ...] = ()  # into its weights
    share: float | None = None  # of the way to it from the SFT model, if that is the policy to take

    @property
    def is_as_written(self) -> bool:
        """Return True if it is the stage's result: no snapshot, and with the weights in the stage's folder."""
        return self.last and self.share is None and not self.merged

    @property
    def is_recommended(self) -> bool:
        """Return True if this is the policy that the evaluation recommends."""
        if self.report is None or self.report.recommended is None or self.merged:
            return False
        recommended = self.report.recommended
        if recommended.is_sft:
            return self.model.stage == "sft"
        return (self.step, self.share) == (self.report.selected_step, recommended.share)

    def __str__(self) -> str:
        if self.step is None:
            return shown(self.model.path)
        was_stopped = self.last and self.model.manifest.model_is == "the best step"
        best = ", the best where the run was stopped" if was_stopped else ""
        return f"{shown(self.model.path)} after update {self.step}{best}{self.change_of_weights}"

    @property
    def change_of_weights(self) -> str:
        """Return how its weights differ from those in its folder as text; empty if they do not."""
        text = ""
        if self.merged:
            others = " and ".join(str(other) for other in self.merged)
            text += f" merged with {others}"
        if self.share is not None:
            text += f" at share {self.share:g} from its SFT model"
        return text


def resolve_model(run: Path, stage: str | None, step: str | None) -> ResolvedModel:
    """Return the model of a run's or a stage's folder, after checking its files by hash.

    Without `stage`, returns PPO's policy, or the SFT model if PPO was never started. `step` is `last`, `recommended`
    (or `selected`) or the number of a snapshot. None is `recommended` where there is such a policy of this stage, else
    `last`; which it is and why is said in a line if there was a choice.

    Raises RLHFError C07 for an unknown stage or step, C11 for a step of a stage other than PPO, M01 for a missing
    stage, M10 for an unfinished or damaged one or one without a recommended policy, C06 for a missing step, M05 for a
    damaged snapshot, M04 for a missing or changed base.
    """
    if stage is not None and stage not in MODEL_STAGES:
        text = f"--stage {stage}: not one of {', '.join(MODEL_STAGES)}"
        raise RLHFError("C07", text, hint=did_you_mean(stage, MODEL_STAGES))
    require_step(step or LAST)
    with translate_read_errors(run):
        folder = _folder(run, stage)
    parent = open_parent(str(folder), expect=(stage,) if stage else MODEL_STAGES, key="RUN", where="")
    verify_parents({parent.key: parent})
    end = parent.manifest.step
    odd = parent.manifest.odd
    if odd or (parent.stage == "ppo" and end is None):
        raise damaged_stage_error(parent.key, parent.path, parent.stage, odd or "manifest.json names no step")
    report = _report(parent)
    if parent.stage != "ppo":
        if step not in (None, LAST):
            text = f"--step {step}: the {parent.stage} stage has one model only"
            raise RLHFError("C11", text, hint="omit --step; only PPO's policies have steps")
        return ResolvedModel(parent, step=None, last=True, report=report)

    last = ResolvedModel(parent, step=end, last=True, report=report)
    if step in (RECOMMENDED, SELECTED):
        recommended = _require_recommended(last, step)
        if recommended.is_sft and stage == "ppo":
            text = f"--step {step}: the SFT model is recommended, not a policy of PPO"
            raise RLHFError("C06", text, hint="--step last takes PPO's last policy")
        return _recommended(last, recommended)
    if step is None:
        return _by_default(last, is_named=stage is not None or _is_started(run))
    return last if step == LAST else _at_step(last, int(step))


def _by_default(last: ResolvedModel, *, is_named: bool) -> ResolvedModel:
    """Return the recommended policy, else the last one; that one, too, instead of SFT if PPO's stage `is_named`."""
    recommended = last.report.recommended if last.report else None
    if recommended is not None and not (recommended.is_sft and is_named):
        return _recommended(last, recommended)
    others = set(state_steps(last.model.path / SNAPSHOTS)) - {last.step}
    if recommended is None and others:
        which = f"the last policy, after update {last.step}"
        again = " --fresh" if last.report else ""  # an older version's evaluation recommends none
        terminal.say(f"{which}: no evaluation recommends one of {len(others) + 1} (rlhf eval{again})")
    return last


def _recommended(last: ResolvedModel, recommended: RecommendedPolicy) -> ResolvedModel:
    """Return the policy that the evaluation recommends, and say which it is and why."""
    assert last.report is not None
    terminal.say(f"recommended: {last.report.recommendation}; --step last takes the last policy")
    if recommended.is_sft:
        sft = sft_of(last.model)
        if sft.stage == FOREIGN:
            text = f"the evaluation recommends {shown(sft.path)}, which no stage wrote"
            raise RLHFError("C11", text, hint="take that model as it is, or PPO's last policy: --step last")
        return ResolvedModel(sft, step=None, last=True, report=last.report)
    assert last.report.selected_step is not None
    return replace(_at_step(last, last.report.selected_step), share=recommended.share)


def _at_step(last: ResolvedModel, number: int) -> ResolvedModel:
    """Return PPO's policy after an update. Raises RLHFError C06 if there is none, M05 for a damaged snapshot."""
    if number == last.step:
        return last
    snapshots = last.model.path / SNAPSHOTS
    steps = state_steps(snapshots)
    if number not in steps:
        names = ", ".join(map(str, sorted({*steps, last.step or 0})))
        text = f"--step {number}: {shown(last.model.path)} has no policy of that step"
        raise RLHFError("C06", text, hint=f"there are {names}; output.snapshots in ppo.yaml keeps more")
    snapshot = replace(last.model, model=state_at(snapshots, number))
    return replace(last, model=snapshot, step=number, last=False)


def started_from(ppo: Parent, sft: Parent) -> bool:
    """Return True if PPO's stage started from this SFT model."""
    start = ppo.manifest.parents.get("models.sft") if ppo.stage == "ppo" else None
    return start is not None and start.sha256 == sft.sha256


def sft_of(ppo: Parent) -> Parent:
    """Return the SFT model that PPO started from. Raises RLHFError M01 or M10 if it is missing or changed."""
    entry = ppo.manifest.parents["models.sft"]
    path = entry.path if is_hub_id(entry.path) else os.path.abspath(ppo.path / entry.path)
    sft = open_parent(path, expect=("sft",), key="models.sft", where="", revision=entry.revision)
    verify_parents({sft.key: sft})
    if sft.sha256 != entry.sha256:
        text = f"{shown(sft.path)} is no longer the model that PPO was trained with"
        raise RLHFError("M10", text, hint="run PPO again, or restore the old SFT model")
    return sft


def require_step(step: str) -> None:
    """Raise RLHFError C07 unless `step` is `last`, `recommended`, `selected` or a number."""
    if not (step in (LAST, RECOMMENDED, SELECTED) or step.isdecimal()):
        raise RLHFError("C07", f"--step {step}: not {LAST}, {RECOMMENDED} or a number")


def _folder(run: Path, stage: str | None) -> Path:
    """Return the folder of the requested stage. Raises RLHFError M01, and M10 for an unfinished PPO stage."""
    if _is_started(run):
        return run

    wanted = [stage] if stage else list(DEFAULT_STAGES)
    started = [name for name in wanted if _is_started(run / name)]
    if not started:
        raise _no_model_error(run, stage)
    if stage is None and started == wanted and not (run / "ppo/manifest.json").exists():
        text = f"{shown(run / 'ppo')} is not finished (its manifest.json is missing)"
        raise RLHFError("M10", text, hint=f"finish it: rlhf run {shell_path(run)}; or take the SFT model: --stage sft")
    return run / started[0]


def _is_started(folder: Path) -> bool:
    return (folder / "identity.json").is_file()


def _no_model_error(run: Path, stage: str | None) -> RLHFError:
    """Return M01 for a folder without the requested stage, with what it holds instead as the hint."""
    missing = f"no {stage} stage" if stage else "neither ppo/ nor sft/ of a run"
    stage_folder = next(filter(_is_started, run.resolve().parents), None)
    if stage_folder:
        return no_stage_error(run, missing, f"name the stage's folder: {shown(stage_folder)}")

    present = [name for name in MODEL_STAGES if _is_started(run / name)]
    return no_stage_error(run, missing, f"it holds {' and '.join(present)}" if present else None)


def _report(parent: Parent) -> Report | None:
    """Return report.json of RUN/eval if it is undamaged and of this model."""
    folder = parent.path.resolve().parent / "eval"
    manifest, problem = read_manifest(folder)
    evaluated = manifest.parents.get(f"models.{parent.stage}")
    if problem or manifest.odd or evaluated is None or evaluated.sha256 != parent.sha256:
        return None
    if find_damage(folder, select_files(manifest.files, REPORT), where=str(folder), content=True):
        return None
    try:
        return read_report(folder)
    except RLHFError as error:
        if error.problems[0].code != "M05":
            raise
        return None


def _require_recommended(last: ResolvedModel, step: str) -> RecommendedPolicy:
    """Return the recommended policy. Raises RLHFError M10 without an evaluation, C06 if it recommends none."""
    ppo = shown(last.model.path)
    folder = shown(last.model.path.resolve().parent / "eval")
    if last.report is None:
        text = f"--step {step}: {folder} holds no finished evaluation of {ppo} as it is"
        raise RLHFError("M10", text, hint="run `rlhf eval`")
    if last.report.recommended is None:
        text = f"--step {step}: the evaluation in {folder} recommends no policy"
        hint = "evaluate again with eval.frontier or eval.interpolate, or give a step's number"
        raise RLHFError("C06", text, hint=hint)
    return last.report.recommended


POLICY_KEYS = ("model.path", "models.sft", "models.policy", "models.ppo", "models.base", "models.previous")


def is_policy_key(key: str) -> bool:
    """Return True for keys that name a language model, which may generate."""
    return key in POLICY_KEYS or key.startswith("policies.")


def is_scorer_key(key: str) -> bool:
    """Return True for keys that name a one-label model: reward, value or judge."""
    return not is_policy_key(key) and not key.endswith(".pipeline")


@dataclass(frozen=True)
class ModelUse:
    """A model that a stage keeps in memory: its role, and the key that names it."""

    role: str
    key: str


def models_in_memory(config: Config) -> list[ModelUse]:
    """Return the models a stage keeps in memory at the same time; frozen models are loaded once per folder.

    In an evaluation models.ppo and the policies are loaded one after the other; models.ppo stands for models.base too.
    """
    folders = {reference.key: reference.path for reference in references(config)}
    if isinstance(config, TRLConfig):
        others = [ModelUse("reference", "model.path")] if isinstance(config, DPOConfig) else []
        if isinstance(config, SFTConfig) and config.best_of:  # before the training
            others = [ModelUse("reward", "best_of.reward")]
        return [ModelUse("reward" if isinstance(config, RewardConfig) else "policy", "model.path"), *others]
    if isinstance(config, EvalConfig):
        policies = [key for key in folders if is_policy_key(key) and key != "models.base"]
        judges = [ModelUse("judge", key) for key in folders if not is_policy_key(key)]
        return [ModelUse("policy", key) for key in policies] + judges
    assert isinstance(config, PPOConfig)
    models = [ModelUse("policy", "models.sft"), ModelUse("reference", "models.sft")]
    if config.models.value not in ("policy_head", "none"):
        models.append(ModelUse("value", "models.reward" if config.models.value == "reward" else "models.value"))
    scorers = {path: key for key, path in reversed(folders.items()) if is_scorer_key(key) and key != "models.value"}
    return models + [ModelUse("reward", key) for key in reversed(scorers.values())]
