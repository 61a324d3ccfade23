"""Define the base class of all request models, which turns JSON bytes into a checked model or a
clear error.

A field is supported, is accepted as a no-op at certain values, or is rejected by name. Unknown
fields are rejected, unless the caller of `parse` wants to ignore them: then, only misspelled names
of known fields are rejected. Every string, list and object has a size limit, and a collection is
rejected at its first wrong element. So the memory and time of a request are proportional to its
size.
"""

from __future__ import annotations

import codecs
import difflib
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, models_json_schema
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter

M = TypeVar("M", bound="RequestModel")
V = TypeVar("V")

# Limits of a body. `_check_count` counts punctuation in place of values, keys and containers.
# Number of ",", "[" and "{": enough for 128 prompts of 8,192 token ids.
MAX_VALUES: Final = 1_250_000
# Number of ":": enough for MAX_ITEMS messages of six fields. While an object with so many keys is
# parsed, nothing else runs for 0.08 s.
MAX_KEYS: Final = 125_000
# Number of "[" and "{". Each container takes up to 700 bytes of memory.
MAX_CONTAINERS: Final = 200_000
# Characters of a text for the model. In practice, --max-body-bytes is the limit.
MAX_TEXT: Final = 32 << 20
MAX_LABEL: Final = 512  # characters of a name or an id
MAX_ITEMS: Final = 20_000  # elements of a list of messages, items or content parts

List = Annotated[list[V], Field(fail_fast=True)]
LongText = Annotated[str, Field(max_length=MAX_TEXT)]
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]

# All bytes except the punctuation that `_check_count` counts.
_NOT_COUNTED: Final = bytes(set(range(256)) - set(b",:[{"))
_SHOWN: Final = 40  # maximum characters of a client's text that an error quotes
_LISTED: Final = 4  # maximum values that an error lists one by one
REF = "#/components/schemas/{model}"  # pydantic's template for references of OpenAPI
_UNSUPPORTED = "unsupported_parameter"  # pydantic error type that becomes UnsupportedParameter
_MAX_WHOLE: Final = float(1 << 53)  # below it, floats without a fraction are exact integers
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


class RequestModel(BaseModel):
    """A JSON object of a request.

    `null` counts as absent. Types are strict: "5" is not a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), hide_input_in_errors=True
    )

    # accepted with any value; they never change a response
    hints: ClassVar[frozenset[str]] = frozenset()
    # accepted only with these values, which have no effect
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Fields of this or another API that are not supported, and why ignoring them would change a
    # response.
    unsupported: ClassVar[Mapping[str, str]] = {}
    # Fields of `unsupported` whose value is an object that is rejected only for one member, by the
    # name of this member. Without it, such a field is ignored and named, as unknown fields are.
    unsupported_members: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema of what is accepted: optional fields may be null, and hints and no-ops
        are listed.
        """
        schema = handler.resolve_ref_schema(handler(core_schema))
        properties = schema.setdefault("properties", {})
        required = schema.get("required", ())
        for name, value in properties.items():
            if name not in required and {"type": "null"} not in value.get("anyOf", ()):
                properties[name] = _or_null(value)
        for name in sorted(cls.hints):
            properties[name] = {"description": "Accepted. Never changes a response."}
        for name, values in sorted(cls.no_ops.items()):
            properties[name] = {
                "enum": [*values, None],
                "description": "Accepted only with a value that has no effect.",
            }
        if cls.unsupported:
            schema["description"] = (
                f"{schema.get('description', '')} Rejected by name:"
                f" {', '.join(sorted(cls.unsupported))}."
            )
        return schema

    @model_validator(mode="before")
    @classmethod
    def _accepted_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Return the fields that have an effect. Reject a field that is not accepted."""
        if not isinstance(data, dict):
            return data
        accepted = {}
        listed = _listed_names(cls)
        # Listed fields come first, so that their errors are reported before errors of unknown
        # fields.
        ignored: IgnoredFields | None = info.context
        for name, value in data.items():
            if name not in listed or value is None or name in cls.hints:
                continue
            if name in _names(cls):
                # 50.0 is an integer, see `_integer_names`.
                is_whole = type(value) is float and value.is_integer()
                if is_whole and abs(value) < _MAX_WHOLE and name in _integer_names(cls):
                    value = int(value)
                accepted[name] = value
            elif ignored is not None and cls._lacks_its_member(name, value):
                ignored.add((name,))
            elif name in cls.no_ops:
                cls._check_no_op(name, value)
            else:
                unsupported(f"is not supported: {cls.unsupported[name]}", field=name)
        for name, value in data.items():
            if name in listed or value is None:
                continue
            if ignored is not None and ignored.is_full:
                break  # a body may have 100,000 unknown fields
            check_unknown(name, _accepted_names(cls), info)
        return accepted

    @classmethod
    def _lacks_its_member(cls, name: str, value: Any) -> bool:
        """Return whether a field is an object without the member for which it is rejected."""
        member = cls.unsupported_members.get(name)
        if member is None or not isinstance(value, dict):
            return False
        return bool(value) and value.get(member) is None

    @classmethod
    def _check_no_op(cls, name: str, value: Any) -> None:
        values = cls.no_ops[name]
        if not any(_same(value, harmless) for harmless in values):
            hint = cls.unsupported.get(name, "leave it out")
            unsupported(f"is not supported, except as {_alternatives(values)}; {hint}", field=name)


def check_unknown(name: str, known: frozenset[str], info: ValidationInfo, place: str = "") -> None:
    """Reject or ignore an unknown field.

    The caller of `parse` chooses: all unknown fields are rejected, or only those that are
    misspelled names of known fields.

    Args:
        name: the name of the field.
        known: the names that are accepted at its place.
        info: the info of the validator that found the field.
        place: the beginning of the error text, which names the field. "": the error names the field
            by its path.
    """
    ignored: IgnoredFields | None = info.context
    field = None if place else name
    if ignored is not None:
        meant = ignored.meant(name, known)
        if meant is None:
            ignored.add((name,))
            return
    else:
        # The field is rejected in any case. The known name is only a hint.
        meant = None
        if len(name) <= _SHOWN:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            meant = near[0] if near else None
    hint = "leave it out" if meant is None else f"did you mean {meant!r}?"
    unsupported(f"{place}is not a known field; {hint}", field=field)


@functools.cache
def _names(model: type[RequestModel]) -> frozenset[str]:
    """Return the names of a model's fields as clients send them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@functools.cache
