"""Map TRL's PPO options to the keys of a valid ppo.yaml, with TRL's defaults. trl.yaml lists options and defaults."""

import os
import re
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_cli.commands.convert.read import TRLSettings
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.machinery.fields import keys_of
from rlhf_cli.config.machinery.secret_values import remove_secrets
from rlhf_cli.config.machinery.yaml_io import parse_value, to_yaml
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import BELONGS_TO, PPOConfig
from rlhf_cli.errors import Problem, RLHFError, redact

OLD = "0.11"
NEW = "1.12"
VERSIONS = yaml_io.read(Path(__file__).with_name("trl.yaml")).tree
OPTIONS: dict[str, list[str]] = {version: VERSIONS[version]["options"] for version in (OLD, NEW)}
ONLY_OLD = {*OPTIONS[OLD], *VERSIONS[OLD]["names"]} - {*OPTIONS[NEW]}
ONLY_NEW = {*OPTIONS[NEW], *VERSIONS[NEW]["names"]} - {*OPTIONS[OLD]}
# Sections searched, in this order, for the key of an option.
SECTIONS = ("ppo.", "models.adapters.", "models.", "output.", "data.", "")
KEYS = {path: key for path, key in keys_of(PPOConfig).items() if not key.is_section}
NOT_OPTIONS = ("stage", "run", "rewards", "ppo.recipe")
PATHS = ("models.sft", "models.reward", "models.value", "rewards.classifier.pipeline")
LISTS = ("output.report_to", "models.adapters.target_modules")
# Keys that replace each other.
INSTEAD_OF = {"ppo.num_train_epochs": "ppo.total_episodes", "ppo.stop_token": "ppo.stop_token_id"}
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
PLAIN_SPLIT = re.compile(r"[\w.-]+")
URL = re.compile(r"https?://")


@dataclass(frozen=True)
class Row:
    """The value of a key of ppo.yaml, and the option of TRL that sets it; without one it is a default."""

    option: str
    trl_value: Any
    value: Any
    note: str = ""


class Conversion:
    """The options of a file, and the result for each."""

    def __init__(self, source: TRLSettings, version: str) -> None:
        self.source = source
        self.version = version
        self.data = VERSIONS[version]
        self.options: dict[str, Any] = {}  # not converted yet
        self.rows: dict[str, Row] = {}  # by key
        self.unconverted: dict[str, str] = {}  # the value and the reason, by option
        self.to_set: dict[str, str] = {}  # what the user has to set, with a note

        for name, value in source.options.items():
            shown = to_yaml(value)
            if remove_secrets({name: value}, str) or redact(shown) != shown:
                reason = "secrets are not stored in files; use environment variables such as HF_TOKEN"
                self.unconverted[name] = f'"[secret]" ({reason})'
            elif value not in (None, ""):
                self.options[name] = value
        for name, reason in source.unread.items():
            self.to_set[target_key(name) or name] = f"not read: {reason}"

    def set(self, key: str, option: str, value: Any, note: str = "") -> None:
        """Set a key to the value of an option, unless another option has already set it."""
        if key in self.rows:
            self.leave(option, f"already set by {self.rows[key].option}")
            return
        if key in PATHS:
            value = local_path(value)
        if isinstance(value, float) and value.is_integer() and float not in KEYS[key].parts:
            value = int(value)  # YAML and JSON often have 1e4
        if key in LISTS and isinstance(value, str) and value != "all-linear":
            value = [value]
        self.options.pop(option, None)
        self.rows[key] = Row(option, self.source.options[option], value, note)

    def leave(self, option: str, reason: str) -> None:
        """Record an option that is not converted, if the file has it."""
        if option in self.options:
            self.unconverted[option] = f"{to_yaml(self.options.pop(option))} ({reason})"

    def map_option(self, name: str) -> None:
        """Set the key of an option, or record why it has none."""
        alias = ALIASES.get(name)
        key = target_key(name)
        if name in self.data["computed"]:
            self.leave(name, f"TRL {self.version} computed it")
        elif key is None:
            self.leave(name, alias.note if alias and alias.note else "PPO has no such setting here")
        else:
            value = self.options[name]
            if alias and isinstance(value, str) and value in alias.values:
                value = parse_value(alias.values[value])
            is_ignored = name in self.data["ignored"]
            self.set(key, name, value, f"takes effect here; TRL {self.version} ignored it" if is_ignored else "")

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


