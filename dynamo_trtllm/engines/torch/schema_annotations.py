"""Remove keywords from a JSON Schema that have no effect and that llguidance rejects."""

from __future__ import annotations

from typing import Any, Final

from dynamo_trtllm.engines.torch.closed_schemas import NAMED_SCHEMAS

# The values of `format` that llguidance enforces.
_FORMATS: Final = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
_DATA: Final = ("const", "default", "enum", "examples")  # keywords whose values are not schemas


def without_annotations(schema: Any) -> Any:
    """Return a copy of a schema without the keywords that have no effect.

    A `format` that a program does not know is only a hint. Generators of schemas write formats of
    their own: "path" and "password" are pydantic's, "int32" and "byte" are OpenAPI's.
    """
    if isinstance(schema, list):
        return [without_annotations(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _DATA:
            kept[keyword] = value
        elif keyword in NAMED_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: without_annotations(member) for name, member in value.items()}
        elif not _has_no_effect(keyword, value):
            kept[keyword] = without_annotations(value)
    return kept


def _has_no_effect(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in _FORMATS
    return (keyword == "uniqueItems" and value is False) or (
        keyword == "unevaluatedProperties" and value is True
    )
