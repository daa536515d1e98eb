"""The model that a further round goes on from: `models.policy` of PPO, `model.start` of the reward model.

PPO's reference, and the SFT model whose answers normalize a reward model, stay models.sft and model.path. Whole weights
may go on from whole weights or from adapters, which are merged; adapters only from adapters of the same weights.
"""

from collections.abc import Mapping

from rlhf_cli import runs
from rlhf_cli.config.base import Options
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.reward import RewardConfig
from rlhf_cli.config.sections import LoRA
from rlhf_cli.errors import RLHFError, at_location, shown
from rlhf_cli.models import interpolation, load, lora, tokenizers
from rlhf_cli.runs.parents import Parent


def initial_key(config: PPOConfig | RewardConfig) -> str:
    """Return the config key of the model that training goes on from."""
    return "models.policy" if isinstance(config, PPOConfig) else "model.start"


def base_key(config: PPOConfig | RewardConfig) -> str:
    """Return the config key of the SFT model."""
    return "models.sft" if isinstance(config, PPOConfig) else "model.path"


def adapters_of(config: PPOConfig | RewardConfig) -> LoRA | None:
    """Return the settings of the adapters that are trained, None if whole weights are."""
    return config.models.adapters if isinstance(config, PPOConfig) else config.model.adapters


def find_initial(config: PPOConfig | RewardConfig, parents: Mapping[str, Parent]) -> Parent | None:
    """Return the model that training goes on from, None if that is the SFT model."""
    initial = parents.get(initial_key(config))
    base = parents.get(base_key(config))
    is_base = initial is not None and base is not None and initial.model == base.model
    return None if is_base else initial


def check_initial(config: PPOConfig | RewardConfig, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError C17 if training cannot go on from the model, T04 or T05 if it tokenizes differently."""
    initial = find_initial(config, parents)
    base = parents.get(base_key(config))
    if initial is None or base is None:
        return

    with at_location(config.where(initial.key)):
        adapters = adapters_of(config)
        if adapters is not None:
            _check_adapters(initial, base, adapters, options)
        elif isinstance(config, PPOConfig):
            _check_architecture(initial, base, options)
    if isinstance(config, RewardConfig):
        compared = {base.key: base, initial.key: initial}
        tokenizers.check_same_tokenization(
            compared,
            config.where,
            first=base.key,
            trust_remote_code=options.trust_remote_code,
            template_variables=config.data.chat_template_kwargs,
        )


def _check_architecture(policy: Parent, sft: Parent, options: Options) -> None:
    difference = interpolation.compare_configs(policy, sft, options.trust_remote_code)
    if difference:
        text = f"{policy.key} has other weights than {sft.key}: {difference}"
        raise RLHFError("C17", text, hint=f"name a policy that was trained from {shown(sft.path)}")


def _check_adapters(initial: Parent, base: Parent, adapters: LoRA, options: Options) -> None:
    """Raise RLHFError C17 unless the model is an adapter of the base with these settings."""
    section = base.key.partition(".")[0]
    key = f"{section}.adapters"
    if initial.base is None:
        text = f"{initial.key} {shown(initial.path)} holds whole weights, and {key} trains adapters of {base.key}"
        raise RLHFError("C17", text, hint=f"remove {key}, or {initial.key}")
    if not runs.is_adapter_of(initial, base):
        text = f"{initial.key} {shown(initial.path)} is an adapter of {shown(initial.base.path)}, not of {base.key}"
        raise RLHFError("C17", text, hint=f"set {base.key}: {shown(initial.base.path)}; or remove {key}")

    model_config = load.read_config(base.model, options.trust_remote_code)
    for name, (stored, wanted) in lora.compare_settings(initial.model, adapters, model_config, key).items():
        text = f"{key}.{name} is {wanted}, and {initial.key} {shown(initial.path)} has adapters with {stored}"
        raise RLHFError("C17", text, hint=f"set {key}.{name}: {stored}; or remove {initial.key}")
