"""Check the JSON Schemas that clients send. Engines decide which keywords they support."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import orjson
from pydantic import BeforeValidator, Field

from dynamo_trtllm.frontend.api.request_model import (
    LongText,
    check_size,
    invalid,
    kind_of,
    quoted,
    truncated,
)

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 48
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties")  # name -> schema
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
# (place of the enclosing schema, keys from there); (): the root schema
_Place: TypeAlias = tuple[Any, ...]
_ONES: Final = ("items", "additionalProperties", "not", "contains", "propertyNames")


def check_schema(value: Any) -> Any:
    """Check a schema and return it unchanged.

    A malformed schema is rejected with the place of the error.
    """
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    check_size(value, MAX_SCHEMA_BYTES)
    _check(value, (), 0)
    return value


Schema = Annotated[
    dict[LongText, Any],
    Field(
        max_length=MAX_SCHEMA_BYTES,
        description=f"At most {MAX_SCHEMA_BYTES} bytes of JSON, {MAX_DEPTH} levels.",
    ),
    BeforeValidator(check_schema),
]


def schema_text(schema: dict[str, Any]) -> str:
    """Return the schema as JSON text for an engine. For an engine, `{}` means any object."""
    return orjson.dumps(schema).decode()


def _check(schema: Any, where: _Place, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        invalid(f"must hold a schema at {_pointer(where) or '/'}, not {kind_of(schema)}")
    if depth > MAX_DEPTH:
        invalid(f"is nested deeper than {MAX_DEPTH} schemas")
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not (
        kinds and all(isinstance(name, str) and name in _TYPES for name in kinds)
    ):
        invalid(
            f"must have one of {', '.join(sorted(_TYPES))} at {_pointer(where)}/type, not"
            f" {quoted(kind)}"
        )
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        invalid(f"must have a list of values at {_pointer(where)}/enum")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        invalid(f"must have a list of names at {_pointer(where)}/required")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        invalid(f"may only refer to itself (#/…) at {_pointer(where)}/$ref")
    for name in _MAPS:
        members = schema.get(name, {})
        if not isinstance(members, dict):
            invalid(f"must have an object at {_pointer(where)}/{name}, not {kind_of(members)}")
        for key, member in members.items():
            _check(member, (where, name, key), depth + 1)
    for name in _LISTS:
        members = schema.get(name, [])
        if not isinstance(members, list):
            invalid(f"must have a list at {_pointer(where)}/{name}, not {kind_of(members)}")
        for index, member in enumerate(members):
            _check(member, (where, name, index), depth + 1)
    for name in _ONES:
        # "items" was a list in old drafts
        if name in schema and not isinstance(schema[name], list):
            _check(schema[name], (where, name), depth + 1)


def _pointer(where: _Place) -> str:
    """Return the path of a place.

    It is built only for errors, because all paths together exceed the schema's size.
    """
    steps: list[str] = []
    while where:
        steps[:0] = [truncated(str(step)) for step in where[1:]]
        where = where[0]
    return "".join(f"/{step}" for step in steps)
