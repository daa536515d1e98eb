"""RLHF from the command line: supervised fine-tuning, reward model, PPO and evaluation."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def import_on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package; `modules` has the names that each module below rlhf_cli provides."""
    module_of: dict[str, str] = {}
    for module, names in modules.items():
        module_of |= dict.fromkeys(names.split(), module)

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"rlhf_cli.{module_of[name]}"), name)

    return import_name
