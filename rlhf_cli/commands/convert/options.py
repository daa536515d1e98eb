"""Mapping of TRL options to keys of ppo.yaml: by name and value, and batch sizes."""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, gcd
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlhf_cli.commands.convert.versions import OPTIONS, ParsedFile, Setting
from rlhf_cli.config import loading, trl_fields
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.paths import field_at, field_kind, flatten_annotation, keys_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.yaml_io import parse_value, to_yaml
from rlhf_cli.errors import RLHFError, closest_match, redact

# Sections searched, in this order, for the key of an option.
SECTIONS = ("ppo.", "models.adapters.", "models.", "output.", "data.", "")
KEYS = {key for key, info in keys_of(PPOConfig).items() if field_kind(info).model is not info.annotation}
KEYS -= {"stage", "run", "rewards"}
# Values at which an option requests what this tool always does.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "top_k": (0,), "top_p": (1,), "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,), "num_beams": (1,),
    "min_length": (-1, 0), "min_new_tokens": (-1, 0), "do_sample": (True,), "use_peft": (False,), "fp16": (False,),
    "is_peft_model": (False,), "load_in_8bit": (False,), "load_in_4bit": (False,), "is_encoder_decoder": (False,),
    "trust_remote_code": (False,), "push_to_hub": (False,), "report_to": ("none", []), "model_revision": ("main",),
    "warmup_ratio": (0,), "warmup_steps": (0,), "fsdp": ("", [], False), "push_to_hub_if_best_kwargs": ({},),
    "tracker_kwargs": ({},), "project_kwargs": ({},), "accelerator_kwargs": ({},),
}  # fmt: skip
YES, NO = ("yes", "y", "t", "1"), ("no", "n", "f", "0")  # also accepted as booleans by transformers' parser


@dataclass(frozen=True)
class MappedOption:
    """A key of ppo.yaml and its value, with the TRL option and value. An empty key: nothing to write."""

    key: str
    value: Any
    name: str
    trl_value: Any  # its value in TRL
    note: str = ""
    from_file: bool = True  # False for a default of TRL
    where: str = ""  # FILE:LINE; empty for a default


@dataclass(frozen=True)
class UnsupportedOption:
    """An option that ppo.yaml has no key for."""

    name: str
    value: Any
    where: str
    reason: str


