"""Convert TRL's PPO options to a valid ppo.yaml: options that belong together, and TRL's defaults."""

import re
from math import gcd

from pydantic import ValidationError

from rlhf_cli.commands.convert.mapping import OLD, Conversion, Row, local_path, target_key
from rlhf_cli.commands.convert.read import TRLSettings
from rlhf_cli.config.machinery.yaml_io import to_yaml
from rlhf_cli.config.messages import translate_validation_error
from rlhf_cli.config.ppo import BELONGS_TO, PPOConfig
from rlhf_cli.errors import Problem, RLHFError

PROMPTS = Row("", None, "prompts.jsonl", "to be set by you")
# Keys that replace each other.
INSTEAD_OF = {"ppo.num_train_epochs": "ppo.total_episodes", "ppo.stop_token": "ppo.stop_token_id"}
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches")
PLAIN_SPLIT = re.compile(r"[\w.-]+")
URL = re.compile(r"https?://")


def convert_settings(source: TRLSettings, version: str) -> Conversion:
    """Map the options of a file to the keys of a valid ppo.yaml, with TRL's defaults for the other keys.

    Raises RLHFError if the config is invalid and no option is responsible.
    """
    conversion = Conversion(source, version)
    for rule in (_batches, _prompts, _rewards, _adapters, _penalty):
        rule(conversion)
    if "sft_model_path" in conversion.options:  # model_name_or_path beside it is the tokenizer's source in TRL
        conversion.set("models.sft", "sft_model_path")
    if conversion.options.keys() & {"total_episodes", "steps"}:
        conversion.leave("num_train_epochs", "overridden by total_episodes, as in TRL")

    for name in list(conversion.options):
        conversion.map_option(name)
    for key, note in conversion.data["to_set"].items():
        if not any(row.startswith(tuple(key.split(" or "))) for row in conversion.rows):
            conversion.to_set.setdefault(key, note)
    _complete(conversion)
    return conversion


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
        other_versions = "; TRL made other numbers of them, see docs/commands.md"

    steps = f"{rows * parts} episodes per update, optimizer steps per epoch: {minibatches}{other_versions}"
    for key, value, option in zip(BATCH_KEYS, (rows, parts, minibatches), sizes, strict=True):
        note = steps if key == "num_mini_batches" else ""
        conversion.rows[f"ppo.{key}"] = Row(option, sizes[option], value, note)


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
            note = 'it must answer {"scores": [...]}, or set protocol; see docs/rewards.md'
            conversion.set("rewards.server.url", name, note=note)
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


def _complete(conversion: Conversion) -> None:
    """Add TRL's defaults, and remove the options that make the config invalid. Raises RLHFError if none does."""
    rows = conversion.rows
    defaults = {"data.prompts": PROMPTS}
    for key, (value, option, note) in conversion.data["defaults"].items():
        defaults[key] = Row(option, value, value, note)
    while True:
        for key, row in defaults.items():
            if INSTEAD_OF.get(key) not in rows:
                rows.setdefault(key, row)
        problem = _first_problem(conversion)
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
    return [where, where.rpartition(".")[0], f"ppo.{switch}", *(f"{where}.{word}" for word in problem.text.split())]


def _first_problem(conversion: Conversion) -> Problem | None:
    tree = conversion.tree()
    try:
        PPOConfig.model_validate(tree)
    except ValidationError as error:
        return translate_validation_error(error, tree, PPOConfig, lambda key: key)[0]
    return None
