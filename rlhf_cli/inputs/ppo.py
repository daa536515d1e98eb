"""What `rlhf ppo` starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_cli import config as configs
from rlhf_cli import data, terminal
from rlhf_cli.checkpoints import Parent
from rlhf_cli.config import Options, PPOConfig
from rlhf_cli.errors import RLHFError, all_of
from rlhf_cli.inputs import batches, limits
from rlhf_cli.models import hub
from rlhf_cli.models.load import context_length, max_prompt_tokens
from rlhf_cli.ppo import rewards


def made_with(folder: Path) -> PPOConfig:
    """The config that a PPO run's folder was made with. Raises RLHFError as `config.load` does.

    Reward functions lie beside the config that the run was started with, which is the run's folder unless `run:` says
    otherwise: there they are looked for.
    """
    config = configs.load("ppo", folder / "config.yaml")
    config._origin = replace(config._origin, file=folder.resolve().parent / "ppo.yaml")
    return config


def stop_token(config: PPOConfig, tokenizer: Any, vocab_size: int) -> int | None:
    """The id that ends a response; None where nothing does. Raises RLHFError C06 for an id beyond the vocabulary."""
    settings = config.ppo
    if settings.stop_token_id is None:
        return data.stop_token_id(tokenizer) if settings.stop_token != "none" else None
    if settings.stop_token_id >= vocab_size:
        text = f"ppo.stop_token_id {settings.stop_token_id} is no token of the model"
        raise RLHFError("C06", text, where=config.where("ppo.stop_token_id"), hint="see the tokenizer's eos_token_id")
    return settings.stop_token_id


def read(
    config: PPOConfig, key: str, tokenizer: Any, body: Any, *, sample: int | None = None
) -> data.Rows[data.Prompt]:
    """Prompts of data.prompts or data.eval_prompts that leave room for a response in the context of a model `body`.

    Of more than `sample` a sample. Warns D16. Raises RLHFError C13 where none could, D01-D14, D16. `body` None: the
    context is not known.
    """
    room, length = None, config.ppo.max_response_length
    if body is not None:
        room = max_prompt_tokens(body, length, config.where("ppo.response_length"))
    source, on_long = config.sources()[f"data.{key}"], config.data.on_long
    read = partial(data.prompt_rows, source, tokenizer, max_length=room, on_long=on_long, sample=sample)
    return limits.read_usable(config, f"data.{key}", limits.longer_prompts("ppo", room, length), read)


def read_ptx(config: PPOConfig, tokenizer: Any, body: Any) -> data.Rows[dict[str, list[int]]]:
    """Rows of data.ptx_data, which must be given, as `data.sft_rows` has them.

    Warns D16. Raises RLHFError D01-D10, D12, D14, D16.
    """
    key, room = "data.ptx_data", None if body is None else context_length(body)
    longer = f"take a model with a longer context than {room} positions, or shorten the rows"
    read = partial(data.sft_rows, config.sources()[key], tokenizer, max_length=room, on_long=config.data.on_long)
    return limits.read_usable(config, key, longer, read)


def check_layers(config: PPOConfig, body: Any) -> None:
    """Raises RLHFError C06 where ppo.num_shared_layers leaves no layer of a model `body` to train."""
    count, layers = config.ppo.num_shared_layers or 0, body.get_text_config().num_hidden_layers
    if count >= layers:
        text = f"ppo.num_shared_layers {count} of {layers} layers leaves none to train"
        hint = f"set it to {layers - 1} at most" if layers > 1 else "leave it out"
        raise RLHFError("C06", text, where=config.where("ppo.num_shared_layers"), hint=hint)


def require_hub(config: PPOConfig, sft: Parent | None) -> None:
    """Raises RLHFError C17 where ppo.push_to_hub_if_best could not push, or would push what nobody there could read."""
    if not (repo := config.ppo.push_to_hub_if_best):
        return
    where = config.where("ppo.push_to_hub_if_best")
    if config.models.adapters and sft and not sft.hub:
        text = f"adapters alone would be pushed to {repo}, and their base, models.sft, is a folder here"
        raise RLHFError("C17", text, where=where, hint="take ppo.push_to_hub_if_best out, or models.adapters")
    hub.require_token(repo, where)


def check_rows(config: PPOConfig, prompts: data.Rows[Any], held_out: data.Rows[Any] | None) -> None:
    """Warns D13, C14. Raises RLHFError D11, and C17 where the prompts make no more updates than value_only_updates."""
    if held_out is not None:
        data.warn_shared(prompts, held_out, where=config.where("data.eval_prompts"))
    updates = config.ppo.num_updates(len(prompts))
    all_of(lambda: limits.check_prompts(config, prompts), lambda: _check_turn(config, updates))
    limits.warn_intervals(config, updates)


def _check_turn(config: PPOConfig, updates: int) -> None:
    if told := config.ppo.no_turn(updates):
        text, hint = told
        raise RLHFError("C17", text, where=config.where("ppo.value_only_updates"), hint=hint)


def text_rewards(
    config: PPOConfig, options: Options, parents: Mapping[str, Parent], *, load: bool = True
) -> dict[str, rewards.TextReward]:
    """The sources of reward that read text, by name; without `load` no weights are read, only looked at.

    One whose model is not among the parents is left out. Raises RLHFError with what is wrong with any of them: C01,
    C05-C07, C17, and M01, M03, M07, M08 of a model.
    """
    found: dict[str, rewards.TextReward] = {}

    def make(name: str) -> None:
        source, key = config.rewards[name], f"rewards.{name}"
        model = parents.get(f"{key}.pipeline")
        if not source.pipeline or model:
            place = rewards.Place(
                config.file.parent,
                lambda inner: config.where(f"{key}.{inner}"),
                model.model if model else None,
                options.trust_remote_code,
                load,
            )
            found[name] = rewards.make(source.kind, source, place)

    models = ("model", "models")
    all_of(*(partial(make, name) for name, source in config.rewards.items() if source.kind not in models))
    return found


def warn_pad(body: Any, stop_token_id: int | None, where: str) -> None:
    """T01 of a foreign reward model: its pad token also ends a text."""
    if stop_token_id is not None and body.pad_token_id == stop_token_id:
        text = "the reward model's pad token ends a text: it is read at the token before, as it was trained"
        terminal.warn("T01", text, where=where)


def of_group(config: PPOConfig, processes: int) -> PPOConfig:
    """The config with the batches of so many processes. Raises RLHFError C06 where they do not go with other keys."""
    if processes == 1:
        return config
    try:
        return config.model_copy(update={"ppo": config.ppo.across(processes)})
    except ValidationError as error:
        text = f"in {processes} processes: {error.errors()[0]['msg']}"
        raise RLHFError("C06", text, where=config.where("ppo"), hint="smaller batches, or fewer processes") from error


def arithmetic(config: PPOConfig, prompts: Sequence[data.Prompt], processes: int = 1) -> str:
    """What the batch sizes come to, in one line; the config is that of all processes."""
    ours, updates = config.ppo, config.ppo.num_updates(len(prompts))
    rows, episodes = ours.per_device_train_batch_size, ours.episodes_per_update
    update = batches.product(rows, ours.gradient_accumulation_steps // processes, processes, "episodes")
    epochs, minibatches = ours.num_ppo_epochs, ours.num_mini_batches
    return (
        f"{batches.counted(prompts, 'prompts')}; an update: {update}, {ours.num_samples_per_prompt} to a prompt; "
        f"{epochs} epochs x {minibatches} minibatches = {epochs * minibatches} optimizer steps; "
        f"in all {updates} updates, {updates * episodes} episodes"
    )
