"""Keys that a config does not have: a misspelling, a key of another place, or an older name."""

from typing import Any

from rlhf_cli.config.base import Config
from rlhf_cli.config.keys import field_at, field_shape, keys_of, shape
from rlhf_cli.config.stages import CONFIGS
from rlhf_cli.config.trl import TRAINERS, fields_of
from rlhf_cli.errors import Problem, nearest

# Names of TRL 0.11's and 1.12's PPO, of OpenRLHF and verl: our key, and our word for a value of theirs.
RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "kl_penalty": ("kl_estimator", {"kl": "k1", "abs": "abs", "mse": "k2", "full": "full"}),
    "init_kl_coef": ("kl_coef", {}),
    "ppo_epochs": ("num_ppo_epochs", {}),
    "steps": ("total_episodes", {}),
    "sft_model_path": ("models.sft", {}),
    "model_name": ("models.sft", {}),
    "reward_model_path": ("models.reward", {}),
    "reward_model": ("models.reward", {}),
    "mini_batch_size": ("num_mini_batches", {}),
    "local_mini_batch_size": ("num_mini_batches", {}),
    "batch_size": ("per_device_train_batch_size", {}),
    "local_batch_size": ("per_device_train_batch_size", {}),
    "micro_batch_size": ("per_device_train_batch_size", {}),
    "backward_batch_size": ("per_device_train_batch_size", {}),
    "forward_batch_size": ("local_rollout_forward_batch_size", {}),
    "vf_loss_coef": ("vf_coef", {}),
    "vf_loss": ("vf_coef", {}),
    "clip_range": ("cliprange", {}),
    "clip_range_value": ("cliprange_value", {}),
    "max_new_tokens": ("response_length", {}),
    "query_dataset": ("data.prompts", {}),
    "max_seq_length": ("max_length", {}),
    "lr": ("learning_rate", {}),
    "epochs": ("num_train_epochs", {}),
    "num_epochs": ("num_train_epochs", {}),
    "grad_clip": ("max_grad_norm", {}),
    "max_norm": ("max_grad_norm", {}),
    "exp_name": ("output.run_name", {}),
    "task_name": ("output.run_name", {}),
    "experiment_name": ("output.run_name", {}),
    "wandb_run_name": ("output.run_name", {}),
    "log_with": ("output.report_to", {"wandb": "[wandb]", "tensorboard": "[tensorboard]"}),
    "tracker_project_name": ("output.project", {}),
    "project_name": ("output.project", {}),
    "wandb_project": ("output.project", {}),
    "penalty_reward_value": ("missing_eos_penalty", {}),
    "non_eos_penalty": ("missing_eos_penalty", {}),
    "lambd": ("lam", {}),
    "eps_clip": ("cliprange", {}),
    "clip_ratio": ("cliprange", {}),
    "clip_ratio_high": ("cliprange_high", {}),
    "clip_ratio_c": ("dual_clip", {}),
    "value_clip": ("cliprange_value", {}),
    "kl_target": ("target", {}),
    "kl_horizon": ("horizon", {}),
    "entropy_loss_coef": ("entropy_coef", {}),
    "entropy_coeff": ("entropy_coef", {}),
    "actor_learning_rate": ("learning_rate", {}),
    "critic_learning_rate": ("value_learning_rate", {}),
    "freezing_actor_steps": ("value_only_updates", {}),
    "critic_warmup": ("value_only_updates", {}),
    "n_samples_per_prompt": ("num_samples_per_prompt", {}),
    "generate_max_len": ("response_length", {}),
    "reward_clip_range": ("score_clip", {}),
    "overlong_buffer_len": ("overlong_penalty", {}),
    "lora_r": ("r", {}),
    "rank": ("r", {}),
    "alpha": ("lora_alpha", {}),
    "dropout": ("lora_dropout", {}),
    "lora_target_modules": ("target_modules", {}),
}
_FULL_SOFTMAX = "log-probs are those of the full softmax, and responses must be drawn from the same: take the line out"
# Options of theirs that there is nothing like, and why.
REFUSED = {
    "top_k": _FULL_SOFTMAX,
    "top_p": _FULL_SOFTMAX,
    "min_p": _FULL_SOFTMAX,
    "repetition_penalty": _FULL_SOFTMAX,
    "is_encoder_decoder": "encoder-decoder models cannot be trained; take the line out",
    "is_peft_model": "whole models are trained; take the line out",
    "model_adapter_name": "whole models are trained, and the reference is a copy of its own; take the line out",
    "ref_adapter_name": "whole models are trained, and the reference is a copy of its own; take the line out",
    "tracker_kwargs": "trackers read the environment, WANDB_ENTITY or TRACKIO_SPACE_ID say; take the line out",
    "dataset_num_proc": "rows are read once and their tokens kept; take the line out",
    "optimize_device_cache": "memory is given back as soon as it is free; take the line out",
    "optimize_cuda_cache": "memory is given back as soon as it is free; take the line out",
    "world_size": "it is what the run finds; take the line out",
}
# The numbers of these mean something else under the new name.
COUNTED_OTHERWISE = {
    "mini_batch_size": "it counts minibatches: batch size / mini_batch_size",
    "local_mini_batch_size": "it counts minibatches: batch size / mini_batch_size",
    "batch_size": "times gradient_accumulation_steps it is the episodes of an update",
    "local_batch_size": "times gradient_accumulation_steps it is the episodes of an update",
    "clip_ratio_high": "the range above 1, as there",
    "reward_clip_range": "one number, the limit on both sides",
    "overlong_buffer_len": "{tokens: n, factor: f}",
}


