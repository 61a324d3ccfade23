"""`DisaggregatedParams` on their way from a prefill to a decode engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.trtllm import transfer_params as wire
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.protocol.errors import ConfigError, RequestRejected, TransferMismatch
from dynamo_trtllm.protocol.messages import KvTransferParams, decode, encode
from tests.kit.cases import each_case
from tests.kit.instances import make_transfer_params

OLD = frozenset(
    {"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens"}
)
NEW = OLD | {"first_gen_log_probs", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint"}
BIG = (1 << 63) - 5
VOCAB = 100


@dataclass
class Logprob:
    logprob: float
    rank: int | None


def params(**changes: Any) -> dict[str, Any]:
    return {
        "first_gen_tokens": [42],
        "ctx_request_id": BIG,
        "opaque_state": b"\x00\xff\x80state",
        **changes,
    }


def with_state(engine_state: bytes) -> KvTransferParams:
    return msgspec.structs.replace(make_transfer_params("t"), engine_state=engine_state)


def unpack(
    kv_params: KvTransferParams, known: frozenset[str] = NEW, runtime: str | None = None
) -> dict[str, Any]:
    return wire.unpack(kv_params, known=known, logprob=Logprob, vocab_size=VOCAB, runtime=runtime)


def sent(**changes: Any) -> KvTransferParams:
    """Return KV transfer parameters that have crossed the wire."""
    kv_params = with_state(wire.pack(params(**changes), release="1.2.1"))
    return decode(encode(kv_params), KvTransferParams)


def test_transfer_survives_the_wire_unchanged() -> None:
    found = unpack(sent(draft_tokens=[1, 2]), OLD)
    assert found == params(draft_tokens=[1, 2], request_type="generation_only")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([[{42: Logprob(-0.5, 1), 7: Logprob(-math.inf, None)}]], id="of one sequence"),
        pytest.param([{42: Logprob(-0.5, 1)}], id="flat"),
        pytest.param([-0.5], id="without alternatives"),
    ],
)
def test_transfer_log_probabilities_are_rebuilt(given: list[Any]) -> None:
    assert unpack(sent(first_gen_log_probs=given))["first_gen_log_probs"] == given


@each_case(
    "bad",
    [
        {"first_gen_log_probs": [math.nan]},
        {"first_gen_log_probs": [[{42: Logprob(math.inf, 1)}]]},
        {"first_gen_log_probs": [{-1: Logprob(-0.5, 1)}]},
        {"first_gen_tokens": ["42"]},
        {"first_gen_tokens": [VOCAB]},
        {"draft_tokens": [1, VOCAB]},
        {"draft_tokens": [-1]},
        {"ctx_request_id": 1 << 63},
        {"ctx_request_id": -1},
        {"disagg_request_id": 1.5},
        {"ctx_dp_rank": 1 << 31},
        {"ctx_info_endpoint": 5},
        {"opaque_state": 5},
    ],
)
def test_transfer_value_out_of_range_is_rejected_by_name(bad: dict[str, Any]) -> None:
    kv_params = sent()
    inside = decode(kv_params.engine_state, dict)
    plain = {name: wire._plain(name, value) for name, value in bad.items()}
    inside["params"] |= plain
    with pytest.raises(TransferMismatch, match=next(iter(bad))):
        unpack(with_state(encode(inside)))


def test_transfer_without_needed_field_is_rejected_by_name() -> None:
    for name in ("first_gen_tokens", "ctx_request_id"):
        inside = decode(sent().engine_state, dict)
        del inside["params"][name]
        with pytest.raises(TransferMismatch, match=name):
            unpack(with_state(encode(inside)))


def test_library_fields_can_all_be_sent() -> None:
    named = LIBRARY.needed["DisaggregatedParams"] + LIBRARY.optional["DisaggregatedParams"]
    assert set(named) == {"request_type", *wire._SentParams.__struct_fields__}


def test_transfer_field_unknown_to_decode_is_named() -> None:
    with pytest.raises(TransferMismatch) as caught:
        unpack(sent(disagg_request_id=9), OLD)
    assert caught.value.field == "disagg_request_id"


def test_transfer_of_another_inner_version_is_rejected() -> None:
    inside = decode(sent().engine_state, dict)
    for engine_state in (encode({**inside, "version": 9}), b"nonsense"):
        with pytest.raises(TransferMismatch):
            unpack(with_state(engine_state), OLD)


def test_transfer_of_python_transceiver_has_an_endpoint() -> None:
    answer = {
        "opaque_state": None,
        "ctx_info_endpoint": "tcp://10.0.0.1:5",
        "ctx_dp_rank": 0,
        "disagg_request_id": 9,
    }
    kv_params = sent(**answer)
    found = unpack(kv_params, runtime="PYTHON")
    assert found == {key: value for key, value in params(**answer).items() if value is not None} | {
        "request_type": "generation_only"
    }
    assert unpack(kv_params) == found
    with pytest.raises(TransferMismatch, match="PYTHON, and this worker's is CPP") as caught:
        unpack(kv_params, runtime="CPP")
    assert caught.value.field == "transceiver_runtime"


def test_transfer_with_state_is_of_cpp_transceiver() -> None:
    both = sent(ctx_info_endpoint="tcp://10.0.0.1:5")
    for kv_params in (sent(), both):
        unpack(kv_params, runtime="CPP")
        with pytest.raises(TransferMismatch):
            unpack(kv_params, runtime="PYTHON")


@pytest.mark.parametrize("lacking", ["first_gen_tokens", "ctx_request_id", "opaque_state"])
def test_pack_without_needed_field_is_rejected_by_name(lacking: str) -> None:
    with pytest.raises(RequestRejected, match=lacking):
        wire.pack(params(**{lacking: None}), release="1.2.1")


def test_pack_when_the_request_id_is_zero_then_it_counts() -> None:
    wire.pack(params(ctx_request_id=0), release="1.2.1")


def test_pack_of_unsendable_value_is_rejected_by_name() -> None:
    with pytest.raises(RequestRejected, match="draft_tokens"):
        wire.pack(params(draft_tokens=object()), release="1.2.1")


def test_context_global_ids_are_unique_63_bits() -> None:
    numbers = (1, 2, 3, 1 + (1 << 20), 1 + (1 << 24))  # a million calls are those of hours
    calls = [(instance_id, number) for instance_id in (1, 2, (1 << 63) - 1) for number in numbers]
    ids = [wire.context_params(*call, known=NEW)["disagg_request_id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(1 << 42 <= request_id < 1 << 63 for request_id in ids)


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_retries_of_unrepeatable_prefill_are_rejected(value: str) -> None:
    name = "TRTLLM_ENABLE_CONTEXT_FIRST_NO_RETRY_KV_TRANSFER_RETIREMENT"
    with pytest.raises(ConfigError, match=f"{name} is '{value}'.*unset it") as caught:
        wire.check_retries({name: value}.__getitem__)
    assert caught.value.field == name


@pytest.mark.parametrize("value", ["", "0", "false", " 0 "])
def test_retries_when_the_variable_is_off_then_they_are_allowed(value: str) -> None:
    wire.check_retries(lambda name: value)


def test_context_without_global_ids_sends_none() -> None:
    assert wire.context_params(5, 1, known=OLD) == {"request_type": "context_only"}
