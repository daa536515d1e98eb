"""Context of a model card: the model, the stages that produced it, and its evaluation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from rlhf_cli.commands.export.markdown import text
from rlhf_cli.commands.report.runs import STAGES, Run, Stage, at_step, read_stage
from rlhf_cli.config.sources import hub_dataset, split_name
from rlhf_cli.data.tokens import Conversation
from rlhf_cli.errors import RLHFError
from rlhf_cli.runs.adapters import is_hub_id
from rlhf_cli.runs.parents import FOREIGN
from rlhf_cli.runs.resolve import ResolvedModel
from rlhf_cli.stages import setup
from rlhf_cli.tracking.metrics_log import read_log


@dataclass(frozen=True)
class ModelCardContext:
    """The data that the sections of a model card use."""

    name: str  # of the model at its destination
    address: str  # argument of from_pretrained()
    chosen: ResolvedModel
    stages: tuple[Stage, ...]  # that produced the model, its own first; unchanged since
    run: Run  # the stages by kind, with the evaluation of this policy
    model: Any
    tokenizer: Any
    dtype: str
    updates: int  # of PPO, including later ones
    prompts: setup.PromptFormat  # format of prompts
    example: str | Conversation | None  # a held-out prompt that may be shown

    @property
    def stage(self) -> Stage:
        """Return the stage that trained the model."""
        return self.stages[0]

    @property
    def labels(self) -> dict[Any, str]:
        """Return the label of each stage by the hash of its model.

        Of two stages of a kind the nearer has its plain name, the other is prefixed by its run's folder.
        """
        labels: dict[Any, str] = {}
        for stage in self.stages:
            label = stage.name
            if label in labels.values():
                label = text(f"{stage.folder.resolve().parent.name}/{stage.name}")
            if label in labels.values():
                label += f" {str(sha256_of(stage))[:4]}"
            labels[sha256_of(stage)] = label
        return labels

    @property
    def report(self) -> Mapping[str, Any]:
        """Return report.json of the evaluation of this model; empty if there is none."""
        return self.run.report or {}

    @property
    def is_evaluated(self) -> bool:
        """Return True if an evaluation covers this policy."""
        return self.stage.name in self.report.get("models", {})

    @property
    def rewarded_by(self) -> set[str]:
        """Return the hashes of PPO's reward models; empty for other stages."""
        parents = self.stage.told("parents").items()
        return {parent["sha256"] for key, parent in parents if key.startswith("rewards.")}

    @property
    def reward_models(self) -> list[Stage]:
        """Return the reward stages of the card: the model's own stage, or those that PPO was trained on."""
        reward = [stage for stage in self.stages if stage.name == "reward"]
        return [stage for stage in reward if stage is self.stage or sha256_of(stage) in self.rewarded_by]

    @property
    def base(self) -> Mapping[str, Any]:
        """Return the external base model, as in the first stage's manifest; empty for fresh weights."""
        stage, below = self.stage, started_from(self.stage)
        while below and below["stage"] != FOREIGN:
            matches = [candidate for candidate in self.stages if sha256_of(candidate) == below["sha256"]]
            if not matches or matches[0] is stage:
                return {}
            stage, below = matches[0], started_from(matches[0])
        return below


def build_context(
    chosen: ResolvedModel,
    model: Any,
    tokenizer: Any,
    dtype: str,
    name: str,
    address: str,
    example: str | Conversation | None = None,
) -> ModelCardContext:
    """Collect the context of the chosen model's card."""
    own = read_stage(chosen.model.stage, chosen.model.path)
    updates = max((row["step"] for row in own.metrics), default=0)
    if not chosen.last:  # leave out later updates
        own = replace(own, metrics=tuple(row for row in own.metrics if row["step"] <= (chosen.step or 0)))
    stages = tuple(_lineage(own))
    root = chosen.model.path.resolve().parent
    kinds = {kind: next((stage for stage in stages if stage.name == kind), Stage(kind, root / kind)) for kind in STAGES}
    if chosen.report:
        kinds["eval"] = read_stage("eval", root / "eval")
    firings = read_log(chosen.model.path / "watchdog.jsonl") if chosen.step is not None else []
    firings = [row for row in firings if row["step"] <= (chosen.step or 0)]
    run = Run(root.name, root, kinds, chosen.report, (), (), tuple(firings), ())
    prompts = setup.prompt_format(setup.training_prompt_form(chosen.model), tokenizer)
    return ModelCardContext(
        name, address, chosen, stages, _at(run, chosen), model, tokenizer, dtype, updates, prompts, example
    )


def started_from(stage: Stage) -> Mapping[str, Any]:
    """Return the manifest entry of a stage's initial model; empty for fresh weights."""
    parents = stage.told("parents")
    return parents.get("models.sft") or parents.get("model.path") or {}


def sha256_of(stage: Stage) -> Any:
    """Return the hash of a stage's model."""
    return (stage.manifest or {}).get("model_sha256")


def report_card(reward: Stage) -> dict[str, Any]:
    """Return a reward model's evaluation on held-out pairs; without "accuracy" if there were none."""
    return {**reward.told("metrics"), **reward.told("card")}


def is_hub_model(parent: Mapping[str, Any]) -> bool:
    """Return True if a manifest's parent entry is a model on the hub."""
    return bool(parent) and parent["stage"] == FOREIGN and is_hub_id(parent["path"])


def data_name(stage: Stage, key: str) -> str:
    """Return the name of a stage's data: a hub dataset or a file name, never a path."""
    path = (
        stage.setting(key) or stage.setting("data.train") or stage.setting("data.prompts")
    )  # a part held out of training data
    name, split = split_name(path) if isinstance(path, str) else ("", None)
    plain = name if hub_dataset(name) else PurePosixPath(name).name
    return plain + (f"[{split}]" if split else "")


def _lineage(stage: Stage) -> Iterator[Stage]:
    """Yield a stage and its ancestors, as far as they have not changed since."""
    seen: set[str] = set()
    waiting = [stage]
    while waiting:
        stage = waiting.pop(0)
        if sha256_of(stage) in seen:
            continue
        seen.add(sha256_of(stage))
        yield stage
        for parent in stage.told("parents").values():
            above = read_stage(parent["stage"], stage.folder / parent["path"]) if parent["stage"] != FOREIGN else None
            if above and sha256_of(above) == parent["sha256"] and above.state == "finished":
                waiting.append(above)


def _at(run: Run, chosen: ResolvedModel) -> Run:
    """Return the run with the evaluation of the chosen step, or without one if it was not evaluated."""
    if chosen.last:
        return run
    try:
        return at_step(run, str(chosen.step))
    except RLHFError:
        return replace(run, report=None)
