"""The model that a further round starts from: `models.policy` of PPO, `model.start` of the reward model.

PPO's reference, and the SFT model whose answers normalize a reward model, stay models.sft and model.path. Whole weights
may start from whole weights or from adapters, which are merged; adapters only from adapters of the same weights.
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

KEYS = {"ppo": ("models.policy", "models.sft"), "reward": ("model.start", "model.path")}  # of the model, of SFT's


def find_initial(config: PPOConfig | RewardConfig, parents: Mapping[str, Parent]) -> Parent | None:
    """Return the model that the training starts from, None if that is the SFT model."""
    initial, sft = (parents.get(key) for key in KEYS[config.stage])
    is_sft = initial is not None and sft is not None and initial.model == sft.model
    return None if is_sft else initial


def check_initial(config: PPOConfig | RewardConfig, options: Options, parents: Mapping[str, Parent]) -> None:
    """Raise RLHFError C17 if the training cannot start from the model, T04 or T05 if it tokenizes differently."""
    initial = find_initial(config, parents)
    sft = parents.get(KEYS[config.stage][1])
    if initial is None or sft is None:
        return

    section = config.models if isinstance(config, PPOConfig) else config.model
    with at_location(config.where(initial.key)):
        if section.adapters is not None:
            _check_adapters(initial, sft, section.adapters, options)
        elif isinstance(config, PPOConfig):
            _check_architecture(initial, sft, options)
    if isinstance(config, RewardConfig):  # PPO compares the tokenizers of all its models
        tokenizers.check_same_tokenization(
            {sft.key: sft, initial.key: initial},
            config.where,
            first=sft.key,
            trust_remote_code=options.trust_remote_code,
            template_variables=config.data.chat_template_kwargs,
        )


def _check_architecture(policy: Parent, sft: Parent, options: Options) -> None:
    difference = interpolation.compare_configs(policy, sft, options.trust_remote_code)
    if difference:
        text = f"{policy.key} has other weights than {sft.key}: {difference}"
        raise RLHFError("C17", text, hint=f"name a policy that was trained from {shown(sft.path)}")


def _check_adapters(initial: Parent, sft: Parent, adapters: LoRA, options: Options) -> None:
    """Raise RLHFError C17 unless the model is an adapter of the SFT model with these settings."""
    section, _, _ = sft.key.partition(".")
    key = f"{section}.adapters"
    model = f"{initial.key} {shown(initial.path)}"
    if initial.base is None:
        text = f"{model} holds whole weights, and {key} trains adapters of {sft.key}"
        raise RLHFError("C17", text, hint=f"remove {key}, or {initial.key}")

    if not runs.is_adapter_of(initial, sft):
        base = shown(initial.base.path)
        text = f"{model} is an adapter of {base}, not of {sft.key}"
        raise RLHFError("C17", text, hint=f"set {sft.key}: {base}; or remove {key}")

    model_config = load.read_config(sft.model, options.trust_remote_code)
    differences = lora.compare_settings(initial.model, adapters, model_config, key)
    for name, (stored, wanted) in differences.items():
        text = f"{key}.{name} is {wanted}, and {model} has adapters with {stored}"
        raise RLHFError("C17", text, hint=f"set {key}.{name}: {stored}; or remove {initial.key}")
