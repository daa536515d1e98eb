"""Map one TRL option to a key of ppo.yaml: by its name, or by the name that replaces it. trl.yaml lists the options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from rlhf_cli.commands.convert.read import Setting, TRLSettings
from rlhf_cli.config.machinery import trl_fields, yaml_io
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.machinery.fields import key_at, keys_of
from rlhf_cli.config.machinery.secret_values import remove_secrets
from rlhf_cli.config.machinery.yaml_io import parse_value, to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RLHFError, closest_match, redact

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

    def __init__(self, source: TRLSettings, version: str) -> None:
        self.source, self.version = source, version
        self.options: dict[str, Setting] = {}  # not converted yet
        self.rows: dict[str, Row] = {}  # by key
        self.unconverted: list[Row] = []  # with the reason as note
        self.to_set: dict[str, str] = {}  # keys that the user has to set, with a note
        for setting in source.settings:
            shown = to_yaml(setting.value)
            if remove_secrets({setting.name: setting.value}, str) or redact(shown) != shown:
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


def detect_version(source: TRLSettings) -> tuple[str, str]:
    """Return the TRL version of a file, and the reason."""
    of_old = _names_only_of(OLD, NEW, source)
    of_new = _names_only_of(NEW, OLD, source)
    if len(of_old) > len(of_new):
        version, evidence, contrary = OLD, of_old, of_new
    else:
        version, evidence, contrary = NEW, of_new, of_old

    if not evidence:
        return version, "no option is specific to a version; use --trl 0.11 for the older one"
    reason = f"only that version has {', '.join(evidence[:3])}"
    if contrary:
        reason += f"; only the other has {', '.join(contrary[:3])}: check, or set --trl"
    return version, reason


def _names_only_of(version: str, other: str, source: TRLSettings) -> list[str]:
    """Return the classes and options of a file that only this version of TRL has, not the other one."""
    names = dict.fromkeys([*sorted(source.classes), *(setting.name for setting in source.settings)])
    known = {*VERSIONS[version]["options"], *VERSIONS[version]["names"]} - set(OPTIONS[other])
    return [name for name in names if name in known]


def target_key(name: str) -> str | None:
    """Return the key with the meaning of a TRL option, as a dotted path; None if there is none."""
    last = ALIASES[name].key if name in ALIASES else name
    if last is None:
        return None
    candidates = [section + last for section in SECTIONS]
    return next((key for key in candidates if key in KEYS), None)


def map_option(conversion: Conversion, setting: Setting) -> None:
    """Set the key of an option, or record why it has none."""
    name = setting.name
    version = conversion.version
    if name in VERSIONS[version]["computed"]:
        conversion.leave(setting, f"TRL {version} computed it")
        return
    key = target_key(name)
    if key is None:
        conversion.leave(setting, _unsupported_reason(name))
        return

    value = setting.value
    words = ALIASES[name].values if name in ALIASES else {}
    if isinstance(value, str) and value in words:
        value = parse_value(words[value])
    note = f"takes effect here; TRL {version} ignored it" if name in VERSIONS[version]["ignored"] else ""
    conversion.set(key, setting, value, note)


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
    takes_list = any(get_origin(kind) is list for kind in types)
    is_choice = any(get_origin(kind) is Literal and value in get_args(kind) for kind in types)
    return [value] if isinstance(value, str) and takes_list and not is_choice else value


def _can_be_written(value: Any) -> bool:
    try:
        parsed = parse_value(to_yaml(value))
        return bool(parsed == value) and type(parsed) is type(value)
    except RLHFError:
        return False