def unknown_key(path: tuple[str, ...], value: Any, model: type[Config], place: str) -> Problem:
    """C01 with the key that was meant, or C02 with the place where the key belongs."""
    key, name, section = ".".join(path), path[-1], path[:-1]
    siblings = _keys_under(model, section)
    renamed = _renamed(name, value, siblings, model) if section else None
    if renamed:
        return Problem("C01", f"unknown key {key}", place, renamed)
    if section == ("ppo",) and name in REFUSED:
        return Problem("C01", f"unknown key {key}", place, REFUSED[name])
    home = _home(name, path, model)
    if home:
        return Problem("C02", f"{key} belongs {home[0]}", place, home[1])
    near = nearest(name, siblings)
    if near:
        hint = f"did you mean {near}?"
    elif len(siblings) <= 8:
        hint = f"keys here: {', '.join(siblings)}"
    else:
        hint = f"`rlhf explain {'.'.join(section) or '--all'}` lists the keys"
    return Problem("C01", f"unknown key {key}", place, hint)


def _keys_under(model: type[Config], section: tuple[str, ...]) -> list[str]:
    if not section:
        return list(model.model_fields)
    field = field_at(model, section)
    if field is None:  # an entry such as rewards.style
        table = field_at(model, section[:-1])
        entry = shape(field_shape(table).entries).model if table else None
    else:
        entry = field_shape(field).model
    return list(entry.model_fields) if entry else []


def _renamed(name: str, value: Any, siblings: list[str], model: type[Config]) -> str | None:
    new, values = RENAMED.get(name, ("", {}))
    known = new in siblings or ("." in new and new in keys_of(model))
    if not known:
        return None
    if name in COUNTED_OTHERWISE:
        return f"use {new}; {COUNTED_OTHERWISE[name]}"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"write {new}: {values.get(str(value), value)}"
    return f"use {new}"


def _home(name: str, path: tuple[str, ...], model: type[Config]) -> tuple[str, str | None] | None:
    """(where a key of this name belongs, how to write it): in this config, under trainer:, or in another file."""
    stage = model.model_fields["stage"].default
    here = _places(name, model)
    if here:
        section = here[0].rpartition(".")[0]
        return f"under {section}:" if section else "at the top of the file", f"write it as {here[0]}"
    if stage in TRAINERS and name in fields_of(stage) and path[0] != "trainer":
        return "under trainer:", f"write it as trainer.{name}"
    there: dict[str, list[str]] = {}
    for other, config in CONFIGS.items():
        for key in _places(name, config)[:1]:
            there.setdefault(key.rpartition(".")[0], []).append(f"{other}.yaml")
    if not there:
        return None
    # A section of another file, such as ppo:, rather than a key of that name.
    section = min(there, key=len)
    return f"in {' or '.join(there[section])}" + (f", under {section}:" if section else ""), None


def _places(name: str, model: type[Config]) -> list[str]:
    return [key for key in keys_of(model) if key.rpartition(".")[2] == name and key.count(".") <= 1]
