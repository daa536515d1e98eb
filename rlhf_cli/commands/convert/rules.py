"""Convert TRL's PPO options to a valid ppo.yaml. trl.yaml lists the options.

One option maps to a key by its name, or by the name that replaces it; then there are options that belong together,
and TRL's defaults.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from rlhf_cli.commands.convert.read import Setting, Source
from rlhf_cli.config import loading, trl_fields, yaml_io
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.fields import key_at, keys_of
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.ppo_options import BELONGS_TO
from rlhf_cli.config.yaml_io import parse_value, to_yaml
from rlhf_cli.errors import Problem, RLHFError, closest_match, redact

OLD, NEW = "0.11", "1.12"
VERSIONS = yaml_io.read(Path(__file__).with_name("trl.yaml")).tree
OPTIONS: dict[str, list[str]] = {version: VERSIONS[version]["options"] for version in (OLD, NEW)}
# Sections searched, in this order, for the key of an option.
SECTIONS = ("ppo.", "models.adapters.", "models.", "output.", "data.", "")
KEYS = {path for path, key in keys_of(PPOConfig).items() if not key.is_section}
KEYS -= {"stage", "run", "rewards", "ppo.recipe"}


@dataclass(frozen=True)
class Row:
    """An option of TRL and the key of ppo.yaml that it sets; without a key nothing is written."""

    option: str
    trl_value: Any
    key: str = ""
    value: Any = None
    note: str = ""
    is_default: bool = False  # of TRL, not in the file


class Conversion:
    """The options of a file, and the result for each."""

    def __init__(self, source: Source, version: str) -> None:
        self.source, self.version = source, version
        self.options: dict[str, Setting] = {}  # not converted yet
        self.rows: dict[str, Row] = {}  # by key
        self.unconverted: list[Row] = []  # with the reason as note
        self.to_set: dict[str, str] = {}  # keys that the user has to set, with a note
        for setting in source.settings:
            shown = to_yaml(setting.value)
            if loading.remove_secrets({setting.name: setting.value}, str) or redact(shown) != shown:
                reason = "secrets are not stored in files; use environment variables such as HF_TOKEN"
                self.leave(Setting(setting.name, "[secret]"), reason)
            elif setting.problem:
                self.leave(setting, setting.problem)
                if key := target_key(setting.name):
                    self.to_set[key] = f"the file has {setting.value}"
            elif setting.value is None or setting.value == "":
                self.leave(Setting(setting.name, None), "not set in TRL")
            else:
                if (previous := self.value(setting.name)) not in (None, setting.value):
                    self.leave(Setting(setting.name, previous), "the file sets it again: the last value is used")
                self.options[setting.name] = setting

    def value(self, name: str) -> Any:
        """Return the value of an option that is not converted yet, or None."""
        return self.options[name].value if name in self.options else None

    def take(self, *names: str) -> list[Setting]:
        """Remove these options from those still to be converted, and return them."""
        return [self.options.pop(name) for name in names if name in self.options]

    def set(self, key: str, setting: Setting, value: Any = None, note: str = "") -> None:
        """Set a key to `value`, or to that of an option of the file, unless another option has already set it."""
        value = coerce(key, setting.value if value is None else value)
        previous = self.rows.get(key)
        if not _can_be_written(value):
            self.leave(setting, "the value cannot be written to YAML")
        elif previous is None:
            self.rows[key] = Row(setting.name, setting.value, key, value, note)
        else:
            self.leave(setting, f"already set by {previous.option}")

    def leave(self, setting: Setting, reason: str) -> None:
        """Record an option that is not converted."""
        self.unconverted.append(Row(setting.name, setting.value, note=reason))

    def tree(self) -> dict[str, Any]:
        """Return the keys as a nested config."""
        tree: dict[str, Any] = {}
        for key, row in self.rows.items():
            *sections, last = key.split(".")
            inner = tree
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = row.value
        return tree


def detect_version(source: Source) -> tuple[str, str]:
    """Return the TRL version of a file, and the reason."""
    names = dict.fromkeys([*sorted(source.classes), *(setting.name for setting in source.settings)])
    known = {version: {*VERSIONS[version]["options"], *VERSIONS[version]["names"]} for version in (OLD, NEW)}
    only = {OLD: known[OLD] - {*OPTIONS[NEW]}, NEW: known[NEW] - {*OPTIONS[OLD]}}
    evidence = {version: [name for name in names if name in only[version]] for version in (OLD, NEW)}
    version, other = (OLD, NEW) if len(evidence[OLD]) > len(evidence[NEW]) else (NEW, OLD)
    if not evidence[version]:
        return version, "no option is specific to a version; use --trl 0.11 for the older one"
    reason = f"only that version has {', '.join(evidence[version][:3])}"
    contrary = f"; only the other has {', '.join(evidence[other][:3])}: check, or set --trl" if evidence[other] else ""
    return version, reason + contrary


def target_key(name: str) -> str | None:
    """Return the key with the meaning of a TRL option, as a dotted path; None if there is none."""
    last = ALIASES[name].key if name in ALIASES else name
    return next((section + last for section in SECTIONS if section + last in KEYS), None) if last else None


def map_option(conversion: Conversion, setting: Setting) -> None:
    name, value, key, version = setting.name, setting.value, target_key(setting.name), conversion.version
    if name in VERSIONS[version]["computed"]:
        conversion.leave(setting, f"TRL {version} computed it")
    elif key:
        words = ALIASES[name].values if name in ALIASES else {}
        translated = parse_value(words[value]) if isinstance(value, str) and value in words else value
        note = f"takes effect here; TRL {version} ignored it" if name in VERSIONS[version]["ignored"] else ""
        conversion.set(key, setting, translated, note)
    else:
        conversion.leave(setting, _unsupported_reason(name))


def _unsupported_reason(name: str) -> str:
    if name in ALIASES:
        return ALIASES[name].note if ALIASES[name].key is None else f"ppo.yaml has no {ALIASES[name].key}"
    if trl_fields.is_set_by_rlhf(name):
        return "the pipeline sets it"
    if name in trl_fields.fields_of("sft"):
        return "a setting of transformers' Trainer, which PPO does not use"
    known = {*OPTIONS[OLD], *OPTIONS[NEW], *ALIASES, *(key.rpartition(".")[2] for key in KEYS)}
    near = closest_match(name, known, cutoff=0.8)
    return "unknown, both here and in TRL" + (f"; did you mean {near}?" if near else "")


def coerce(key: str, value: Any) -> Any:
    """Convert a value to the type of a key if it has the same meaning: 10000.0, or a single list item."""
    config_key = key_at(PPOConfig, key.split("."))
    parts = config_key.parts if config_key else ()
    types = {part for part in parts if isinstance(part, type) or get_origin(part) is not None}
    if int in types and float not in types and isinstance(value, float) and value.is_integer():
        return int(value)
    words = {word for kind in types if get_origin(kind) is Literal for word in get_args(kind)}
    is_item = isinstance(value, str) and value not in words and any(get_origin(kind) is list for kind in types)
    return [value] if is_item else value


def _can_be_written(value: Any) -> bool:
    try:
        parsed = parse_value(to_yaml(value))
        return bool(parsed == value) and type(parsed) is type(value)
    except RLHFError:
        return False


PROMPTS = Row("", None, "data.prompts", "prompts.jsonl", "to be set by you", is_default=True)
EXCLUSIVE = ({"ppo.num_train_epochs", "ppo.total_episodes"}, {"ppo.stop_token", "ppo.stop_token_id"})
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
LARGEST_BATCH = 10**9
ADAPTER_OPTIONS = {name for name in ALIASES if name.startswith("lora_")} | {"lora_alpha", "use_rslora", "use_dora"}
LABELS = {"lvwerra/distilbert-imdb": "POSITIVE"}  # the label whose logit TRL's examples use

Batch = tuple[int, int, int]  # the values of BATCH_KEYS


def convert_settings(source: Source, version: str) -> Conversion:
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
    for key, value, option in zip(BATCH_KEYS, (rows, parts, minibatches), sizes, strict=True):
        remark = note if key == BATCH_KEYS[-1] else f"default of TRL {conversion.version}" if is_default else ""
        conversion.rows[f"ppo.{key}"] = Row(option, sizes[option], f"ppo.{key}", value, remark, is_default)


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
    """Convert the models; a text-classification pipeline becomes a reward."""
    for setting in conversion.take("sft_model_path", "model_name"):
        conversion.set("models.sft", setting)
    for start in conversion.take("model_name_or_path"):
        if "models.sft" in conversion.rows:
            conversion.leave(start, "in TRL the source of the tokenizer; here that of models.sft is used")
        else:
            conversion.set("models.sft", start)
    if "models.sft" not in conversion.rows:
        conversion.to_set["models.sft"] = "initial policy and reference; default: RUN/sft, written by `rlhf sft`"
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
    elif not pipeline and "reward_model_path" not in conversion.options:
        if conversion.version == OLD:
            text = 'TRL 0.11 got scores from your code; set e.g. rewards: {mine: {function: "module:function"}}'
            conversion.to_set["rewards"] = text
        else:
            conversion.to_set["models.reward"] = "default: RUN/reward, written by `rlhf reward`"


def _prompts(conversion: Conversion) -> None:
    """Convert the dataset and its splits."""
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
    """Convert the adapter options, if adapters are used."""
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
            if not rows.keys() & next((group for group in EXCLUSIVE if key in group), {key}):
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
    where, words = problem.where or "", re.findall(r"\w+", problem.text)
    candidates = [key for key in rows if key == where or where.startswith(f"{key}.")]
    candidates += [key for key in rows if key == f"ppo.{BELONGS_TO.get(where.removeprefix('ppo.'))}"]
    candidates += [key for word in words for key in rows if key.rpartition(".")[2] == word]
    candidates += [key for key in rows if where and key.startswith(f"{where}.")]
    if not candidates:
        raise RLHFError.from_problems([problem])
    return candidates[0]
