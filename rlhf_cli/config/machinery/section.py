"""The strict section that all schemas are made of, its numbers, its errors, and where each key was written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Returns the location of a key, for messages.
Where = Callable[[str], str]

# Bounded numbers, beside pydantic's PositiveInt, NonNegativeFloat and the like.
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]
AboveOne = Annotated[float, Field(gt=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
InsideUnitInterval = Annotated[float, Field(gt=0, lt=1)]


def invalid(text: str, hint: str | None = None, key: str = "", code: str = "C17") -> PydanticCustomError:
    """Return the error that a validator raises; `key` is the key to locate, below the section of the validator."""
    return PydanticCustomError(code, "{text}", {"text": text, "hint": hint, "key": key})


class Section(BaseModel):
    """Strict, frozen section: rejects unknown keys, strings or booleans for numbers, nan and inf."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def is_default(self, key: str) -> bool:
        """Return True if a key has its default value."""
        field = type(self).model_fields[key]
        return bool(getattr(self, key) == field.get_default(call_default_factory=True))


@dataclass(frozen=True)
class Origin:
    """Origin of a config. `name` is the file as the user wrote it, `overrides` the keys set by --set."""

    file: Path
    name: str
    lines: dict[str, int] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """Return the location of `key`, of the nearest enclosing section in the file, or the file name."""
        while key:
            if key in self.overrides:
                return f"--set {key}"
            if key in self.lines:
                return f"{self.name}:{self.lines[key]}"
            key = key.rpartition(".")[0]
        return self.name

    def overridden(self, key: str) -> bool:
        """Return True if the value of `key` was set by --set."""
        return any(key == override or key.startswith(f"{override}.") for override in self.overrides)
