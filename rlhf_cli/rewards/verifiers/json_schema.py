"""Verifier `json_schema`: the response is JSON of a given form."""

from contextlib import suppress
from typing import Any

import orjson

from rlhf_cli.rewards.answers import Column, by_column, last_code_block, pattern_time_limit
from rlhf_cli.rewards.signature import RewardFn


def json_schema(*, schema: dict[str, Any] | None = None, column: Column | None = None) -> RewardFn:
    """Return 1 if the response, or its last block fenced as JSON, is JSON that a JSON Schema allows; else 0.

    The schema is the same for all rows, or that of the row in `column`, as an object or as text. Without `$schema` it
    is of draft 2020-12. References to other documents are refused. Raises ModuleNotFoundError without jsonschema.
    """
    import jsonschema
    import referencing.jsonschema

    if (schema is None) == (column is None):
        raise ValueError("give schema or column, not both")

    def validator(schema: Any) -> Any:
        schema = orjson.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a schema must be an object, true or false, not {schema!r:.60}")
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"not a JSON Schema: {error.message}") from None
        root = referencing.Resource.from_contents(schema, referencing.jsonschema.DRAFT202012)
        _check_references(root, referencing.Registry().resolver_with_root(root))
        return kind(schema, registry=referencing.Registry())

    def score(response: str, allowed: Any) -> float:
        try:
            value = orjson.loads(last_code_block(response, "json"))
        except ValueError:
            return 0.0
        with pattern_time_limit("of the schema", response), suppress(RecursionError):
            return float(allowed.is_valid(value))
        return 0.0

    if schema is None:
        assert column is not None
        return by_column(column, lambda response, row: score(response, validator(row)))
    allowed = validator(schema)
    return lambda prompts, responses: [score(response, allowed) for response in responses]


def _check_references(resource: Any, resolver: Any) -> None:
    """Look up the references of a schema and its parts. Raises ValueError for one that is not in the schema."""
    from referencing.exceptions import Unresolvable

    resolver = resolver.in_subresource(resource)
    contents = resource.contents
    reference = (contents.get("$ref") or contents.get("$dynamicRef")) if isinstance(contents, dict) else None
    try:
        if reference is not None:
            resolver.lookup(reference)
    except Unresolvable:
        raise ValueError(f"the schema does not contain its reference {reference!r:.60}") from None
    for each in resource.subresources():
        _check_references(each, resolver)
