"""JSON Schemas that clients send: the check that one is worth an engine's time. Which keywords work is the engine's."""

from __future__ import annotations

from typing import Annotated, Any, Final

import orjson
from pydantic import BeforeValidator

from dynamo_trtllm.openai.wire import invalid, kind_of

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 48
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties")  # name -> schema
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties", "not", "contains", "propertyNames")


def check_schema(value: Any) -> Any:
    """The schema as it was. Refuses what no engine can make sense of, with the place in the schema."""
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    try:
        size = len(orjson.dumps(value))
    except (orjson.JSONEncodeError, RecursionError):
        invalid("is nested too deeply")
    if size > MAX_SCHEMA_BYTES:
        invalid(f"may have {MAX_SCHEMA_BYTES} bytes at most, not {size}")
    _check(value, "", 0)
    return value


Schema = Annotated[dict[str, Any], BeforeValidator(check_schema)]


def schema_text(schema: dict[str, Any]) -> str:
    """As engines take it; `{}` means any object there."""
    return orjson.dumps(schema).decode()


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        invalid(f"must hold a schema at {where or '/'}, not {kind_of(schema)}")
    if depth > MAX_DEPTH:
        invalid(f"is nested deeper than {MAX_DEPTH} schemas")
    _check_type(schema.get("type"), where)
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        invalid(f"must have a list of values at {where}/enum")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        invalid(f"must have a list of names at {where}/required")
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and reference.startswith("#")):
        invalid(f"may only refer to itself (#/…) at {where}/$ref")
    for name in _MAPS:
        members = schema.get(name, {})
        if not isinstance(members, dict):
            invalid(f"must have an object at {where}/{name}, not {kind_of(members)}")
        for key, member in members.items():
            _check(member, f"{where}/{name}/{key}", depth + 1)
    for name in _LISTS:
        members = schema.get(name, [])
        if not isinstance(members, list):
            invalid(f"must have a list at {where}/{name}, not {kind_of(members)}")
        for at, member in enumerate(members):
            _check(member, f"{where}/{name}/{at}", depth + 1)
    for name in _ONES:
        if name in schema and not isinstance(schema[name], list):  # "items" was a list in old drafts
            _check(schema[name], f"{where}/{name}", depth + 1)


def _check_type(kind: Any, where: str) -> None:
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not (kinds and all(isinstance(each, str) and each in _TYPES for each in kinds)):
        invalid(f"must have one of {', '.join(sorted(_TYPES))} at {where}/type, not {kind!r}")
