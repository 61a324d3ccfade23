"""Encode and decode messages: MessagePack through msgspec, token ids packed as 32-bit little-endian integers."""

from __future__ import annotations

import sys
from array import array
from typing import Any, TypeVar

import msgspec

from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.messages import TokenIds

T = TypeVar("T")


def _pack(value: Any) -> bytes:
    if isinstance(value, array):
        return _little_endian(value).tobytes()
    raise TypeError(f"{type(value).__name__} has no wire form")


def _unpack(wanted: Any, value: Any) -> Any:
    if wanted is array:
        return _little_endian(array("I", value))  # ValueError unless whole 32-bit words
    raise TypeError(f"{wanted} has no wire form")


def _little_endian(ids: TokenIds) -> TokenIds:
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Any) -> bytes:
    """Encode a message, such as a struct of `messages`."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, wanted: type[T]) -> T:
    """Decode `data` as a value of type `wanted`.

    Raises:
        BadFrame: `data` is not such a value.
    """
    decoder = _decoders.get(wanted)
    if decoder is None:
        decoder = _decoders[wanted] = msgspec.msgpack.Decoder(wanted, dec_hook=_unpack)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as exc:  # the last: nested too deeply
        raise BadFrame(f"not a {getattr(wanted, '__name__', wanted)}: {exc}") from exc
