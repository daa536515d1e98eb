"""What `rlhf eval` starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli import checkpoints, data, terminal
from rlhf_cli import config as configs
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import EvalConfig
from rlhf_cli.config.paths import FUNCTION
from rlhf_cli.errors import RLHFError, shown
from rlhf_cli.inputs import limits
from rlhf_cli.models import loading
from rlhf_cli.ppo.rewards import TextReward, load_function
from rlhf_cli.ppo.settings import PPOSettings


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn: as in PPO's training, unless eval.yaml says otherwise."""

    temperature: float
    response_length: int
    stop_token_id: int | None


def trained_by(ppo: Parent) -> PPOSettings | None:
    """The settings that made the policy; None for a foreign one."""
    return configs.load("ppo", ppo.path / "config.yaml").ppo if ppo.stage == "ppo" else None


def sampling(config: EvalConfig, settings: PPOSettings | None, path: Path, stop: int | None) -> Sampling:
    """eval.yaml's own settings, else those that PPO trained the policy at `path` with (C17 where neither says)."""
    temperature, length = config.eval.temperature, config.eval.response_length
    if settings:
        temperature, length = temperature or settings.temperature, length or settings.max_response_length
        if settings.stop_token == "none":
            return Sampling(temperature, length, None)
        stop = stop if settings.stop_token_id is None else settings.stop_token_id
    if temperature is None or length is None:
        raise RLHFError(
            "C17",
            f"{shown(path)} does not tell how its policy was sampled",
            where=config.where("models.ppo"),
            hint="set eval.temperature and eval.response_length",
        )
    return Sampling(temperature, length, stop)


@dataclass(frozen=True)
class Trail:
    """The way that PPO went: the step of the finished policy, and the snapshots of other steps."""

    step: int | None = None
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    missing: str | None = None  # why nothing is known of the way, though it is asked for


def trail(config: EvalConfig, ppo: Parent) -> Trail:
    """The way to the policy that PPO left, where `eval.frontier` asks for it. Warns (M05) of damaged snapshots."""
    if not config.eval.frontier:
        return Trail()
    if ppo.stage != "ppo":
        return Trail(missing=f"{shown(ppo.path)} is no folder that our PPO wrote")
    folder = ppo.path / checkpoints.SNAPSHOTS
    whole = checkpoints.whole_states(folder, instead="the frontier leaves it out")
    if not whole:
        return Trail(missing=f"{shown(folder)} holds no policy on the way")
    step = ppo.manifest["step"]
    return Trail(step, {other: path for other, path in whole.items() if other != step})


def warn_of_selection(config: EvalConfig) -> None:
    """Warns (C18) where a policy is to be picked by what it was trained to please."""
    if config.eval.selection and config.eval.selection.judge == "reward":
        text = "eval.select: the reward is what PPO was trained on, and rises on while the quality falls"
        hint = "select by a judge that PPO never saw (Gao et al. 2023, arXiv 2210.10760); docs/evaluation.md tells why"
        terminal.warn("C18", text, where=config.where("eval.select"), hint=hint)


def read(
    config: EvalConfig, tokenizer: Any, body: Any, response_length: int, *, sample: int | None = None
) -> data.Rows[data.Prompt]:
    """The prompts that leave room for a response in the context of a model `body`; None: it is not known.

    Of more than `sample` a sample. Warns D16. Raises RLHFError C13 where none could, D01-D14, D16.
    """
    room = None
    if body is not None:
        room = loading.prompt_room(body, response_length, config.where("eval.response_length"))
    read = partial(data.prompt_rows, config.sources()["data.prompts"], tokenizer, max_length=room, sample=sample)
    return limits.read_usable(config, "data.prompts", limits.longer_prompts("eval", room, response_length), read)


def functions(config: EvalConfig) -> dict[str, TextReward]:
    """The Python functions among the judges, by name. Raises RLHFError C17."""
    return {
        name: load_function(spec, folder=config.file.parent, where=config.where(f"judges.{name}"))
        for name, spec in config.judges.items()
        if FUNCTION.fullmatch(spec)
    }
