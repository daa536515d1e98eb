"""Options of TRL's on their way into a ppo.yaml: what has a place under one name or another, and what has none."""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, gcd
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rlhf_cli.commands.convert.versions import OPTIONS, Read, Setting
from rlhf_cli.config import loading, trl_fields
from rlhf_cli.config.aliases import ALIASES
from rlhf_cli.config.paths import field_at, field_kind, flatten_annotation, keys_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.yaml_io import parse_value, to_yaml
from rlhf_cli.errors import RLHFError, closest_match, redact

# Our keys that an option may mean; those of the first section that has one.
SECTIONS = ("ppo.", "models.adapters.", "models.", "output.", "data.", "")
KEYS = {key for key, known in keys_of(PPOConfig).items() if field_kind(known).model is not known.annotation}
KEYS -= {"stage", "run", "rewards"}
# Values at which an option asks for what is always so here.
OFF: dict[str, tuple[Any, ...]] = {
    "top_k": (0,), "top_p": (1,), "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,), "num_beams": (1,),
    "min_length": (-1, 0), "min_new_tokens": (-1, 0), "do_sample": (True,), "use_peft": (False,), "fp16": (False,),
    "is_peft_model": (False,), "load_in_8bit": (False,), "load_in_4bit": (False,), "is_encoder_decoder": (False,),
    "trust_remote_code": (False,), "push_to_hub": (False,), "report_to": ("none", []), "model_revision": ("main",),
    "warmup_ratio": (0,), "warmup_steps": (0,), "fsdp": ("", [], False), "push_to_hub_if_best_kwargs": ({},),
    "tracker_kwargs": ({},), "project_kwargs": ({},), "accelerator_kwargs": ({},),
}  # fmt: skip
YES, NO = ("yes", "y", "t", "1"), ("no", "n", "f", "0")  # what transformers' parser takes for true and false, too


@dataclass(frozen=True)
class Placed:
    """A key of ppo.yaml, its value, and what both were there; "" as the key: there is nothing to write."""

    key: str
    value: Any
    name: str
    was: Any
    note: str = ""
    given: bool = True  # by the file; else it is TRL's own value
    where: str = ""  # FILE:LINE; "" where the file left it out


@dataclass(frozen=True)
class Unplaced:
    """An option without a place, and why it has none."""

    name: str
    value: Any
    where: str
    why: str


