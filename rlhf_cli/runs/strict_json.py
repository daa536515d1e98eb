"""A JSON object of a run's folder as a frozen model, and what is wrong with one that does not fit."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Bounds = Annotated[list[float], Field(min_length=2, max_length=2)]  # of a 95 % interval
Interval = Bounds | None
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(gt=0)]


class StrictModel(BaseModel):
    """A JSON object, in whose place no other types and no infinite numbers are accepted; unknown keys are kept."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with other values of some attributes."""
        return self.model_copy(update=changes)

    def to_json(self, include: set[str] | None = None, exclude: set[str] | None = None) -> dict[str, Any]:
        """Return the JSON object; attributes that are None are absent."""
        return self.model_dump(mode="json", include=include, exclude=exclude, exclude_none=True)


def describe_problem(file_name: str, error: ValidationError) -> str:
    """Return the first problem of a file as text: `report.json: n: input should be a valid integer`."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"]
    return f"{file_name}: {place}: {message[:1].lower()}{message[1:]}"
