"""Find every number of a message type by its annotations, and make messages in which one number is
bad.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

NOT_FINITE = (math.nan, math.inf, -math.inf)
NEVER_VALID = (*NOT_FINITE, -1e308, 1e308, True, "1" * 10_000, "nan", b"1")
# Each is valid for some numbers.
OFTEN_INVALID = (
    None,
    -0.0,
    0.5,
    -1,
    -(1 << 63),
    1 << 31,
    1 << 32,
    1 << 53,
    1 << 63,
    (1 << 64) - 1,
)
BAD_NUMBERS = (*NEVER_VALID, *OFTEN_INVALID)


class BadMessage(NamedTuple):
    """An encoded message with one bad number."""

    path: str  # of the number
    number: object
    data: bytes

    @property
    def is_never_valid(self) -> bool:
        """Whether no number of any message may have this value."""
        return any(self.number is value for value in NEVER_VALID)


def bad_messages(wanted: Any) -> Iterator[BadMessage]:
    """Yield messages of a type: for each number in it, one with each of BAD_NUMBERS."""
    for path, number, message in _with_bad_number(_info(wanted), "$", ()):
        yield BadMessage(path, number, msgspec.msgpack.encode(message))


def good_message(wanted: Any) -> bytes:
    """Return a message of a type, in which all fields are set."""
    return msgspec.msgpack.encode(_good(_info(wanted)))


@cache
def _info(wanted: Any) -> inspect.Type:
    return inspect.type_info(wanted)


def _good(info: inspect.Type, depth: int = 0) -> Any:
    match info:
        case inspect.IntType() | inspect.FloatType():
            return 1  # in the range of every number
        case inspect.StrType():
            return "x"
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return b"x"
        case inspect.NoneType() | inspect.AnyType():
            return None
        case inspect.EnumType():
            return next(iter(info.cls)).value
        case inspect.ListType() | inspect.VarTupleType():
            return [_good(info.item_type, depth)]
        case inspect.TupleType():
            return [_good(item_type, depth) for item_type in info.item_types]
        case inspect.DictType():
            return {_good(info.key_type, depth): _good(info.value_type, depth)}
        case inspect.UnionType():
            has_none = any(isinstance(member, inspect.NoneType) for member in info.types)
            return None if has_none and depth > 1 else _good(info.types[0], depth)
        case inspect.StructType():
            return _struct(
                info,
                {info_field.name: _good(info_field.type, depth + 1) for info_field in info.fields},
            )
        case inspect.CustomType():
            return b""  # token ids
    raise TypeError(f"this function does not know {info}")


def _struct(info: inspect.StructType, values: dict[str, Any]) -> Any:
    tag = [] if info.tag is None else [info.tag]
    if info.array_like:
        return [*tag, *(values[info_field.name] for info_field in info.fields)]
    named = {info_field.encode_name: values[info_field.name] for info_field in info.fields}
    return named if info.tag is None else {str(info.tag_field): info.tag} | named


def _with_bad_number(
    info: inspect.Type, path: str, within: tuple[type, ...]
) -> Iterator[tuple[str, object, Any]]:
    """Yield the path of each number, each bad number, and a message with it.

    `within`: the structs around `info`.
    """
    match info:
        case inspect.IntType() | inspect.FloatType():
            for number in BAD_NUMBERS:
                yield path, number, number
        case inspect.ListType() | inspect.VarTupleType():
            for *found, bad in _with_bad_number(info.item_type, f"{path}[]", within):
                yield *found, [bad]
        case inspect.TupleType():
            for at, item in enumerate(info.item_types):
                for *found, bad in _with_bad_number(item, f"{path}[{at}]", within):
                    items = [_good(item_type) for item_type in info.item_types]
                    items[at] = bad
                    yield *found, items
        case inspect.DictType():
            for *found, bad in _with_bad_number(info.value_type, f"{path}[]", within):
                yield *found, {"x": bad}
        case inspect.UnionType():
            for member in info.types:
                yield from _with_bad_number(member, path, within)
        case inspect.StructType() if info.cls not in within:
            for field in info.fields:
                inner = _with_bad_number(
                    field.type, f"{path}.{info.cls.__name__}.{field.name}", (*within, info.cls)
                )
                for *found, bad in inner:
                    values = {
                        info_field.name: _good(info_field.type, 1) for info_field in info.fields
                    }
                    yield *found, _struct(info, values | {field.name: bad})