@dataclass
class Placing:
    """The options of one file: those that are still to be placed, and what has become of the others."""

    version: str
    read: Read
    given: dict[str, Setting] = field(default_factory=dict)
    left: dict[str, Setting] = field(default_factory=dict)
    placed: dict[str, Placed] = field(default_factory=dict)  # by key
    nothing: list[Placed] = field(default_factory=list)
    unplaced: list[Unplaced] = field(default_factory=list)
    to_say: dict[str, str] = field(default_factory=dict)  # keys that the file leaves to the user, and what they are
    unfilled: set[str] = field(default_factory=set)  # keys that are not to have TRL's own value either
    processes: Any = None

    def __post_init__(self) -> None:
        for setting in self._settings():
            if setting.value is None:
                self.done(setting, "nothing is set there")
                continue
            before = self.given.get(setting.name)
            if before and before.value != setting.value:
                self.refuse(before, f"{setting.where} says it again")  # the last one counts, as on a command line
            self.given[setting.name] = setting
        self.left = dict(self.given)

    def _settings(self) -> list[Setting]:
        """What was read, without secrets; an empty text is nothing."""
        kept = []
        for setting in self.read.settings:
            if setting.value == "":
                setting = replace(setting, value=None)
            shown = to_yaml(setting.value)
            if loading.remove_secrets({setting.name: setting.value}, str) or redact(shown) != shown:
                why = "a secret has no place in a file; the environment has, such as HF_TOKEN"
                self.unplaced.append(Unplaced(setting.name, "[secret]", setting.where, why))
            else:
                kept.append(setting)
        return kept

    def has(self, *names: str) -> bool:
        """Whether the file has one of these options."""
        return any(name in self.given for name in names)

    def value(self, name: str) -> Any:
        """What an option of this TRL is: the file's value, else its default."""
        return self.given[name].value if name in self.given else OPTIONS[self.version][name].default

    def take(self, name: str) -> Setting | None:
        """An option that is still to be placed, which then is not any more."""
        return self.left.pop(name, None)

    def put(self, key: str, value: Any, setting: Setting, note: str = "") -> None:
        """A key for an option that the file has. A key that the file has given a value already keeps it."""
        value = fitting(key, value)
        before = self.placed.get(key)
        if not _can_be_written(value):
            self.refuse(setting, "no value that a YAML here can hold")
        elif before is None or not before.given:
            self.placed[key] = Placed(key, value, setting.shown, setting.value, note, where=setting.where)
        elif before.value == value:
            self.done(setting, f"{before.name} says it")
        else:
            self.refuse(setting, f"{before.name} says it")

    def refuse(self, setting: Setting, why: str) -> None:
        """An option that has no place."""
        self.unplaced.append(Unplaced(setting.shown, setting.value, setting.where, why))

    def leave(self, name: str, why: str) -> None:
        """An option that has no place, where the file has it."""
        if setting := self.take(name):
            self.refuse(setting, why)

    def done(self, setting: Setting, note: str) -> None:
        """An option for which nothing needs to be to_yaml."""
        self.nothing.append(Placed("", None, setting.shown, setting.value, note, where=setting.where))

    def rest(self) -> None:
        """All that is still to be placed, each option by its name alone."""
        for setting in list(self.left.values()):
            self._by_name(setting)
        self.left.clear()
        for lost in self.read.unread:
            if (key := home(lost.what)) and key not in self.placed:
                self.to_say[key] = f"{lost.where} has it: {lost.why}"

    def _by_name(self, setting: Setting) -> None:
        name, value, option = setting.name, setting.value, OPTIONS[self.version].get(setting.name)
        key = home(name)
        if option and option.computed:
            self.refuse(setting, f"TRL {self.version} computed it by itself")
        elif is_off(name, value):
            self.done(setting, "it is always so here")
        elif key:
            ignored = f"takes effect here; TRL {self.version} accepted it, without effect"
            self.put(key, in_our_words(name, value), setting, ignored if option and option.ignored else "")
        else:
            self.refuse(setting, why_not(name))


def home(name: str) -> str | None:
    """Our key for an option of theirs that means the same, as a path from the top of the file."""
    last = ALIASES[name].key if name in ALIASES else name
    return next((section + last for section in SECTIONS if section + last in KEYS), None) if last else None


def in_our_words(name: str, value: Any) -> Any:
    """The value of an option, where it is a word that has another name here."""
    words = ALIASES[name].values if name in ALIASES else {}
    return parse_value(words[value]) if isinstance(value, str) and value in words else value


def why_not(name: str) -> str:
    """Why an option has no key here."""
    if name in ALIASES and ALIASES[name].key is None:
        return ALIASES[name].note
    if name in trl_fields.OWNED or name.startswith(trl_fields.OWNED_FAMILIES):
        return "the pipeline sets it"
    if name in trl_fields.fields_of("sft"):
        return "PPO does not use transformers' Trainer, whose setting it is"
    if name in ALIASES:
        return f"ppo.yaml has no {ALIASES[name].key}"
    near = closest_match(name, known(), cutoff=0.8)
    return "unknown, here and in TRL" + (f"; did you mean {near}?" if near else "")


def known() -> set[str]:
    """Every name that an option may have."""
    theirs = {name for options in OPTIONS.values() for name in options}
    return theirs | set(ALIASES) | {key.rpartition(".")[2] for key in KEYS}


def takes_none(key: str) -> bool:
    """Whether a key may be null."""
    return NoneType in _types(key)


