"""Files of systems that are not TRL: their signatures, and which keys of ppo.yaml stand for their options."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_cli.errors import RLHFError

# What to set by hand
POLICY, REWARD, PROMPTS = "models.sft", "models.reward or rewards", "data.prompts"
RATE, KL, RESPONSE = "ppo.learning_rate", "ppo.kl_coef", "ppo.response_length"
BATCH = "ppo.per_device_train_batch_size x ppo.gradient_accumulation_steps, the episodes of an update"
LENGTH = "ppo.total_episodes or ppo.num_train_epochs"
TO_SET = (POLICY, REWARD, PROMPTS, RATE, KL, RESPONSE, BATCH, LENGTH)
OPTION = re.compile(r"(?<!\S)(?:--(?P<option>[A-Za-z][\w.-]*)|\+{0,2}(?P<hydra>[a-z_]+(\.\w+)+)=)")
STAGE = r"(pt|sft|rm|ppo|dpo|kto)\b"  # of LLaMA-Factory; rlhf's own ppo.yaml has `ppo:`, too


@dataclass(frozen=True)
class System:
    """A system by what only its files have."""

    name: str
    options: str  # a pattern of whole names of options; that of an option in a section is dotted
    keys: Mapping[str, str]  # of TO_SET -> names of the option that it stands for, the newest first
    text: str = r"(?!)"  # a pattern in the file


SYSTEMS = (  # the first that matches: verl has options critic.NAME, as OpenRLHF
    System(
        "DeepSpeed-Chat",
        text=r"\bdeepspeed_chat\b|\bdschat\.",
        options=r"(actor|critic)_model_name_or_path|num_padding_at_beginning",
        keys={
            POLICY: "actor_model_name_or_path",
            REWARD: "critic_model_name_or_path",
            PROMPTS: "data_path",
            RATE: "actor_learning_rate",
            BATCH: "per_device_generation_batch_size per_device_train_batch_size",
            RESPONSE: "max_answer_seq_len",
        },
    ),
    System(
        "verl",
        text=r"\bverl\.trainer\.",
        options=r"actor_rollout_ref\..+|algorithm\.(adv_estimator|kl_ctrl\..+|use_kl_in_reward)",
        keys={
            POLICY: "actor_rollout_ref.model.path",
            REWARD: "reward_model.model.path reward_model.path custom_reward_function.path",
            PROMPTS: "data.train_files",
            RATE: "actor_rollout_ref.actor.optim.lr",
            KL: "algorithm.kl_ctrl.kl_coef actor_rollout_ref.actor.kl_loss_coef",
            BATCH: "data.train_batch_size",
            RESPONSE: "data.max_response_length",
            LENGTH: "trainer.total_epochs",
        },
    ),
    System(
        "OpenRLHF",
        text=r"\bopenrlhf\.cli\.",
        options=r"(actor|critic|rollout|algo|ckpt|vllm|ds)\..+|(actor|critic)_(learning_rate|num_.+)|reward_pretrain"
        r"|remote_rm_url|prompt_data|micro_rollout_batch_size",
        keys={
            POLICY: "actor.model_name_or_path pretrain",
            REWARD: "reward.model_name_or_path reward_pretrain reward.remote_url remote_rm_url",
            PROMPTS: "data.prompt_dataset prompt_data",
            RATE: "actor.adam.lr actor_learning_rate",
            KL: "algo.kl.init_coef init_kl_coef",
            BATCH: "rollout.batch_size rollout_batch_size",
            RESPONSE: "rollout.max_new_tokens generate_max_len",
            LENGTH: "data.max_samples max_samples",
        },
    ),
    System(
        "trlx",
        text=r"(?m)^\s*(import|from) trlx\b",
        options=r"method\.(name|init_kl_coef|num_rollouts|chunk_size)",
        keys={
            POLICY: "model.model_path",
            RATE: "optimizer.kwargs.lr",
            KL: "method.init_kl_coef",
            BATCH: "method.num_rollouts train.batch_size",
            RESPONSE: "method.gen_kwargs.max_new_tokens",
            LENGTH: "train.total_steps",
        },
    ),
    System(
        "LLaMA-Factory",
        text=rf"(?:^|\s)llamafactory-cli\s|--stage[ =]{STAGE}|(?m:^stage: *{STAGE})",
        options=r"finetuning_type",
        keys={
            POLICY: "model_name_or_path",
            REWARD: "reward_model",
            PROMPTS: "dataset",
            RATE: "learning_rate",
            BATCH: "per_device_train_batch_size",
            RESPONSE: "max_new_tokens",
            LENGTH: "num_train_epochs",
        },
    ),
    System(
        "alignment-handbook (or open-r1)",
        options=r"dataset_mix(ture|er)(\..+)?",
        keys={
            POLICY: "model_name_or_path",
            RATE: "learning_rate",
            BATCH: "per_device_train_batch_size",
            LENGTH: "num_train_epochs",
        },
    ),
)


def refuse(where: str, text: str, options: Iterable[str]) -> None:
    """Raise RLHFError C09 if a file is of a system other than TRL, with the keys to set by hand."""
    names = {name.replace("-", "_") for name in options}
    if "ppo" in names:  # of rlhf itself
        text = re.sub(r"(?m)^stage:.*$", "", text)
    for system in SYSTEMS:
        found = [name for name in sorted(names) if re.fullmatch(system.options, name)]
        if match := re.search(system.text, text):
            found.append(match[0].strip())
        if found:
            keys = [_with_option(key, system.keys.get(key, ""), names) for key in TO_SET]
            hint = f"start from a ppo.yaml of `rlhf init`, and set by hand: {'; '.join(keys)}"
            problem = f"it is a file of {system.name}, not of TRL: only that has {', '.join(found[:3])}"
            raise RLHFError("C09", problem, where=where, hint=hint)


def command_options(text: str) -> list[str]:
    """Return the names of all options in the text of a command line, those of Hydra (name.name=value) among them."""
    return [match["option"] or match["hydra"] for match in OPTION.finditer(text)]


def tree_options(tree: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the names of all keys of a YAML file, dotted below sections."""
    names: list[str] = []
    for key, value in tree.items():
        names.append(f"{above}{key}")
        if isinstance(value, Mapping):
            names += tree_options(value, f"{above}{key}.")
    return names


def _with_option(key: str, options: str, names: Collection[str]) -> str:
    """Return a key, with the option that the file has for it."""
    own = next((option for option in options.split() if option in names), None)
    return f"{key} ({own} there)" if own else key