@dataclass
class OptionMapping:
    """The options of one file, and how each was converted."""

    version: str
    parsed: ParsedFile
    options: dict[str, Setting] = field(default_factory=dict)
    remaining: dict[str, Setting] = field(default_factory=dict)
    mapped: dict[str, MappedOption] = field(default_factory=dict)  # by key
    skipped: list[MappedOption] = field(default_factory=list)
    unsupported: list[UnsupportedOption] = field(default_factory=list)
    to_set: dict[str, str] = field(default_factory=dict)  # keys that the user has to set, with a note
    without_default: set[str] = field(default_factory=set)  # keys that do not get TRL's default
    processes: Any = None

    def __post_init__(self) -> None:
        for setting in self._settings():
            if setting.value is None:
                self.skip(setting, "not set in TRL")
                continue
            previous = self.options.get(setting.name)
            if previous and previous.value != setting.value:
                self.reject(previous, f"{setting.where} sets it again")  # the last one wins, as on a command line
            self.options[setting.name] = setting
        self.remaining = dict(self.options)

    def _settings(self) -> list[Setting]:
        """Return the parsed settings without secrets; empty text becomes None."""
        settings = []
        for setting in self.parsed.settings:
            if setting.value == "":
                setting = replace(setting, value=None)
            shown = to_yaml(setting.value)
            if loading.remove_secrets({setting.name: setting.value}, str) or redact(shown) != shown:
                reason = "secrets are not stored in files; use environment variables such as HF_TOKEN"
                self.unsupported.append(UnsupportedOption(setting.name, "[secret]", setting.where, reason))
            else:
                settings.append(setting)
        return settings

    def has(self, *names: str) -> bool:
        """Return True if the file has one of these options."""
        return any(name in self.options for name in names)

    def value(self, name: str) -> Any:
        """Return the value of an option in the file, or its default in this TRL version."""
        return self.options[name].value if name in self.options else OPTIONS[self.version][name].default

    def pop(self, name: str) -> Setting | None:
        """Remove an option from those still to be converted and return it; None if it is not among them."""
        return self.remaining.pop(name, None)

    def map(self, key: str, value: Any, setting: Setting, note: str = "") -> None:
        """Set a key from an option of the file, unless another option of the file has already set it."""
        value = coerce(key, value)
        previous = self.mapped.get(key)
        if not _can_be_written(value):
            self.reject(setting, "the value cannot be written to YAML")
        elif previous is None or not previous.from_file:
            self.mapped[key] = MappedOption(key, value, setting.shown, setting.value, note, where=setting.where)
        elif previous.value == value:
            self.skip(setting, f"already set by {previous.name}")
        else:
            self.reject(setting, f"already set by {previous.name}")

    def reject(self, setting: Setting, reason: str) -> None:
        """Record an option as unsupported."""
        self.unsupported.append(UnsupportedOption(setting.shown, setting.value, setting.where, reason))

    def reject_if_set(self, name: str, reason: str) -> None:
        """Record an option as unsupported, if the file has it."""
        if setting := self.pop(name):
            self.reject(setting, reason)

    def skip(self, setting: Setting, note: str) -> None:
        """Record an option for which nothing needs to be written."""
        self.skipped.append(MappedOption("", None, setting.shown, setting.value, note, where=setting.where))

    def map_remaining(self) -> None:
        """Map the remaining options by their names."""
        for setting in list(self.remaining.values()):
            self._by_name(setting)
        self.remaining.clear()
        for unparsed in self.parsed.unparsed:
            if (key := target_key(unparsed.name)) and key not in self.mapped:
                self.to_set[key] = f"set in {unparsed.where}: {unparsed.reason}"

    def _by_name(self, setting: Setting) -> None:
        name, value, option = setting.name, setting.value, OPTIONS[self.version].get(setting.name)
        key = target_key(name)
        if option and option.computed:
            self.reject(setting, f"TRL {self.version} computed it")
        elif is_no_op(name, value):
            self.skip(setting, "always the case here")
        elif key:
            ignored = f"takes effect here; TRL {self.version} ignored it"
            self.map(key, translate_value(name, value), setting, ignored if option and option.ignored else "")
        else:
            self.reject(setting, unsupported_reason(name))


def target_key(name: str) -> str | None:
    """Return the key with the meaning of a TRL option, as a dotted path; None if there is none."""
    last = ALIASES[name].key if name in ALIASES else name
    return next((section + last for section in SECTIONS if section + last in KEYS), None) if last else None


def translate_value(name: str, value: Any) -> Any:
    """Return the value of an option under its name here, e.g. of an enumerated word."""
    words = ALIASES[name].values if name in ALIASES else {}
    return parse_value(words[value]) if isinstance(value, str) and value in words else value


def unsupported_reason(name: str) -> str:
    """Return the reason why an option has no key."""
    if name in ALIASES and ALIASES[name].key is None:
        return ALIASES[name].note
    if name in trl_fields.OWNED or name.startswith(trl_fields.OWNED_FAMILIES):
        return "the pipeline sets it"
    if name in trl_fields.fields_of("sft"):
        return "a setting of transformers' Trainer, which PPO does not use"
    if name in ALIASES:
        return f"ppo.yaml has no {ALIASES[name].key}"
    near = closest_match(name, known_names(), cutoff=0.8)
    return "unknown, both here and in TRL" + (f"; did you mean {near}?" if near else "")


def known_names() -> set[str]:
    """Return all names that an option may have."""
    trl_names = {name for options in OPTIONS.values() for name in options}
    return trl_names | set(ALIASES) | {key.rpartition(".")[2] for key in KEYS}


def accepts_none(key: str) -> bool:
    """Return True if a key may be null."""
    return NoneType in _types(key)


