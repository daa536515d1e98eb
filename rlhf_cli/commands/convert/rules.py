"""Convert TRL's PPO options to a valid ppo.yaml: options that belong together, and TRL's defaults."""

import re
from fractions import Fraction
from math import ceil, gcd

from pydantic import ValidationError

from rlhf_cli.commands.convert.mapping import NEW, OLD, VERSIONS, Conversion, Row, map_option
from rlhf_cli.commands.convert.read import Setting, TRLSettings
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import BELONGS_TO, PPOConfig
from rlhf_cli.errors import Problem, RLHFError

PROMPTS = Row("", None, "data.prompts", "prompts.jsonl", "to be set by you", is_default=True)
EXCLUSIVE = ({"ppo.num_train_epochs", "ppo.total_episodes"}, {"ppo.stop_token", "ppo.stop_token_id"})
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
LARGEST_BATCH = 10**9
ADAPTER_OPTIONS = {name for name in ALIASES if name.startswith("lora_")} | {"lora_alpha", "use_rslora", "use_dora"}
URL = re.compile(r"https?://")
LABELS = {"lvwerra/distilbert-imdb": "POSITIVE"}  # the label whose logit TRL's examples use

Batch = tuple[int, int, int]  # the values of BATCH_KEYS


def convert_settings(source: TRLSettings, version: str) -> Conversion:
    """Map the options of a file to the keys of a valid ppo.yaml, with TRL's defaults for the other keys.

    Raises RLHFError if the config is invalid and no option is responsible.
    """
    conversion = Conversion(source, version)
    for rule in (_batches, _length, _stop_tokens, _models, _prompts, _adapters, _training):
        rule(conversion)
    for setting in conversion.take(*conversion.options):
        map_option(conversion, setting)
    _complete(conversion)
    return conversion


def convert_old_batch(rows: int, episodes: int, accumulated: int) -> Batch:
    """Convert TRL 0.11's mini_batch_size, batch_size and gradient_accumulation_steps.

    An update has batch_size episodes, a forward pass mini_batch_size rows, and an optimizer step
    gradient_accumulation_steps forward passes (trl/trainer/ppo_trainer.py, `step`).
    """
    if episodes % (rows * accumulated):  # TRL rejects these sizes
        rows = gcd(episodes, rows)
        return rows, episodes // rows, 1
    return rows, episodes // rows, episodes // (rows * accumulated)


def trl_optimizer_steps(parts: int, minibatches: int) -> Fraction:
    """Return the optimizer steps per epoch in TRL since 0.17: forward passes / gradient_accumulation_steps.

    A minibatch takes parts / minibatches forward passes, rounded up. Here, and in TRL before 0.17, num_mini_batches is
    the number of optimizer steps; before 0.17 an update had num_mini_batches times the episodes.
    """
    return Fraction(minibatches * ceil(Fraction(parts, minibatches)), parts)


def _batches(conversion: Conversion) -> None:
    sizes = dict(VERSIONS[conversion.version]["batch"])
    if conversion.version == OLD and "forward_batch_size" in conversion.options:
        for unused in conversion.take("mini_batch_size"):
            conversion.leave(unused, "forward_batch_size replaced it")
        sizes = {"forward_batch_size": sizes.pop("mini_batch_size"), **sizes}
    is_default = True
    for setting in conversion.take(*sizes):
        if type(setting.value) is int and 1 <= setting.value <= LARGEST_BATCH:
            sizes[setting.name] = setting.value
            is_default = False
        else:
            conversion.leave(setting, "not a whole number from 1 up")
    rows, parts, minibatches = sizes.values()
    trl_steps = trl_optimizer_steps(parts, minibatches)
    if conversion.version == OLD:
        rows, parts, minibatches = convert_old_batch(rows, parts, minibatches)
    elif "PPOv2Config" in conversion.source.classes:  # before 0.17
        parts *= minibatches
    note = f"{rows * parts} episodes per update, optimizer steps per epoch: {minibatches}"
    if conversion.version == NEW and "PPOv2Config" not in conversion.source.classes and trl_steps != minibatches:
        note += f"; {float(trl_steps):.3g} in TRL since 0.17, and before 0.17 {minibatches} times the episodes"
    default = f"default of TRL {conversion.version}" if is_default else ""
    remarks = (default, default, note)
    for name, value, option, remark in zip(BATCH_KEYS, (rows, parts, minibatches), sizes, remarks, strict=True):
        key = f"ppo.{name}"
        conversion.rows[key] = Row(option, sizes[option], key, value, remark, is_default)


