"""Conversion rules for related options and other units, one function per topic; and the defaults of TRL."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from rlhf_cli.commands.convert import options
from rlhf_cli.commands.convert.options import (
    MappedOption,
    OptionMapping,
    UnsupportedOption,
    accepts_none,
    coerce,
    is_no_op,
    target_key,
    translate_value,
)
from rlhf_cli.commands.convert.versions import FIXED_BEHAVIOR, NEW, OLD, OPTIONS, UNCLIPPED
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import BELONGS_TO
from rlhf_cli.errors import Problem, RLHFError

ADAPTER_OPTIONS = {name for name in ALIASES if name.startswith("lora_")} | {"lora_alpha", "use_rslora", "use_dora"}
PEFT_DEFAULTS = {"lora_r": ("models.adapters.r", 8), "lora_alpha": ("models.adapters.lora_alpha", 8)}
ROWS, PARTS, MINIBATCHES = "per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"
# Batch options, in the order of their keys in BATCH_KEYS.
BATCH_KEYS = (ROWS, PARTS, MINIBATCHES, ROWS)
BATCH_OPTIONS = {
    OLD: ("mini_batch_size", "batch_size", PARTS, "forward_batch_size"),
    NEW: (ROWS, PARTS, MINIBATCHES),
}
LARGEST = 10**9
SPLIT = re.compile(r"[\w.-]+")
LABELS = {"lvwerra/distilbert-imdb": "POSITIVE"}  # the label whose logit TRL's examples use
OWN_REWARD = 'TRL 0.11 got scores from your code; set e.g. rewards: {mine: {function: "module:function"}}'
COLUMN = "{prompt: NAME} if the column of the prompts has another name"


def batches(mapping: OptionMapping) -> None:
    """Convert the batch sizes to the three batch keys."""
    for name in BATCH_OPTIONS[mapping.version]:
        setting = mapping.pop(name)
        if setting and (type(setting.value) is not int or not 1 <= setting.value <= LARGEST):
            mapping.reject(setting, "not a whole number from 1 up")
            del mapping.options[name]
    names = BATCH_OPTIONS[mapping.version][:3]
    if mapping.version == OLD and mapping.has("forward_batch_size"):
        names = ("forward_batch_size", *names[1:])
        if unused := mapping.options.get("mini_batch_size"):
            mapping.reject(unused, "forward_batch_size replaced it")
    first, second, third = (mapping.value(name) for name in names)
    if mapping.version == OLD:
        sizes, note = options.convert_old_sizes(second, first, third)
    else:
        sizes, note = options.convert_new_sizes(first, second, third, grown="PPOv2Config" in mapping.parsed.signs)
    values = (sizes.rows, sizes.parts, sizes.minibatches)
    for last, value, name in zip(BATCH_KEYS[:3], values, names, strict=True):
        key, remark = f"ppo.{last}", note if last == MINIBATCHES else ""
        where = mapping.options[name].where if mapping.has(name) else ""
        mapping.mapped[key] = MappedOption(key, value, name, mapping.value(name), remark, mapping.has(*names), where)


def length(mapping: OptionMapping) -> None:
    """Convert the training length, in episodes or epochs."""
    epochs, note = mapping.pop("num_train_epochs"), "counted in episodes, rounded up to whole updates"
    episodes = [setting for name in ("total_episodes", "steps") if (setting := mapping.pop(name))]
    for setting in episodes:
        mapping.map("ppo.total_episodes", setting.value, setting, note if setting.name == "steps" else "")
    if epochs and "ppo.total_episodes" in mapping.mapped:
        mapping.reject(epochs, "overridden by total_episodes, as in TRL")
    elif epochs:
        mapping.map("ppo.num_train_epochs", epochs.value, epochs)


def responses(mapping: OptionMapping) -> None:
    """Convert the stop token and the response length."""
    for name in ("stop_token_id", "eos_token_id"):
        setting = mapping.pop(name)
        if setting and isinstance(setting.value, int) and setting.value < 0:
            mapping.map("ppo.stop_token", "none", setting, "no token has this id: a response never ends early")
        elif setting:
            note = "if the model never generates this token: stop_token: none"
            mapping.map("ppo.stop_token_id", setting.value, setting, note if name == "eos_token_id" else "")
    stop, by_id = mapping.pop("stop_token"), "ppo.stop_token_id" in mapping.mapped
    if stop and by_id:
        mapping.reject(stop, "already set by stop_token_id")
    elif stop:
        mapping.map("ppo.stop_token", stop.value, stop)
    sampled = mapping.options.get("response_length")
    if sampled and isinstance(sampled.value, dict) and mapping.pop("response_length"):
        note = "sampled once per update, not per response"
        mapping.map("ppo.response_length", sampled.value, sampled, note)
    if mapping.version == OLD and not mapping.has("response_length", "max_new_tokens"):
        mapping.to_set["ppo.response_length"] = "an argument of your generate() call; default here: 53"


def models(mapping: OptionMapping) -> None:
    """Convert the models; a text-classification pipeline becomes a reward."""
    policy = [setting for name in ("sft_model_path", "model_name") if (setting := mapping.pop(name))]
    for setting in policy:
        mapping.map("models.sft", setting.value, setting)
    if policy:
        mapping.reject_if_set(
            "model_name_or_path", "in TRL the source of the tokenizer; here the tokenizer is that of models.sft"
        )
    elif start := mapping.pop("model_name_or_path"):
        mapping.map("models.sft", start.value, start)
    else:
        mapping.to_set["models.sft"] = "initial policy and reference; default: RUN/sft, written by `rlhf sft`"
    ref = mapping.options.get("ref_model_path")
    if ref and ref.value in [setting.value for setting in policy] and mapping.pop("ref_model_path"):
        mapping.skip(ref, "the reference is models.sft")
    reward = mapping.options.get("reward_model")
    if reward and isinstance(reward.value, str) and ":" in reward.value and mapping.pop("reward_model"):
        model = reward.value.partition(":")[2]
        mapping.map("rewards.classifier.pipeline", model, reward)
        extra = {"reads": ("both", "prompt and response as one text, as in TRL's examples; the reward is a logit")}
        if model in LABELS:
            extra["label"] = (LABELS[model], "the label that the examples use")
        else:
            mapping.to_set["rewards.classifier.label"] = "the label whose score is the reward, if there are several"
        for key, (value, note) in extra.items():
            option = MappedOption(f"rewards.classifier.{key}", value, "", None, note, where=reward.where)
            mapping.mapped[option.key] = option
    elif not mapping.has("reward_model", "reward_model_path"):
        if mapping.version == OLD:
            mapping.to_set["rewards"] = OWN_REWARD
        else:
            mapping.to_set["models.reward"] = "default: RUN/reward, written by `rlhf reward`"


def prompts(mapping: OptionMapping) -> None:
    """Convert the dataset and its splits."""
    data = mapping.pop("dataset_name") or mapping.pop("query_dataset")
    train, test = mapping.pop("dataset_train_split"), mapping.pop("dataset_test_split")
    folder = mapping.options.get("data_dir")
    if data and folder and isinstance(folder.value, str) and mapping.pop("data_dir"):
        data = replace(data, value=f"{data.value}/{folder.value}")
        mapping.skip(folder, f"data.prompts: {data.value}")
    if data is None:
        for split in filter(None, (train, test)):
            mapping.reject(split, "the file does not name the dataset")
        return
    mapping.to_set["data.columns"] = COLUMN
    for setting, key in ((train, "data.prompts"), (test, "data.eval_prompts")):
        name = data.value
        if setting and not (isinstance(setting.value, str) and SPLIT.fullmatch(setting.value)):
            mapping.reject(setting, "not a plain split name; use data.max_rows for the first rows")
        elif setting:
            is_default = setting.value == "train" and key == "data.prompts"
            name = data.value if is_default else f"{data.value}[{setting.value}]"
            mapping.skip(setting, f"{key}: {name}")
        if key == "data.prompts" or name != data.value:
            mapping.map(key, name, data)


def adapters(mapping: OptionMapping) -> None:
    """Convert the adapter options, if adapters are used."""
    flag = mapping.options.get("use_peft") or mapping.options.get("is_peft_model")
    if not (flag and coerce("ppo.bf16", flag.value) is True):
        if flag and mapping.pop(flag.name):
            (mapping.reject if flag.value else mapping.skip)(flag, "all weights are trained")
        for name in sorted(ADAPTER_OPTIONS & mapping.remaining.keys()):
            mapping.reject_if_set(name, "without use_peft all weights are trained, as in TRL")
        return
    for name in ("use_peft", "is_peft_model"):
        if setting := mapping.pop(name):
            mapping.map("models.adapters.kind", "lora", setting)
    if "LoraConfig" in mapping.parsed.signs:
        for name, (key, value) in PEFT_DEFAULTS.items():
            if not mapping.has(name):
                mapping.mapped[key] = MappedOption(key, value, name, value, "default of peft", False)
    if not mapping.has("lora_target_modules"):
        text = "peft has a default for each architecture, such as [q_proj, v_proj]; default here: all-linear"
        mapping.to_set["models.adapters.target_modules"] = text


def training(mapping: OptionMapping) -> None:
    """Convert optimizer and process options that differ from TRL."""
    limit = mapping.options.get("max_grad_norm")
    if limit and not limit.value and mapping.pop("max_grad_norm"):
        mapping.map("ppo.max_grad_norm", UNCLIPPED, limit, "no clipping: a limit that is never reached")
    steps, ratio = mapping.options.get("warmup_steps"), mapping.options.get("warmup_ratio")
    if steps and isinstance(steps.value, float) and 0 < steps.value < 1 and mapping.pop("warmup_steps"):
        mapping.map("ppo.warmup_ratio", steps.value, steps)
    if steps and steps.value and ratio and ratio.value:
        mapping.reject_if_set("warmup_ratio", "overridden by warmup_steps, as in TRL")
    fp16 = mapping.options.get("fp16")
    if fp16 and coerce("ppo.fp16", fp16.value) is True:
        mapping.without_default.add("ppo.bf16")
    fsdp = mapping.options.get("fsdp")
    if fsdp and fsdp.value and mapping.pop("fsdp"):
        mapping.map("ppo.fsdp", True, fsdp, "models are sharded over the processes; docs/scaling.md")
    best = mapping.options.get("push_to_hub_if_best_kwargs")
    if best and isinstance(best.value, dict) and best.value and mapping.pop("push_to_hub_if_best_kwargs"):
        mapping.map("ppo.push_to_hub_if_best", best.value.get("repo_id"), best)
    if count := mapping.pop("num_processes"):
        mapping.processes = count.value
        mapping.skip(count, f"--nproc {count.value} on the command line")


RULES: tuple[Callable[[OptionMapping], None], ...] = (batches, length, responses, models, prompts, adapters, training)


PROMPTS = "data.prompts"
LENGTHS = ("ppo.num_train_epochs", "ppo.total_episodes")
# Groups of mutually exclusive keys.
ONE_OF = ({*LENGTHS}, {"ppo.stop_token", "ppo.stop_token_id"})


def fill_defaults(mapping: OptionMapping) -> None:
    """Add TRL's defaults so that the result is a valid config.

    Raises RLHFError if the config is invalid and no option of the file is responsible.
    """
    defaults = _trl_defaults(mapping.version) | {
        key: option for key, option in mapping.mapped.items() if not option.from_file
    }
    mapping.mapped = {key: option for key, option in mapping.mapped.items() if option.from_file}
    config = _valid_config(mapping, defaults)
    for key, option in list(mapping.mapped.items()):
        del mapping.mapped[key]
        if option.from_file or not _is_same_config(config, config_tree(mapping)):
            mapping.mapped[key] = option


def config_tree(mapping: OptionMapping) -> dict[str, Any]:
    """Return the keys as a nested config."""
    tree: dict[str, Any] = {}
    for key, option in mapping.mapped.items():
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = option.value
    return tree


def _trl_defaults(version: str) -> dict[str, MappedOption]:
    """Return the defaults of a TRL version for the keys of PPO."""
    defaults: dict[str, MappedOption] = {}
    for name, option in OPTIONS[version].items():
        key, value = target_key(name), option.default
        if not key or not key.startswith("ppo.") or option.ignored or option.computed or is_no_op(name, value):
            continue
        if value is None and (not accepts_none(key) or any(key in group for group in ONE_OF)):
            continue
        converted = coerce(key, translate_value(name, value))
        defaults[key] = MappedOption(key, converted, name, value, option.remark, from_file=False)
    return defaults | {
        key: MappedOption(key, value, "", None, note, False) for key, (value, note) in FIXED_BEHAVIOR[version].items()
    }


def _valid_config(mapping: OptionMapping, defaults: dict[str, MappedOption]) -> PPOConfig:
    """Return the config with TRL's defaults; keys that it rejects are removed."""
    while True:
        _add_defaults(mapping, defaults)
        tree = config_tree(mapping)
        try:
            return PPOConfig.model_validate(tree)
        except ValidationError as error:
            _remove_rejected(mapping, defaults, translate_validation_error(error, tree, PPOConfig, lambda key: key)[0])


