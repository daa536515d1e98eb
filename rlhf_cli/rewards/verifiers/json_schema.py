"""Verifier `json_schema`: the response is JSON of a given form."""

from typing import Any

import orjson

from rlhf_cli.rewards.signature import RewardFn
from rlhf_cli.rewards.verifiers import Column, by_column, last_code_block, pattern_time_limit


def json_schema(*, schema: dict[str, Any] | None = None, column: Column | None = None) -> RewardFn:
    """Return 1 if the response, or its last block fenced as JSON, is JSON that a JSON Schema allows; else 0.

    The schema is the same for all rows, or that of the row in `column`, as an object or as text. Without `$schema` it
    is of draft 2020-12. References to other documents are not followed. Raises ModuleNotFoundError without jsonschema.
    """
    import jsonschema
    import referencing

    if (schema is None) == (column is None):
        raise ValueError("give schema or column")

    def validator(schema: Any) -> Any:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema: {error.message}") from None
        return kind(schema, registry=referencing.Registry())

    def score(response: str, allowed: Any) -> float:
        try:
            value = orjson.loads(last_code_block(response, "json"))
        except ValueError:
            return 0.0
        with pattern_time_limit("of the schema", response):
            return float(allowed.is_valid(value))

    if schema is None:
        assert column is not None
        return by_column(column, lambda response, row: score(response, validator(_read(row))))
    allowed = validator(schema)
    return lambda prompts, responses: [score(response, allowed) for response in responses]


def _read(schema: Any) -> Any:
    return orjson.loads(schema) if isinstance(schema, str) else schema
