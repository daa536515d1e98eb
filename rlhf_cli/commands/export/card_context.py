"""What a card is about: a model, the stages that it came from, and what an evaluation found out about it."""

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
from rlhf_cli.runs.references import ResolvedModel
from rlhf_cli.stages import setup
from rlhf_cli.stages.setup import PromptFormat
from rlhf_cli.tracking.metrics_log import read_log


@dataclass(frozen=True)
class Subject:
    """All that the parts of a card are made from."""

    name: str  # what the model is called where it goes
    address: str  # what `from_pretrained` takes there
    chosen: ResolvedModel
    stages: tuple[Stage, ...]  # that it came from, itself first, and no other than they were then
    run: Run  # the same, one of a kind, with the evaluation of this very policy
    model: Any
    tokenizer: Any
    dtype: str
    updates: int  # that PPO has made, before and after the policy
    prompts: PromptFormat  # how they go to the model
    example: str | Conversation | None  # a held-out prompt that may be shown

    @property
    def stage(self) -> Stage:
        """The one that made the model."""
        return self.stages[0]

    @property
    def labels(self) -> dict[Any, str]:
        """The hash of what each stage made -> what a card calls the stage: of two of a kind the nearer has its name
        alone, the other its run's folder before it.
        """
        found: dict[Any, str] = {}
        for stage in self.stages:
            label = stage.name
            if label in found.values():
                label = text(f"{stage.folder.resolve().parent.name}/{stage.name}")
            if label in found.values():
                label += f" {str(sha256_of(stage))[:4]}"
            found[sha256_of(stage)] = label
        return found

    @property
    def report(self) -> Mapping[str, Any]:
        """report.json of an evaluation of this very model; empty where there is none."""
        return self.run.report or {}

    @property
    def is_evaluated(self) -> bool:
        """Whether an evaluation tells of the answers of this very policy."""
        return self.stage.name in self.report.get("models", {})

    @property
    def rewarded_by(self) -> set[str]:
        """The hashes of the models that PPO was trained on; none of another stage. It may read others for a start."""
        parents = self.stage.told("parents").items()
        return {told["sha256"] for key, told in parents if key.startswith("rewards.")}

    @property
    def reward_models(self) -> list[Stage]:
        """The reward stages that the card is about: the model's own, or those that PPO was trained on."""
        reward = [stage for stage in self.stages if stage.name == "reward"]
        return [stage for stage in reward if stage is self.stage or sha256_of(stage) in self.rewarded_by]

    @property
    def base(self) -> Mapping[str, Any]:
        """What its weights once were, as the first stage tells it: not ours, or empty for fresh weights."""
        stage, below = self.stage, started_from(self.stage)
        while below and below["stage"] != FOREIGN:
            found = [each for each in self.stages if sha256_of(each) == below["sha256"]]
            if not found or found[0] is stage:
                return {}
            stage, below = found[0], started_from(found[0])
        return below


def subject(
    chosen: ResolvedModel,
    model: Any,
    tokenizer: Any,
    dtype: str,
    name: str,
    address: str,
    example: str | Conversation | None = None,
) -> Subject:
    """What a card of the chosen model can tell."""
    own = read_stage(chosen.model.stage, chosen.model.path)
    updates = max((row["step"] for row in own.metrics), default=0)
    if not chosen.last:  # of what came after the policy nothing is told
        own = replace(own, metrics=tuple(row for row in own.metrics if row["step"] <= (chosen.step or 0)))
    stages = tuple(_lineage(own))
    root = chosen.model.path.resolve().parent
    kinds = {kind: next((each for each in stages if each.name == kind), Stage(kind, root / kind)) for kind in STAGES}
    if chosen.report:
        kinds["eval"] = read_stage("eval", root / "eval")
    firings = read_log(chosen.model.path / "watchdog.jsonl") if chosen.step is not None else []
    firings = [row for row in firings if row["step"] <= (chosen.step or 0)]
    run = Run(root.name, root, kinds, chosen.report, (), (), tuple(firings), ())
    prompts = setup.prompt_format(setup.training_prompt_form(chosen.model), tokenizer)
    return Subject(name, address, chosen, stages, _at(run, chosen), model, tokenizer, dtype, updates, prompts, example)


def started_from(stage: Stage) -> Mapping[str, Any]:
    """The model whose weights a stage went on with, as its manifest tells it; empty for fresh weights."""
    parents = stage.told("parents")
    return parents.get("models.sft") or parents.get("model.path") or {}


def sha256_of(stage: Stage) -> Any:
    """The hash of what a stage made."""
    return (stage.manifest or {}).get("model_sha256")


def report_card(reward: Stage) -> dict[str, Any]:
    """What a reward stage has measured of its model on held-out pairs; without "accuracy" where there were none."""
    return {**reward.told("metrics"), **reward.told("card")}


def is_of_the_hub(told: Mapping[str, Any]) -> bool:
    """Whether a parent, as a manifest tells it, is a model of the hub."""
    return bool(told) and told["stage"] == FOREIGN and is_hub_id(told["path"])


def data_name(stage: Stage, key: str) -> str:
    """A stage's data as a card names it: a dataset of the hub, or a file's own name, never its place."""
    path = stage.setting(key) or stage.setting("data.train") or stage.setting("data.prompts")  # a part held out of it
    name, split = split_name(path) if isinstance(path, str) else ("", None)
    plain = name if hub_dataset(name) else PurePosixPath(name).name
    return plain + (f"[{split}]" if split else "")


def _lineage(stage: Stage) -> Iterator[Stage]:
    """A stage, and those that it came from as far as they are still what they were then."""
    seen: set[str] = set()
    waiting = [stage]
    while waiting:
        stage = waiting.pop(0)
        if sha256_of(stage) in seen:
            continue
        seen.add(sha256_of(stage))
        yield stage
        for told in stage.told("parents").values():
            above = read_stage(told["stage"], stage.folder / told["path"]) if told["stage"] != FOREIGN else None
            if above and sha256_of(above) == told["sha256"] and above.state == "finished":
                waiting.append(above)


def _at(run: Run, chosen: ResolvedModel) -> Run:
    """With what the evaluation found of the policy at the chosen step; without one where it was not in it."""
    if chosen.last:
        return run
    try:
        return at_step(run, str(chosen.step))
    except RLHFError:
        return replace(run, report=None)
