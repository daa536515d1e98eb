"""Map one TRL option to a key of ppo.yaml: by its name, or by the name that replaces it. trl.yaml lists the options."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.commands.convert.read import TRLSettings
from rlhf_cli.config.machinery import yaml_io
from rlhf_cli.config.machinery.aliases import ALIASES
from rlhf_cli.config.machinery.fields import keys_of
from rlhf_cli.config.machinery.secret_values import remove_secrets
from rlhf_cli.config.machinery.yaml_io import parse_value, to_yaml
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import redact

OLD, NEW = "0.11", "1.12"
VERSIONS = yaml_io.read(Path(__file__).with_name("trl.yaml")).tree
OPTIONS: dict[str, list[str]] = {version: VERSIONS[version]["options"] for version in (OLD, NEW)}
ONLY_OF = {
    OLD: {*OPTIONS[OLD], *VERSIONS[OLD]["names"]} - {*OPTIONS[NEW]},
    NEW: {*OPTIONS[NEW], *VERSIONS[NEW]["names"]} - {*OPTIONS[OLD]},
}
# Sections searched, in this order, for the key of an option.
SECTIONS = ("ppo.", "models.adapters.", "models.", "output.", "data.", "")
ALL_KEYS = keys_of(PPOConfig)
KEYS = {path for path, key in ALL_KEYS.items() if not key.is_section}
KEYS -= {"stage", "run", "rewards", "ppo.recipe"}
PATHS = ("models.sft", "models.reward", "models.value", "rewards.classifier.pipeline")
LISTS = ("output.report_to", "models.adapters.target_modules")


@dataclass(frozen=True)
class Row:
    """The value of a key of ppo.yaml, and the option of TRL that sets it; without one it is a default."""

    option: str
    trl_value: Any
    value: Any
    note: str = ""


def _takes_only_whole_numbers(key: str) -> bool:
    """Return True for a key whose number, if it is one, is an int: YAML and JSON often have 1e4 for it."""
    types = ALL_KEYS[key].parts if key in ALL_KEYS else ()
    return int in types and float not in types


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

    def set(self, key: str, option: str, value: Any = None, note: str = "") -> None:
        """Set a key to `value`, or to that of an option of the file, unless another option has already set it."""
        trl_value = self.source.options[option]
        value = trl_value if value is None else value
        if key in PATHS:
            value = local_path(value)
        if isinstance(value, float) and value.is_integer() and _takes_only_whole_numbers(key):
            value = int(value)
        if key in LISTS and isinstance(value, str) and value != "all-linear":
            value = [value]
        if key in self.rows:
            self.leave(option, f"already set by {self.rows[key].option}")
        else:
            self.options.pop(option, None)
            self.rows[key] = Row(option, trl_value, value, note)

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


def detect_version(source: TRLSettings) -> tuple[str, str]:
    """Return the TRL version of a file, and the reason."""
    names = [*sorted(source.classes), *source.options, *source.unread]
    evidence = {version: [name for name in names if name in only] for version, only in ONLY_OF.items()}
    version, other = (OLD, NEW) if len(evidence[OLD]) > len(evidence[NEW]) else (NEW, OLD)
    if not evidence[version]:
        return version, "no option is specific to a version; use --trl 0.11 for the older one"

    reason = f"only that version has {', '.join(evidence[version][:3])}"
    if evidence[other]:
        reason += f"; only the other has {', '.join(evidence[other][:3])}: check, or set --trl"
    return version, reason


def local_path(value: Any) -> Any:
    """Return a relative path as an absolute one: it starts at the working directory in TRL, at ppo.yaml here."""
    is_path = isinstance(value, str) and (value.startswith(("./", "../")) or os.path.exists(value))
    return os.path.abspath(value) if is_path else value


def target_key(name: str) -> str | None:
    """Return the key with the meaning of a TRL option, as a dotted path; None if there is none."""
    last = ALIASES[name].key if name in ALIASES else name
    candidates = [f"{section}{last}" for section in SECTIONS]
    return next((key for key in candidates if key in KEYS), None)