def convert_settings(source: TRLSettings, version: str) -> Conversion:
    """Map the options of a file to the keys of a valid ppo.yaml, with TRL's defaults for the other keys.

    Raises RLHFError if the config is invalid and no option is responsible.
    """
    conversion = Conversion(source, version)
    for rule in (_batches, _prompts, _rewards, _adapters, _penalty):
        rule(conversion)
    if "sft_model_path" in conversion.options:  # model_name_or_path beside it is the tokenizer's source in TRL
        conversion.map_option("sft_model_path")
    if conversion.options.keys() & {"total_episodes", "steps"}:
        conversion.leave("num_train_epochs", "overridden by total_episodes, as in TRL")

    for name in list(conversion.options):
        conversion.map_option(name)
    for key, note in conversion.data["to_set"].items():
        if not any(row.startswith(tuple(key.split(" or "))) for row in conversion.rows):
            conversion.to_set.setdefault(key, note)
    _complete(conversion)
    return conversion


def detect_version(source: TRLSettings) -> tuple[str, str]:
    """Return the TRL version of a file, by the names that only one version has, and the reason."""
    names = [*sorted(source.classes), *source.options, *source.unread]
    old = [name for name in names if name in ONLY_OLD]
    new = [name for name in names if name in ONLY_NEW]
    if len(old) > len(new):
        return OLD, f"only that version has {', '.join(old[:3])}"
    if new:
        return NEW, f"only that version has {', '.join(new[:3])}"
    return NEW, "no option is specific to a version; use --trl 0.11 for the older one"


def local_path(value: Any) -> Any:
    """Return a relative path as an absolute one: it starts at the working directory in TRL, at ppo.yaml here."""
    is_path = isinstance(value, str) and (value.startswith(("./", "../")) or os.path.exists(value))
    return os.path.abspath(value) if is_path else value


def target_key(name: str) -> str | None:
    """Return the key with the meaning of a TRL option, as a dotted path; None if there is none."""
    last = ALIASES[name].key if name in ALIASES else name
    for section in SECTIONS:
        key = f"{section}{last}"
        if key in KEYS and key not in NOT_OPTIONS:
            return key
    return None


# Options that belong together