def _length(conversion: Conversion) -> None:
    for setting in conversion.take("total_episodes", "steps"):
        note = "counted in episodes, rounded up to whole updates" if setting.name == "steps" else ""
        conversion.set("ppo.total_episodes", setting, note=note)
    for epochs in conversion.take("num_train_epochs"):
        if "ppo.total_episodes" in conversion.rows:
            conversion.leave(epochs, "overridden by total_episodes, as in TRL")
        else:
            conversion.set("ppo.num_train_epochs", epochs)


def _stop_tokens(conversion: Conversion) -> None:
    for setting in conversion.take("stop_token_id", "eos_token_id"):
        if isinstance(setting.value, int) and setting.value < 0:
            conversion.set("ppo.stop_token", setting, "none", "no token has this id: a response never ends early")
        else:
            conversion.set("ppo.stop_token_id", setting, note="stop_token: none, if the model never generates it")
    for setting in conversion.take("stop_token"):
        if "ppo.stop_token_id" in conversion.rows:
            conversion.leave(setting, "already set by stop_token_id")
        else:
            conversion.set("ppo.stop_token", setting)
    if conversion.version == OLD and not conversion.options.keys() & {"response_length", "max_new_tokens"}:
        conversion.to_set["ppo.response_length"] = "an argument of your generate() call; default here: 53"


def _models(conversion: Conversion) -> None:
    """Convert the models; a text-classification pipeline and a URL become a reward."""
    for setting in conversion.take("sft_model_path", "model_name"):
        conversion.set("models.sft", setting)
    for start in conversion.take("model_name_or_path"):
        if "models.sft" in conversion.rows:
            conversion.leave(start, "in TRL the source of the tokenizer; here that of models.sft is used")
        else:
            conversion.set("models.sft", start)
    if "models.sft" not in conversion.rows:
        conversion.to_set["models.sft"] = "initial policy and reference; default: RUN/sft, written by `rlhf sft`"
    for name in ("reward_model", "reward_model_path"):
        if URL.match(str(conversion.value(name))):
            note = 'it must answer {"scores": [...]}, or set protocol; see docs/rewards.md'
            conversion.set("rewards.server.url", conversion.options.pop(name), note=note)
    pipeline = conversion.value("reward_model")
    if isinstance(pipeline, str) and ":" in pipeline:
        setting = conversion.options.pop("reward_model")
        model = pipeline.partition(":")[2]
        conversion.set("rewards.classifier.pipeline", setting, model)
        note = "prompt and response as one text, as in TRL's examples; the reward is a logit"
        conversion.set("rewards.classifier.input", setting, "both", note)
        if model in LABELS:
            conversion.set("rewards.classifier.label", setting, LABELS[model], "the label that the examples use")
        else:
            conversion.to_set["rewards.classifier.label"] = "the label whose score is the reward, if there are several"
    elif not pipeline and "reward_model_path" not in conversion.options and "rewards.server.url" not in conversion.rows:
        if conversion.version == OLD:
            text = 'TRL 0.11 got scores from your code; set e.g. rewards: {mine: {function: "module:function"}}'
            conversion.to_set["rewards"] = text
        else:
            conversion.to_set["models.reward"] = "default: RUN/reward, written by `rlhf reward`"


