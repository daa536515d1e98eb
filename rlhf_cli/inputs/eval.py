"""What `rlhf eval` starts from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli import config as configs
from rlhf_cli import data
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


def read(config: EvalConfig, tokenizer: Any, body: Any, response_length: int) -> data.Rows[data.Prompt]:
    """The prompts that leave room for a response in the context of a model `body`; None: it is not known."""
    room = None
    if body is not None:
        room = loading.prompt_room(body, response_length, config.where("eval.response_length"))
    with limits.room_explained(room, response_length):
        return data.prompt_rows(config.sources()["data.prompts"], tokenizer, max_length=room)


def functions(config: EvalConfig) -> dict[str, TextReward]:
    """The Python functions among the judges, by name. Raises RLHFError C17."""
    return {
        name: load_function(spec, folder=config.file.parent, where=config.where(f"judges.{name}"))
        for name, spec in config.judges.items()
        if FUNCTION.fullmatch(spec)
    }
