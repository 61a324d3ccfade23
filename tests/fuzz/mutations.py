"""Mutate inputs that have a structure: JSON and MessagePack.

libFuzzer mutates bytes. That finds the errors of decoders, but hardly ever a second valid message.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from tests.fuzz.target import Form

_SMALL_INTEGERS: Final = (0, 1, -1, 2, 20, 64, 255)
# Limits of integer types, and of the integers that a float can express.
_LARGE_INTEGERS: Final = (2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63))
_FLOATS: Final = (0.0, -0.0, 0.5, 1.5, 1e-9, 1e300)
_NUMBERS: Final = _SMALL_INTEGERS + _LARGE_INTEGERS + _FLOATS
_TEXTS: Final = ("", "a", " ", "\n", "\0", "é", "\U0001f9d1", "\u2028", "a" * 300, "../x", "0", "$")
_VALUES: Final = (None, True, False, [], {}, [[]], {"": {}})
_ALPHABET: Final = string.ascii_letters + string.digits + "_-.{}[]:,\"'\\<>|/ "


class _Place(NamedTuple):
    """A value, and the container that has it; None: it is the root."""

    parent: Any
    key: Any
    value: Any


def read(data: bytes, form: Form) -> Any:
    """Return the value of an input. Raises ValueError or msgspec.DecodeError if it is malformed."""
    if form is Form.JSON:
        return json.loads(data)
    return msgspec.msgpack.decode(data)


def write(value: Any, form: Form) -> bytes:
    """Return the input with a value. Raises ValueError or OverflowError if it has none."""
    if form is Form.JSON:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return msgspec.msgpack.encode(value)


def mutate(value: Any, words: Sequence[Any], draw: random.Random) -> Any:
    """Return a value that was changed in one to four places. `words`: texts to insert."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place = draw.choice(_places(value))
        changed = _changed(place.value, words, draw, value)
        if place.parent is None:
            value = changed
        else:
            place.parent[place.key] = changed
    return value


def grow(value: Any, draw: random.Random) -> Callable[[int], Any]:
    """Return a function of a number of times that makes one place of the value so much larger."""
    sizable = [
        index
        for index, place in enumerate(_places(value))
        if isinstance(place.value, str | bytes | list | dict)
    ]
    index = draw.choice(sizable or [0])
    change = _nested if draw.random() < 0.2 else _repeated

    def grown(times: int) -> Any:
        copy = _copied(value)
        place = _places(copy)[index]
        larger = change(place.value, times)
        if place.parent is None:
            return larger
        place.parent[place.key] = larger
        return copy

    return grown


def _nested(value: Any, times: int) -> Any:
    for _ in range(min(times, 200)):  # deeper ones are rejected by every decoder
        value = [value]
    return value


def _repeated(value: Any, times: int) -> Any:
    if not isinstance(value, str | bytes | list | dict):
        return [value] * times
    if isinstance(value, dict):
        copies = {
            f"{key}{number}": inner for number in range(times) for key, inner in value.items()
        }
        return copies or {f"k{number}": number for number in range(times)}
    if not value:
        filling = {str: "a", bytes: b"a", list: [None]}
        return filling[type(value)] * times
    return value * times


def _places(value: Any) -> list[_Place]:
    """Return all values in a value, and their places."""
    found = [_Place(None, None, value)]
    for place in found:
        if isinstance(place.value, dict):
            found += [_Place(place.value, key, inner) for key, inner in place.value.items()]
        elif isinstance(place.value, list):
            found += [_Place(place.value, index, inner) for index, inner in enumerate(place.value)]
    return found


def _changed(value: Any, words: Sequence[Any], draw: random.Random, root: Any) -> Any:
    if draw.random() < 0.2:
        return _other(words, draw, root)
    if isinstance(value, dict):
        return _changed_dict(value, words, draw, root)
    if isinstance(value, list):
        return _changed_list(value, words, draw, root)
    if isinstance(value, str | bytes):
        return _changed_text(value, words, draw)
    if isinstance(value, bool) or value is None:
        return _other(words, draw, root)
    if draw.random() < 0.5:
        return value + draw.choice((-1, 1, -0.5, 7))
    return draw.choice(_NUMBERS)


def _other(words: Sequence[Any], draw: random.Random, root: Any) -> Any:
    """Return another value: a special one, a word, or a copy of one in the input."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(_NUMBERS)
    if kind == 1 and words:
        return draw.choice(words)
    if kind == 2:
        return _copied(draw.choice(_places(root)).value)
    if draw.random() < 0.9:
        # The next mutation may change what is inserted here, in place.
        return _copied(draw.choice((*_VALUES, *_TEXTS)))
    return "".join(draw.choices(_ALPHABET, k=8))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _changed_dict(
    value: dict[Any, Any], words: Sequence[Any], draw: random.Random, root: Any
) -> dict[Any, Any]:
    result = dict(value)
    kind = draw.randrange(3)
    if result and kind == 0:
        del result[draw.choice(list(result))]
    elif result and kind == 1:
        key = draw.choice(list(result))
        result[_new_key(words, draw)] = result.pop(key)
    else:
        result[_new_key(words, draw)] = _other(words, draw, root)
    return result


def _new_key(words: Sequence[Any], draw: random.Random) -> Any:
    if words and draw.random() < 0.8:
        return draw.choice(words)
    return draw.choice(_TEXTS)


def _changed_list(
    value: list[Any], words: Sequence[Any], draw: random.Random, root: Any
) -> list[Any]:
    result = list(value)
    kind = draw.randrange(4)
    if result and kind == 0:
        del result[draw.randrange(len(result))]
    elif result and kind == 1:
        result.append(_copied(draw.choice(result)))
    elif len(result) > 1 and kind == 2:
        draw.shuffle(result)
    else:
        result.insert(draw.randint(0, len(result)), _other(words, draw, root))
    return result


def _changed_text(value: Any, words: Sequence[Any], draw: random.Random) -> Any:
    texts = [word for word in words if isinstance(word, type(value))]
    at = draw.randint(0, len(value))
    end = draw.randint(at, min(len(value), at + 8))
    kind = draw.randrange(4)
    if texts and kind == 0:
        return draw.choice(texts)
    if texts and kind == 1:
        return value[:at] + draw.choice(texts) + value[at:]
    if kind == 2:
        return value[:at] + value[end:]
    more = "".join(draw.choices(_ALPHABET, k=draw.randint(1, 3)))
    return value[:at] + (more if isinstance(value, str) else more.encode()) + value[end:]
