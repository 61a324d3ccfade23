"""Check the JSON Schemas that clients send. Engines decide which keywords they support."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias

import orjson
from pydantic import BeforeValidator, Field, ValidationInfo

from dynamo_trtllm.frontend.api.request_model import (
    LongText,
    check_size,
    invalid,
    kind_of,
    quoted,
    truncated,
)
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 48
# The name under which parts that were left out of tools' schemas are reported as ignored fields.
MALFORMED: Final = "tools.malformed_schema"
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
# Keywords that hold schemas by name, a list of schemas, or one schema.
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "not", "contains", "propertyNames")
# Keywords whose values are not schemas.
_DATA: Final = ("enum", "const", "default", "examples")
# The place of a schema: first the place of the schema around it, then the keys that lead from there
# to the schema. (): the schema is the root.
_Place: TypeAlias = tuple[Any, ...]


def check_schema(value: Any) -> Any:
    """Check a schema and return it unchanged.

    A malformed schema is rejected with the place of the error.
    """
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    check_size(value, MAX_SCHEMA_BYTES)
    _check(value, (), 0)
    return value


def check_tool_schema(value: Any, info: ValidationInfo) -> Any:
    """Check the schema of a tool, whose model has a field `strict` before it.

    Without `strict`, the schema is only a hint for the model. Generators of tools write nulls,
    empty enumerations and types that JSON Schema does not have. Such malformed parts are left out
    and reported like unknown fields. Otherwise, all requests with such a tool would be rejected.

    Returns:
        A copy of the schema without its malformed parts; with `strict`, the schema itself.
    """
    ignored: IgnoredFields | None = info.context
    # Where unknown fields are rejected, malformed parts are, too.
    if ignored is None or info.data.get("strict") or not isinstance(value, dict):
        return check_schema(value)
    check_size(value, MAX_SCHEMA_BYTES)
    kept = _without_malformed(value, 0)
    if kept != value:
        ignored.add((MALFORMED,))
    return kept


def _without_malformed(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return a copy of a schema without the keywords that `_check` would reject."""
    if depth > MAX_DEPTH:
        invalid(f"is nested deeper than {MAX_DEPTH} schemas")
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS:
            if isinstance(value, dict):
                kept[name] = {
                    key: _subschema(member, depth)
                    for key, member in value.items()
                    if isinstance(member, dict | bool)
                }
        elif name in _LISTS:
            members = value if isinstance(value, list) else []
            schemas = [_subschema(one, depth) for one in members if isinstance(one, dict | bool)]
            if schemas:
                kept[name] = schemas
        elif name in _SINGLES:
            # In old drafts, `items` may be a list. Its schemas are not checked.
            if isinstance(value, dict | bool):
                kept[name] = _subschema(value, depth)
            elif isinstance(value, list):
                kept[name] = value
        elif name not in _CHECKED or _CHECKED[name](value):
            kept[name] = value
    return kept


def _subschema(value: Any, depth: int) -> Any:
    return value if isinstance(value, bool) else _without_malformed(value, depth + 1)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_enumeration(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_own_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("#")


# The keywords whose values are checked, each with a function that returns whether a value is valid.
_CHECKED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": _is_type,
    "enum": _is_enumeration,
    "required": _is_list_of_names,
    "$ref": _is_own_reference,
}


Schema = Annotated[
    dict[LongText, Any],
    Field(
        max_length=MAX_SCHEMA_BYTES,
        description=f"At most {MAX_SCHEMA_BYTES} bytes of JSON, {MAX_DEPTH} levels.",
    ),
    BeforeValidator(check_schema),
]


ToolSchema = Annotated[
    dict[LongText, Any],
    Field(
        max_length=MAX_SCHEMA_BYTES,
        description=f"At most {MAX_SCHEMA_BYTES} bytes of JSON, {MAX_DEPTH} levels. Malformed parts"
        " are left out unless the tool is strict.",
    ),
    BeforeValidator(check_tool_schema),
]


def call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call as an object with name and arguments.

    Args:
        name: the name of the function.
        parameters: the schema of its arguments, as `check_schema` accepts it.
    """
    properties = {
        "name": {"const": name},
        "arguments": _nested(parameters, "#/properties/arguments"),
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _nested(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a copy of a schema for a place within another schema.

    References begin at the root, which is then the other schema. So the place is put in front of
    the schema's references to itself.
    """
    # Below `$id`, references would not begin at the root, so it is left out.
    return {name: _moved(name, value, place) for name, value in schema.items() if name != "$id"}


def _moved(name: str, value: Any, place: str) -> Any:
    """Return the value of a keyword of a schema, with its references moved."""
    if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    if name in _DATA:
        return value
    if isinstance(value, list):
        return [_moved("", member, place) for member in value]
    # References in a schema with its own `$id` begin at that schema, so they stay.
    if not isinstance(value, dict) or "$id" in value:
        return value
    if name in _MAPS:
        # The names are not keywords, so a property may be named "$ref".
        return {key: _moved("", member, place) for key, member in value.items()}
    return {key: _moved(key, member, place) for key, member in value.items()}


def schema_text(schema: dict[str, Any]) -> str:
    """Return the schema as JSON text for an engine. For an engine, `{}` means any object."""
    return orjson.dumps(schema).decode()


def _check(schema: Any, where: _Place, depth: int) -> None:
    """Reject a schema that is malformed at any depth."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        invalid(f"must hold a schema at {_pointer(where) or '/'}, not {kind_of(schema)}")
    if depth > MAX_DEPTH:
        invalid(f"is nested deeper than {MAX_DEPTH} schemas")
    kind = schema.get("type")
    if kind is not None and not _is_type(kind):
        invalid(
            f"must have one of {', '.join(sorted(_TYPES))} at {_pointer(where)}/type, not"
            f" {quoted(kind)}"
        )
    if "enum" in schema and not _is_enumeration(schema["enum"]):
        invalid(f"must have a list of values at {_pointer(where)}/enum")
    required = schema.get("required", [])
    if not _is_list_of_names(required):
        invalid(f"must have a list of names at {_pointer(where)}/required")
    reference = schema.get("$ref", "#")
    if not _is_own_reference(reference):
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
    for name in _SINGLES:
        # In old drafts, `items` may be a list. Its schemas are not checked.
        if name in schema and not isinstance(schema[name], list):
            _check(schema[name], (where, name), depth + 1)


def _pointer(where: _Place) -> str:
    """Return the JSON pointer of a place.

    Pointers are built only for errors: the pointers of all places together may be far longer than
    the schema.
    """
    steps: list[str] = []
    while where:
        steps[:0] = [truncated(str(step)) for step in where[1:]]
        where = where[0]
    return "".join(f"/{step}" for step in steps)