def convert_old_batch(rows: int, episodes: int, accumulated: int) -> tuple[int, int, int]:
    """Return BATCH_KEYS' values for TRL 0.11's mini_batch_size, batch_size and gradient_accumulation_steps.

    An update has batch_size episodes, a forward pass mini_batch_size rows, and an optimizer step
    gradient_accumulation_steps forward passes (trl/trainer/ppo_trainer.py, `step`).
    """
    rows = gcd(episodes, rows)  # TRL rejects rows that do not divide the episodes
    parts = episodes // rows
    return rows, parts, max(1, parts // accumulated)


def _batches(conversion: Conversion) -> None:
    sizes = dict(conversion.data["batch"])
    for name in sizes:
        size = conversion.options.get(name)
        if type(size) is int and size > 0:
            sizes[name] = conversion.options.pop(name)
        conversion.leave(name, "not a whole number from 1 up")

    rows, parts, minibatches = sizes.values()
    other_versions = ""
    if conversion.version == OLD:
        rows, parts, minibatches = convert_old_batch(rows, parts, minibatches)
    elif "PPOv2Config" in conversion.source.classes:  # before 0.17
        parts *= minibatches
    elif minibatches > 1:
        other_versions = "; TRL made other numbers of them, see docs/convert.md"

    steps = f"{rows * parts} episodes per update, optimizer steps per epoch: {minibatches}{other_versions}"
    values = zip(BATCH_KEYS, sizes.items(), (rows, parts, minibatches), ("", "", steps), strict=True)
    for key, (option, size), value, note in values:
        conversion.rows[f"ppo.{key}"] = Row(option, size, value, note)


def _prompts(conversion: Conversion) -> None:
    options = conversion.options
    dataset = "dataset_name" if "dataset_name" in options else "query_dataset"
    if dataset not in options:
        return
    for split in ("dataset_train_split", "dataset_test_split"):
        if not PLAIN_SPLIT.fullmatch(str(options.get(split))):
            conversion.leave(split, "not a plain split name; use data.max_rows for the first rows")
    train = options.pop("dataset_train_split", "train")
    test = options.pop("dataset_test_split", None)
    name = local_path(options[dataset])
    conversion.set("data.prompts", dataset, name if train == "train" else f"{name}[{train}]")
    if test:
        conversion.set("data.eval_prompts", dataset, f"{name}[{test}]")


def _rewards(conversion: Conversion) -> None:
    """Convert a reward model that is a URL or a text-classification pipeline, TASK:MODEL."""
    for name in ("reward_model", "reward_model_path"):
        value = str(conversion.options.get(name, ""))
        if URL.match(value):
            note = 'it must answer {"scores": [...]}, or set protocol; see docs/reward-endpoints.md'
            conversion.set("rewards.server.url", name, value, note)
        elif ":" in value and name == "reward_model":
            conversion.set("rewards.classifier.pipeline", name, value.partition(":")[2])
            conversion.set("rewards.classifier.input", name, "both", "as in TRL's examples; the reward is a logit")
            label = "the label whose score is the reward, if there are several, such as POSITIVE"
            conversion.to_set["rewards.classifier.label"] = label


def _adapters(conversion: Conversion) -> None:
    """Convert use_peft, without which TRL trains all weights."""
    if conversion.options.get("use_peft") is True:
        note = "target_modules are all-linear by default here; peft has others for each architecture"
        conversion.set("models.adapters.kind", "use_peft", "lora", note)
        return
    for name in list(conversion.options):
        if (target_key(name) or "").startswith("models.adapters"):
            conversion.leave(name, "without use_peft: true all weights are trained, as in TRL")


def _penalty(conversion: Conversion) -> None:
    """Convert the penalty of a response without a stop token in TRL up to 0.10."""
    value = conversion.options.get("penalty_reward_value", -1)
    if conversion.options.get("non_eos_penalty") is True and isinstance(value, int | float):
        note = f"TRL up to 0.10 replaced the score by {value}; here {abs(value)} is subtracted from it"
        conversion.set("ppo.missing_eos_penalty", "non_eos_penalty", abs(value), note)
        conversion.options.pop("penalty_reward_value", None)
    for name in ("non_eos_penalty", "penalty_reward_value"):
        conversion.leave(name, "without non_eos_penalty: true there is no penalty, as in TRL")


# Defaults, and options that make the config invalid


def _complete(conversion: Conversion) -> None:
    """Add TRL's defaults, and remove the options that make the config invalid. Raises RLHFError if none does."""
    rows = conversion.rows
    defaults = {"data.prompts": Row("", None, "prompts.jsonl", "to be set by you")}
    for key, (value, option, note) in conversion.data["defaults"].items():
        defaults[key] = Row(option, value, value, note)
    while True:
        for key, row in defaults.items():
            if INSTEAD_OF.get(key) not in rows:
                rows.setdefault(key, row)
        problem = _first_problem(conversion.tree())
        if problem is None:
            return

        key = next((key for key in _possible_causes(problem) if key in rows), None)
        if key is None:
            raise RLHFError.from_problems([problem])
        row = rows.pop(key)
        if row is defaults.get(key):
            del defaults[key]
        reason = f"{problem.text}; {problem.hint}" if problem.hint else problem.text
        conversion.unconverted[row.option or key] = f"{to_yaml(row.trl_value)} ({reason})"


def _possible_causes(problem: Problem) -> list[str]:
    """Return the key of a problem, that of its list or its switch, and the words of its text as keys of its section."""
    where = problem.where or ""
    switch = BELONGS_TO.get(where.removeprefix("ppo."))
    words = [f"{where}.{word}" for word in problem.text.split()]
    return [where, where.rpartition(".")[0], f"ppo.{switch}", *words]


def _first_problem(tree: dict[str, Any]) -> Problem | None:
    try:
        PPOConfig.model_validate(tree)
    except ValidationError as error:
        return translate_validation_error(error, tree, PPOConfig, lambda key: key)[0]
    return None
