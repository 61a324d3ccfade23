"""Close the objects of a JSON Schema, so that models add no properties that are not in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from dynamo_trtllm.protocol.number_text import is_digits

# Keywords whose value is an object with schemas by name.
NAMED_SCHEMAS: Final = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)
# Keywords whose value is a list of alternative schemas for the same object.
_ALTERNATIVES: Final = ("anyOf", "oneOf")
# Keywords that say which properties an object may have besides those in `properties`.
_OTHER_PROPERTIES: Final = (
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "allOf",
    "$ref",
)
# Keywords that name properties. A schema with several of them combines their properties.
_PROPERTY_SOURCES: Final = (
    "properties",
    "patternProperties",
    "allOf",
    "$ref",
    *_ALTERNATIVES,
)
_INDEX_DIGITS: Final = 6  # digits of the largest index in a list of schemas


def closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it names.

    Without this rule, a model may add properties until it reaches max_tokens. XGrammar, which vLLM
    and TensorRT-LLM use, has the same rule by default (`strict_mode`).

    An object stays open if its schema says which other properties it may have. It also stays open
    if several schemas name its properties, because each of them names only a part: the schemas
    within `allOf`, alternatives beside other properties, and the schemas that these refer to.
    """
    return _closed(schema, _parts(schema), is_part=False)


def _closed(schema: Any, parts: set[int], *, is_part: bool) -> Any:
    """Return a closed copy of a schema.

    Args:
        schema: the schema.
        parts: see `_parts`.
        is_part: the schema names only a part of the properties of an object.
    """
    if not isinstance(schema, dict):
        return schema
    is_part = is_part or id(schema) in parts
    result = dict(schema)
    for keyword in NAMED_SCHEMAS:
        named = schema.get(keyword)
        if isinstance(named, dict):
            result[keyword] = {
                name: _closed(member, parts, is_part=False) for name, member in named.items()
            }
    for keyword in (*_ALTERNATIVES, "prefixItems"):
        listed = schema.get(keyword)
        if isinstance(listed, list):
            are_parts = keyword in _ALTERNATIVES and (is_part or _combines(schema))
            result[keyword] = [_closed(member, parts, is_part=are_parts) for member in listed]
    if isinstance(schema.get("items"), dict):
        result["items"] = _closed(schema["items"], parts, is_part=False)
    is_composed = any(keyword in schema for keyword in (*_ALTERNATIVES, "if"))
    allows_others = any(keyword in schema for keyword in _OTHER_PROPERTIES)
    if "properties" in schema and not (is_part or is_composed or allows_others):
        result["additionalProperties"] = False
    return result


def _combines(schema: dict[str, Any]) -> bool:
    """Return whether a schema combines the properties of several schemas."""
    return sum(keyword in schema for keyword in _PROPERTY_SOURCES) > 1


class _Visit(NamedTuple):
    """A schema to look at, and whether it names only a part of the properties of an object."""

    schema: Any
    is_part: bool


def _parts(root: Any) -> set[int]:
    """Return the `id()` of each referenced schema that names only a part of the properties."""
    parts: set[int] = set()
    # Each schema is visited at most twice, so the time is in proportion to the size of the root.
    visited: set[tuple[int, bool]] = set()
    pending = [_Visit(root, is_part=False)]
    while pending:
        schema, is_part = pending.pop()
        if not isinstance(schema, dict) or (id(schema), is_part) in visited:
            continue
        visited.add((id(schema), is_part))
        is_part = is_part or _combines(schema)
        target = _target(root, schema.get("$ref")) if is_part else None
        if isinstance(target, dict):
            parts.add(id(target))
            pending.append(_Visit(target, is_part=True))
        pending += _members(schema, is_part=is_part)
    return parts


def _members(schema: dict[str, Any], *, is_part: bool) -> Iterator[_Visit]:
    """Yield the schemas within a schema.

    Args:
        schema: the schema.
        is_part: it names only a part of the properties of an object. Then the schemas within it
            that are for the same object are parts, too.
    """
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from (_Visit(member, is_part=False) for member in value.values())
        elif keyword == "allOf" and isinstance(value, list):
            # pydantic 1 writes a reference as the only schema of `allOf`, beside a description.
            yield from (_Visit(member, is_part=is_part or len(value) > 1) for member in value)
        elif keyword in _ALTERNATIVES and isinstance(value, list):
            yield from (_Visit(member, is_part=is_part) for member in value)
        elif keyword in ("items", "prefixItems") and isinstance(value, list):
            yield from (_Visit(member, is_part=False) for member in value)
        elif keyword in ("items", "additionalProperties", "contains"):
            yield _Visit(value, is_part=False)


def _target(root: Any, reference: Any) -> Any:
    """Return the schema to which a reference `#/…` points. None: there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(name)
        elif isinstance(target, list) and is_digits(name) and len(name) <= _INDEX_DIGITS:
            # zod refers to alternatives by their indices.
            target = target[int(name)] if int(name) < len(target) else None
        else:
            return None
    return target