def coerce(key: str, value: Any) -> Any:
    """Convert a value to the type of a key if it has the same meaning: 10000.0, "yes", a single list item."""
    types = _types(key)
    if bool in types and isinstance(value, str) and value.lower() in (*YES, *NO):
        return value.lower() in YES
    if int in types and float not in types and isinstance(value, float) and value.is_integer():
        return int(value)
    if types <= {str, NoneType} and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    words = {word for kind in types if get_origin(kind) is Literal for word in get_args(kind)}
    is_item = isinstance(value, str) and value not in words and any(get_origin(kind) is list for kind in types)
    return [value] if is_item else value


def _types(key: str) -> set[Any]:
    field_info = field_at(PPOConfig, tuple(key.split(".")))
    return set(filter(_is_type, flatten_annotation(field_info.annotation))) if field_info else set()


def _is_type(part: Any) -> bool:
    return isinstance(part, type) or get_origin(part) is not None


def _can_be_written(value: Any) -> bool:
    try:
        parsed = parse_value(to_yaml(value))
        return bool(parsed == value) and type(parsed) is type(value)
    except RLHFError:
        return False


def is_no_op(name: str, value: Any) -> bool:
    """Return True if an option at this value requests what this tool always does."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in NO_OP_VALUES.get(name, ()))


@dataclass(frozen=True)
class BatchSizes:
    """The three batch keys. Episodes per update: rows * parts; optimizer steps per epoch: minibatches."""

    rows: int  # per_device_train_batch_size
    parts: int  # gradient_accumulation_steps
    minibatches: int  # num_mini_batches

    @property
    def episodes(self) -> int:
        return self.rows * self.parts


def convert_old_sizes(
    batch_size: int, mini_batch_size: int, gradient_accumulation_steps: int
) -> tuple[BatchSizes, str]:
    """Convert the batch sizes of TRL 0.11; return them and a note.

    In TRL 0.11 an update has batch_size episodes, a forward pass mini_batch_size rows, and an optimizer step
    gradient_accumulation_steps forward passes (trl/trainer/ppo_trainer.py, `step`).
    """
    rows = gcd(batch_size, mini_batch_size)
    if batch_size % (mini_batch_size * gradient_accumulation_steps):
        wanted = f"{mini_batch_size} x {gradient_accumulation_steps}"
        return BatchSizes(rows, batch_size // rows, 1), f"TRL rejects this batch_size: it is not a multiple of {wanted}"
    steps = batch_size // (mini_batch_size * gradient_accumulation_steps)
    return BatchSizes(rows, batch_size // rows, steps), f"{batch_size} episodes per update, {_steps(steps)}, as in TRL"


def convert_new_sizes(rows: int, parts: int, minibatches: int, *, grown: bool) -> tuple[BatchSizes, str]:
    """Convert the batch sizes of TRL 1.12, with `grown` those of TRL before 0.17; return them and a note.

    Before 0.17 an update had per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches episodes.
    Since then num_mini_batches splits them, and accelerate takes a step every gradient_accumulation_steps forward
    passes. Here num_mini_batches is the number of optimizer steps per epoch.
    """
    if grown:
        sizes = BatchSizes(rows, parts * minibatches, minibatches)
        return sizes, f"{sizes.episodes} episodes per update, {_steps(minibatches)}, as in TRL before 0.17"
    sizes = BatchSizes(rows, parts, minibatches)
    trl_steps = trl_optimizer_steps(parts, minibatches)
    if trl_steps == minibatches:
        return sizes, f"{sizes.episodes} episodes per update, {_steps(minibatches)}, as in TRL"
    note = f"{_steps(minibatches)} here; {float(trl_steps):.3g} in TRL since 0.17"
    if trl_steps.denominator == 1 and sizes.episodes % trl_steps == 0:
        note += f" (for that: num_mini_batches: {trl_steps})"
    return sizes, f"{note}; before 0.17 an update had {minibatches} times the episodes"


def trl_optimizer_steps(parts: int, minibatches: int) -> Fraction:
    """Return the optimizer steps per epoch in TRL 1.12: forward passes / gradient_accumulation_steps.

    A minibatch takes parts / minibatches forward passes, rounded up.
    """
    return Fraction(minibatches * ceil(Fraction(parts, minibatches)), parts)


def _steps(count: int) -> str:
    return f"{count} optimizer step{'s' if count > 1 else ''} per epoch"