def fitting(key: str, value: Any) -> Any:
    """The value as our key has it, where it says the same in another type: 10000.0, "yes", a list's only entry."""
    types = _types(key)
    if bool in types and isinstance(value, str) and value.lower() in (*YES, *NO):
        return value.lower() in YES
    if int in types and float not in types and isinstance(value, float) and value.is_integer():
        return int(value)
    if types <= {str, NoneType} and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    words = {word for each in types if get_origin(each) is Literal for word in get_args(each)}
    in_list = isinstance(value, str) and value not in words and any(get_origin(each) is list for each in types)
    return [value] if in_list else value


def _types(key: str) -> set[Any]:
    ours = field_at(PPOConfig, tuple(key.split(".")))
    return set(filter(_is_type, flatten_annotation(ours.annotation))) if ours else set()


def _is_type(part: Any) -> bool:
    return isinstance(part, type) or get_origin(part) is not None


def _can_be_written(value: Any) -> bool:
    try:
        back = parse_value(to_yaml(value))
        return bool(back == value) and type(back) is type(value)
    except RLHFError:
        return False


def is_off(name: str, value: Any) -> bool:
    """Whether an option at this value asks for what is always so here."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF.get(name, ()))


@dataclass(frozen=True)
class Sizes:
    """Our three keys. Episodes of an update = rows x parts; optimizer steps of an epoch = minibatches."""

    rows: int  # per_device_train_batch_size
    parts: int  # gradient_accumulation_steps
    minibatches: int  # num_mini_batches

    @property
    def episodes(self) -> int:
        return self.rows * self.parts


def of_old(batch_size: int, mini_batch_size: int, gradient_accumulation_steps: int) -> tuple[Sizes, str]:
    """TRL 0.11's sizes in ours, and what there is to say.

    There an update has batch_size episodes, a forward pass mini_batch_size rows, and an optimizer step
    gradient_accumulation_steps such passes (trl/trainer/ppo_trainer.py, `step`).
    """
    rows = gcd(batch_size, mini_batch_size)
    if batch_size % (mini_batch_size * gradient_accumulation_steps):
        wanted = f"{mini_batch_size} x {gradient_accumulation_steps}"
        return Sizes(rows, batch_size // rows, 1), f"TRL refuses this batch_size: it is no multiple of {wanted}"
    steps = batch_size // (mini_batch_size * gradient_accumulation_steps)
    return Sizes(rows, batch_size // rows, steps), f"{batch_size} episodes an update, {_steps(steps)}, as there"


def of_new(rows: int, parts: int, minibatches: int, *, grown: bool) -> tuple[Sizes, str]:
    """TRL 1.12's sizes in ours, and what there is to say; `grown`: those of TRL before 0.17.

    Before 0.17 an update had per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches episodes.
    Since then num_mini_batches cuts them up, and accelerate still steps once in gradient_accumulation_steps
    forward passes: as asked here, num_mini_batches makes so many steps an epoch.
    """
    if grown:
        sizes = Sizes(rows, parts * minibatches, minibatches)
        return sizes, f"{sizes.episodes} episodes an update, {_steps(minibatches)}, as in TRL before 0.17"
    sizes = Sizes(rows, parts, minibatches)
    made = steps_made(parts, minibatches)
    if made == minibatches:
        return sizes, f"{sizes.episodes} episodes an update, {_steps(minibatches)}, as there"
    told = f"{_steps(minibatches)} here; TRL since 0.17 made {float(made):.3g}"
    if made.denominator == 1 and sizes.episodes % made == 0:
        told += f" (for that: num_mini_batches: {made})"
    return sizes, f"{told}, and before, an update had {minibatches} times the episodes"


def steps_made(parts: int, minibatches: int) -> Fraction:
    """Optimizer steps that an epoch made in TRL 1.12: forward passes / gradient_accumulation_steps.

    A minibatch of parts / minibatches x per_device_train_batch_size rows takes as many passes, rounded up.
    """
    return Fraction(minibatches * ceil(Fraction(parts, minibatches)), parts)


def _steps(count: int) -> str:
    return f"{count} optimizer step{'s' if count > 1 else ''} an epoch"