def _add_defaults(mapping: OptionMapping, defaults: dict[str, MappedOption]) -> None:
    for key, option in defaults.items():
        if key not in mapping.without_default and _is_free(key, mapping):
            note = "a default: the value in the file could not be parsed" if key in mapping.to_set else option.note
            mapping.mapped[key] = replace(option, note=note)
    if PROMPTS not in mapping.mapped:
        mapping.mapped[PROMPTS] = MappedOption(PROMPTS, "prompts.jsonl", "", None, "set by you", False)
        mapping.to_set[PROMPTS] = "rows {prompt}, or preference pairs, whose distinct prompts are used"


def _remove_rejected(mapping: OptionMapping, defaults: dict[str, MappedOption], problem: Problem) -> None:
    """Remove the key that caused a problem. Raises RLHFError if it cannot be determined."""
    where, words = problem.where or "", re.findall(r"\w+", problem.text)
    exact = [key for key in mapping.mapped if key == where or where.startswith(f"{key}.")]
    switch = [key for key in mapping.mapped if key == f"ppo.{BELONGS_TO.get(where.removeprefix('ppo.'))}"]
    named = [key for word in words for key in mapping.mapped if key.rpartition(".")[2] == word]
    below = [key for key in mapping.mapped if where and key.startswith(f"{where}.")]
    if not (candidates := exact or switch or named or below):
        raise RLHFError.from_problems([problem])
    option = mapping.mapped.pop(candidates[0])
    if not option.from_file:
        defaults.pop(option.key, None)
    text = problem.text.removeprefix(f"{where}: ").removeprefix(f"{where.partition('.')[0]}: ")
    reason = f"{text}; {problem.hint}" if problem.hint else text
    mapping.unsupported.append(UnsupportedOption(option.name or option.key, option.trl_value, option.where, reason))


def _is_free(key: str, mapping: OptionMapping) -> bool:
    exclusive = next((group for group in ONE_OF if key in group), {key})
    return not exclusive & mapping.mapped.keys()


def _is_same_config(config: PPOConfig, tree: dict[str, Any]) -> bool:
    """Return True if a tree gives this config."""
    try:
        return PPOConfig.model_validate(tree) == config
    except ValidationError:
        return False