def _prompts(conversion: Conversion) -> None:
    splits = {"data.prompts": ""}
    for split in conversion.take("dataset_train_split", "dataset_test_split"):
        key = "data.prompts" if split.name == "dataset_train_split" else "data.eval_prompts"
        if isinstance(split.value, str) and re.fullmatch(r"[\w.-]+", split.value):
            splits[key] = "" if (key, split.value) == ("data.prompts", "train") else f"[{split.value}]"
            conversion.leave(split, f"the split in {key}")
        else:
            conversion.leave(split, "not a plain split name; use data.max_rows for the first rows")
    for dataset in conversion.take("dataset_name", "query_dataset"):
        for key, name in splits.items():
            conversion.set(key, dataset, f"{dataset.value}{name}")
    if "data.prompts" in conversion.rows:
        conversion.to_set["data.columns"] = "{prompt: NAME} if the column of the prompts has another name"
    else:
        conversion.to_set["data.prompts"] = "rows {prompt}, or preference pairs, whose distinct prompts are used"


def _adapters(conversion: Conversion) -> None:
    flags = conversion.take("use_peft", "is_peft_model")
    if not any(flag.value is True for flag in flags):
        for flag in flags:
            conversion.leave(flag, "all weights are trained")
        for setting in conversion.take(*sorted(ADAPTER_OPTIONS)):
            conversion.leave(setting, "without use_peft all weights are trained, as in TRL")
        return
    for flag in flags:
        conversion.set("models.adapters.kind", flag, "lora")
    if "lora_target_modules" not in conversion.options:
        text = "peft has a default for each architecture, such as [q_proj, v_proj]; default here: all-linear"
        conversion.to_set["models.adapters.target_modules"] = text


def _training(conversion: Conversion) -> None:
    """Convert training options whose values mean something else in TRL."""
    options = conversion.options
    steps = conversion.value("warmup_steps")
    if steps and conversion.value("warmup_ratio"):
        conversion.leave(options.pop("warmup_ratio"), "overridden by warmup_steps, as in TRL")
    if isinstance(steps, float) and 0 < steps < 1:
        conversion.set("ppo.warmup_ratio", options.pop("warmup_steps"), steps, "a number below 1 was a ratio")
    if strategy := conversion.value("fsdp"):
        value = "hybrid" if "hybrid_shard" in str(strategy) else True
        conversion.set("ppo.fsdp", options.pop("fsdp"), value, "shards the models; see docs/scaling.md")


def _complete(conversion: Conversion) -> None:
    """Add TRL's defaults, and remove the options that make the config invalid. Raises RLHFError if none does."""
    rows = conversion.rows
    defaults = {
        key: Row(option, value, key, value, note or f"default of TRL {conversion.version}", is_default=True)
        for key, (value, option, note) in VERSIONS[conversion.version]["defaults"].items()
    }
    if (fp16 := rows.get("ppo.fp16")) and fp16.value:
        defaults.pop("ppo.bf16", None)
    defaults |= {PROMPTS.key: PROMPTS, **{key: row for key, row in rows.items() if row.is_default}}
    while True:
        for key, row in defaults.items():
            alternatives = next((group for group in EXCLUSIVE if key in group), {key})
            if not rows.keys() & alternatives:
                rows[key] = row
        tree = conversion.tree()
        try:
            PPOConfig.model_validate(tree)
            return
        except ValidationError as error:
            problem = translate_validation_error(error, tree, PPOConfig, lambda key: key)[0]
        row = rows.pop(_responsible_key(rows, problem))
        if row.is_default:
            del defaults[row.key]
        text = problem.text.removeprefix(f"{problem.where}: ").removeprefix(f"{row.key.partition('.')[0]}: ")
        reason = f"{text}; {problem.hint}" if problem.hint else text
        conversion.leave(Setting(row.option or row.key, row.trl_value), reason)


def _responsible_key(rows: dict[str, Row], problem: Problem) -> str:
    """Return the key that caused a problem. Raises RLHFError if there is none."""
    where = problem.where or ""
    switch = f"ppo.{BELONGS_TO.get(where.removeprefix('ppo.'))}"
    candidates = [key for key in rows if key == where or where.startswith(f"{key}.")]
    candidates += [key for key in rows if key == switch]
    for word in re.findall(r"\w+", problem.text):
        candidates += [key for key in rows if key.rpartition(".")[2] == word]
    candidates += [key for key in rows if where and key.startswith(f"{where}.")]
    if not candidates:
        raise RLHFError.from_problems([problem])
    return candidates[0]