def _integer_names(model: type[RequestModel]) -> frozenset[str]:
    """Return the names of the fields that take integers.

    In JSON Schema, a number without a fraction is an integer, however it is written: some clients
    send 50.0.
    """
    return frozenset(
        field.alias or name
        for name, field in model.model_fields.items()
        if _takes_integer(field.annotation)
    )


def _takes_integer(annotation: Any) -> bool:
    if annotation is int:
        return True
    origin = get_origin(annotation)
    if origin is Annotated:
        return _takes_integer(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return any(map(_takes_integer, get_args(annotation)))
    return False


@functools.cache
def _accepted_names(model: type[RequestModel]) -> frozenset[str]:
    """Return all names that a model accepts with some value."""
    return frozenset({*_names(model), *model.hints, *model.no_ops})


@functools.cache
def _listed_names(model: type[RequestModel]) -> frozenset[str]:
    """Return all names that a model lists: the accepted names and the unsupported names."""
    return _accepted_names(model) | frozenset(model.unsupported)


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema of a field that may also be null."""
    annotations: JsonSchemaValue = {
        key: schema[key] for key in ("title", "description", "default") if key in schema
    }
    constraints = {key: value for key, value in schema.items() if key not in annotations}
    if not constraints:
        return annotations  # any value is allowed, so null is, too
    return annotations | {"anyOf": [constraints, {"type": "null"}]}


def _same(value: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON. In Python, 1 equals True."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _alternatives(values: Sequence[Any]) -> str:
    """Format the values as JSON for an error.

    Of a long list, only the first and the last are shown.
    """
    texts = [orjson.dumps(value).decode() for value in values]
    return " or ".join(texts) if len(texts) <= _LISTED else f"{texts[0]} to {texts[-1]}"


def invalid(reason: str, field: str | None = None) -> NoReturn:
    """Reject a value in a validator.

    `reason` follows the field's name in the message ("must be …").
    """
    raise PydanticCustomError("invalid", "{reason}", {"reason": reason, "field": field})


def unsupported(reason: str, field: str | None = None) -> NoReturn:
    """Reject a value that the API allows and this server does not support.

    Arguments as for `invalid`.
    """
    raise PydanticCustomError(_UNSUPPORTED, "{reason}", {"reason": reason, "field": field})


def single_value(values: Mapping[str, V | None]) -> V | None:
    """Return the value that a client gives under one or several names, or None if it gives none.

    Only validators call this: it rejects different values.

    Args:
        values: the value under each name, by the path of its field.
    """
    given = [(path, value) for path, value in values.items() if value is not None]
    if not given:
        return None
    (first, chosen), *others = given
    for path, value in others:
        if value != chosen:
            invalid(f"differs from {first}; send one of them", field=path)
    return chosen


def parse(model: type[M], body: bytes, ignored: IgnoredFields | None = None) -> M:
    """Parse and check a request body. Safe on any thread.

    Args:
        model: the class of the request.
        body: the bytes of the body.
        ignored: gets the names of the unknown fields, which are ignored. None: unknown fields are
            rejected.

    Raises:
        InvalidRequest, UnsupportedParameter: `field` is the path of the wrong field.
    """
    _check_count(body)
    try:
        # Some Windows programs begin a text with a byte order mark, which a parser may ignore
        # (RFC 8259, section 8.1).
        data = orjson.loads(body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the request body {_json_fault(body, exc)}") from exc
    if not isinstance(data, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {kind_of(data)}")
    try:
        return model.model_validate(data, context=ignored)
    except ValidationError as exc:
        raise _translated(exc.errors(include_url=False)[0]) from exc


def _json_fault(body: bytes, exc: orjson.JSONDecodeError) -> str:
    """Return what is wrong with a body that is not JSON, as text after "the request body"."""
    place = _not_utf8(body)
    if place is not None:
        hint = "send JSON in UTF-8, and cut texts only between characters"
        return f"is not UTF-8 at byte {place}; {hint}"
    hint = ""
    if "surrogate" in exc.msg:
        hint = "; a text was cut inside a character, such as an emoji: cut between characters"
    where = f"line {exc.lineno}, column {exc.colno}"
    return f"is not valid JSON at {where}: {exc.msg.split(':')[0]}{hint}"


def _not_utf8(body: bytes) -> int | None:
    """Return the position of the first byte that is not UTF-8, counted from 1.

    None: the body is UTF-8. A zero byte at the beginning counts, too. JSON contains none, so the
    body is UTF-16, which some shells of Windows send.
    """
    if b"\0" in body[:2]:
        return body.index(b"\0") + 1
    try:
        body.decode()
    except UnicodeDecodeError as exc:
        return exc.start + 1
    return None


def _check_count(body: bytes) -> None:
    """Raise InvalidRequest for a body whose values would take far more memory than its bytes.

    Values are counted by the punctuation of lists, objects, keys and elements. Punctuation inside
    strings counts, too: to tell it apart would cost more than parsing, and a text with so much
    punctuation exceeds any context.
    """
    if len(body) <= MAX_CONTAINERS:  # each container takes at least one byte
        return
    punctuation = body.translate(None, _NOT_COUNTED)
    keys = punctuation.count(b":")
    containers = punctuation.count(b"[") + punctuation.count(b"{")
    values = len(punctuation) - keys
    for count, most, what in (
        (containers, MAX_CONTAINERS, "lists and objects, counted by its '[' and '{'"),
        (keys, MAX_KEYS, "keys, counted by its ':'"),
        (values, MAX_VALUES, "values, counted by its ',', '[' and '{'"),
    ):
        if count > most:
            raise InvalidRequest(
                f"the request body has {count} {what}; at most {most} are allowed, send fewer"
            )


def check_size(value: Any, most: int) -> Any:
    """Return the value if its JSON has at most `most` bytes. Only validators call this.

    The value may have at most 254 levels: orjson writes no more.
    """
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError:
        invalid("is nested too deeply")
    if size > most:
        invalid(f"may have {most} bytes of JSON at most, not {size}")
    return value


def check_object(value: Any, *, most: int, key_chars: int, value_chars: int | None = None) -> Any:
    """Return the value, or reject it at its first wrong entry. Only validators call this.

    pydantic has `fail_fast` for lists since 2.8 and for objects since 2.14, and TensorRT-LLM's
    images have older releases.

    Args:
        value: what the client sent.
        most: maximum number of entries.
        key_chars: maximum characters of a key.
        value_chars: maximum characters of a value, which must be a string. None: values may have
            any type.
    """
    if not isinstance(value, dict):
        invalid(f"must be an object, not {kind_of(value)}")
    if len(value) > most:
        invalid(f"may have {most} entries at most, not {len(value)}")
    for key, entry in value.items():
        if len(key) > key_chars:
            invalid(
                f"may have keys of {key_chars} characters at most; {quoted(key)} has {len(key)}"
            )
        if value_chars is None:
            continue
        if not isinstance(entry, str):
            invalid(f"must be a string, not {kind_of(entry)}", field=key)
        if len(entry) > value_chars:
            invalid(f"may have {value_chars} characters at most, not {len(entry)}", field=key)
    return value


def request_schemas(*models: type[RequestModel]) -> dict[str, JsonSchemaValue]:
    """Return the JSON Schemas of the models and of all models they contain, by name, with OpenAPI
    references.
    """
    _, together = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, JsonSchemaValue] = together["$defs"]
    return {name: without_pydantic_extras(schema) for name, schema in schemas.items()}


def without_pydantic_extras(schema: Any) -> Any:
    """Return the schema without two things that pydantic adds: titles, and defaults that mean
    "absent".
    """
    if isinstance(schema, list):
        return [without_pydantic_extras(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_pydantic_extras(value)
        for key, value in schema.items()
        if not _is_pydantic_extra(key, value)
    }


def _is_pydantic_extra(key: str, value: Any) -> bool:
    if key == "title":
        return isinstance(value, str)  # otherwise, it is the schema of a property named "title"
    return key == "default" and (value is None or value == {})


def kind_of(value: Any) -> str:
    """Return JSON's name for the type of the value, with an article."""
    return _KINDS.get(type(value), "null")


def quoted(value: Any) -> str:
    """Format a value for an error: a number, the beginning of a text, or the type of any other
    value.
    """
    if isinstance(value, str):
        return repr(truncated(value))
    return repr(value) if isinstance(value, int | float) else kind_of(value)


def truncated(text: str) -> str:
    """Shorten a client's text for an error."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _translated(error: ErrorDetails) -> InvalidRequest:
    """Return the error of this server for an error of pydantic."""
    context = error.get("ctx", {})
    path = list(error["loc"])
    if field := context.get("field"):
        path.append(field)
    # The field that selects the class of a union is wrong or missing. pydantic quotes its name.
    if error["type"].startswith("union_tag"):
        path.append(context.get("discriminator", "type").strip("'"))
    name = _field_path(path)
    cls = UnsupportedParameter if error["type"] == _UNSUPPORTED else InvalidRequest
    reason = _reason(error, context)
    return cls(f"{name} {reason}" if name else f"the request {reason}", field=name or None)


def _reason(error: ErrorDetails, context: Mapping[str, Any]) -> str:
    """Return what is wrong, as it follows the name of the field in a message."""
    kind = error["type"]
    given = error.get("input")
    if kind in ("missing", "union_tag_not_found"):
        return "is required"
    if kind == "union_tag_invalid":
        return f"must be one of {context['expected_tags']}, not {quoted(context['tag'])}"
    if kind in ("invalid", _UNSUPPORTED):
        return str(context["reason"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be an object, not {kind_of(given)}"
    if kind == "list_type":
        # The text that stands for a list is often a prompt, and the error is logged.
        return f"must be a list, not {kind_of(given)}"
    if kind in (
        "too_short",
        "too_long",
        "string_too_short",
        "string_too_long",
        "string_pattern_mismatch",
    ):
        # "List should have at most 16 items after validation, not 17", without its first word.
        _, rule = error["msg"].split(" ", 1)
        limit = rule.split(", not")[0]
        return limit.replace("should", "must").replace(" after validation", "")
    # "Input should be a valid integer" and "Input should be greater than 0".
    wanted = error["msg"].replace("Input should be a valid", "must be a")
    wanted = wanted.replace("Input should", "must").replace("a integer", "an integer")
    wanted = wanted[0].lower() + wanted[1:]
    return f"{wanted}, not {quoted(given)}"


def _field_path(path: Iterable[int | str]) -> str:
    """Format a pydantic location without union tags.

    ("messages", 0, "user", "content") becomes "messages[0].content". A union tag that could be
    mistaken for a field is written `<tag>`.
    """
    text = ""
    is_after_index = False
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            is_after_index = True
            continue
        # The role of a message is a union tag: ("messages", 0, "user", …).
        is_role = is_after_index and part in _ROLES
        is_tag = is_role or part.startswith("<")
        if not is_tag:
            separator = "." if text else ""
            text += f"{separator}{truncated(part)}"
        is_after_index = False
    return text


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
