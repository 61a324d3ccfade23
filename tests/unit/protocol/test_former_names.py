"""What processes of wire version 3 send is read with the names of this version."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_trtllm.cluster.request_plane.frames import ErrorPayload
from dynamo_trtllm.protocol.errors import CLASSES
from dynamo_trtllm.protocol.former_names import FORMER_CODES
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Phase,
    Sampling,
    decode,
    encode,
    token_ids,
)
from tests.kit.cases import each_case

REQUEST = GenerateRequest(
    request_id="r", model="m", token_ids=token_ids(), sampling=Sampling(max_tokens=1), deadline=0.0
)


@each_case("code", FORMER_CODES)
def test_error_when_code_is_former_then_its_class(code: str) -> None:
    assert type(ErrorPayload(FORMER_CODES[code], "text").error()) is CLASSES[code]


def test_decode_when_values_have_former_names_then_current_ones() -> None:
    assert sent({"finish_reason": "handoff"}, Chunk).finish_reason is FinishReason.KV_TRANSFER
    assert sent(plain(REQUEST) | {"phase": "whole"}, GenerateRequest).phase is Phase.AGGREGATED


def test_encode_when_request_is_aggregated_then_without_phase() -> None:
    """Version 3 does not know the name of the phase, and takes a missing one for it."""
    assert REQUEST.phase is Phase.AGGREGATED
    assert "phase" not in plain(REQUEST)


def plain(value: Any) -> dict[str, Any]:
    return msgspec.msgpack.decode(encode(value))  # type: ignore[no-any-return]


def sent(values: dict[str, Any], form: type[Any]) -> Any:
    return decode(msgspec.msgpack.encode(values), form)
