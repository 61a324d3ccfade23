"""`DisaggregatedParams` on their way from a prefill to a decode engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.trtllm import transfers as wire
from dynamo_trtllm.errors import ConfigError, RequestRejected, TransferMismatch
from dynamo_trtllm.messages import KvTransferParams, decode, encode
from tests.instances import make_transfer_params

OLD = frozenset({"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens"})
NEW = OLD | {"first_gen_log_probs", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint"}
BIG = (1 << 63) - 5


@dataclass
class Logprob:
    logprob: float
    rank: int | None


def params(**changes: Any) -> dict[str, Any]:
    return {"first_gen_tokens": [42], "ctx_request_id": BIG, "opaque_state": b"\x00\xff\x80state", **changes}


def with_state(engine_state: bytes) -> KvTransferParams:
    return msgspec.structs.replace(make_transfer_params("t"), engine_state=engine_state)


def sent(**changes: Any) -> KvTransferParams:
    """Return KV transfer parameters that have crossed the wire."""
    kv_params = with_state(wire.pack(params(**changes), release="1.2.1"))
    return decode(encode(kv_params), KvTransferParams)


def test_transfer_when_it_has_crossed_the_wire_then_ids_and_state_are_unharmed() -> None:
    found = wire.unpack(sent(draft_tokens=[1, 2]), known=OLD, logprob=None)
    assert found == params(draft_tokens=[1, 2], request_type="generation_only")


def test_transfer_when_logprobs_are_objects_then_they_are_rebuilt() -> None:
    given = [[{42: Logprob(-0.5, 1), 7: Logprob(-1.5, None)}]]
    assert wire.unpack(sent(first_gen_log_probs=given), known=NEW, logprob=Logprob)["first_gen_log_probs"] == given


def test_transfer_when_it_holds_a_field_that_decode_lacks_then_the_field_is_named() -> None:
    with pytest.raises(TransferMismatch) as caught:
        wire.unpack(sent(disagg_request_id=9), known=OLD, logprob=None)
    assert caught.value.field == "disagg_request_id"


def test_transfer_when_its_inside_is_of_another_version_then_refused() -> None:
    inside = decode(sent().engine_state, dict)
    for engine_state in (encode({**inside, "version": 9}), b"nonsense"):
        with pytest.raises(TransferMismatch):
            wire.unpack(with_state(engine_state), known=OLD, logprob=None)


def test_transfer_when_the_transceiver_is_python_then_an_endpoint_takes_the_place_of_the_state() -> None:
    answer = {"opaque_state": None, "ctx_info_endpoint": "tcp://10.0.0.1:5", "ctx_dp_rank": 0, "disagg_request_id": 9}
    kv_params = sent(**answer)
    found = wire.unpack(kv_params, known=NEW, logprob=None, runtime="PYTHON")
    assert found == {key: value for key, value in params(**answer).items() if value is not None} | {
        "request_type": "generation_only"
    }
    assert wire.unpack(kv_params, known=NEW, logprob=None) == found
    with pytest.raises(TransferMismatch, match="PYTHON, and this worker's is CPP") as caught:
        wire.unpack(kv_params, known=NEW, logprob=None, runtime="CPP")
    assert caught.value.field == "transceiver_runtime"


def test_transfer_when_it_has_a_state_then_it_is_of_the_cpp_transceiver() -> None:
    both = sent(ctx_info_endpoint="tcp://10.0.0.1:5")
    for kv_params in (sent(), both):
        wire.unpack(kv_params, known=NEW, logprob=None, runtime="CPP")
        with pytest.raises(TransferMismatch):
            wire.unpack(kv_params, known=NEW, logprob=None, runtime="PYTHON")


@pytest.mark.parametrize("lacking", ["first_gen_tokens", "ctx_request_id", "opaque_state"])
def test_pack_when_something_needed_is_missing_then_refused_with_its_name(lacking: str) -> None:
    with pytest.raises(RequestRejected, match=lacking):
        wire.pack(params(**{lacking: None}), release="1.2.1")


def test_pack_when_the_request_id_is_zero_then_it_counts() -> None:
    wire.pack(params(ctx_request_id=0), release="1.2.1")


def test_pack_when_a_value_can_not_travel_then_refused_with_its_name() -> None:
    with pytest.raises(RequestRejected, match="draft_tokens"):
        wire.pack(params(draft_tokens=object()), release="1.2.1")


def test_context_when_release_knows_global_ids_then_they_are_unique_and_63_bits() -> None:
    numbers = (1, 2, 3, 1 + (1 << 20), 1 + (1 << 24))  # a million calls are those of hours
    calls = [(instance_id, number) for instance_id in (1, 2, (1 << 63) - 1) for number in numbers]
    ids = [wire.context_params(*call, known=NEW)["disagg_request_id"] for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(1 << 42 <= each < 1 << 63 for each in ids)


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_retries_when_the_library_must_not_get_a_prefill_call_twice_then_refused_by_name(value: str) -> None:
    name = "TRTLLM_ENABLE_CONTEXT_FIRST_NO_RETRY_KV_TRANSFER_RETIREMENT"
    with pytest.raises(ConfigError, match=f"{name} is '{value}'.*unset it") as caught:
        wire.check_retries({name: value}.__getitem__)
    assert caught.value.field == name


@pytest.mark.parametrize("value", ["", "0", "false", " 0 "])
def test_retries_when_the_variable_is_off_then_they_are_allowed(value: str) -> None:
    wire.check_retries(lambda name: value)


def test_context_when_release_knows_no_global_ids_then_none_is_sent() -> None:
    assert wire.context_params(5, 1, known=OLD) == {"request_type": "context_only"}
