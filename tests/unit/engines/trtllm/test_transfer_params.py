"""`DisaggregatedParams` on their way through a ticket, and the desk that writes and redeems them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from dynamo_trtllm import codec
from dynamo_trtllm.engines.external.pending_transfers import TransferIdentity
from dynamo_trtllm.engines.trtllm import transfers as wire
from dynamo_trtllm.engines.trtllm.bindings import Capabilities
from dynamo_trtllm.engines.trtllm.transfers import TrtllmTransfers
from dynamo_trtllm.errors import RequestRejected, TransferExpired, TransferMismatch
from dynamo_trtllm.messages import (
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    Sampling,
    TokenLogprob,
    token_ids,
)

OLD = frozenset({"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens"})
NEW = OLD | {"first_gen_log_probs", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint"}
BIG = (1 << 63) - 5
LAYOUT = KvLayout(dtype="fp8", block_tokens=32, num_layers=2, num_kv_heads=2, head_dim=16)


@dataclass
class Logprob:
    logprob: float
    rank: int | None


def params(**changes: Any) -> dict[str, Any]:
    return {"first_gen_tokens": [42], "ctx_request_id": BIG, "opaque_state": b"\x00\xff\x80state", **changes}


def transfers(
    fields: frozenset[str] = OLD, *, line: str = "1.2", ttl_s: float = 60.0, prefill_instance_id: int = 5
) -> TrtllmTransfers:
    capabilities = Capabilities(
        release=line, line=line, disagg_fields=fields, cache_salt=True, cached_tokens=True, structural_tag_format=True
    )
    kv_compat = {"release": line, "transceiver": "UCX", "attn_backend": "TRTLLM"}
    terms = TransferIdentity("trtllm", prefill_instance_id, "m", LAYOUT, kv_compat, transport="trtllm/ucx")
    return TrtllmTransfers(terms, capabilities, ttl_s=ttl_s, on_change=lambda: None)


def request(prompt: int = 40, kv_params: KvTransferParams | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(prompt)),
        sampling=Sampling(max_tokens=8),
        deadline=time.time() + 60,
        phase=Phase.DECODE if kv_params else Phase.PREFILL,
        kv_params=kv_params,
    )


def handed_out(at: TrtllmTransfers, **changes: Any) -> KvTransferParams:
    logprobs = (TokenLogprob(42, -0.5),)
    return at.export_kv(request(), params(**changes), logprobs, lambda: None)


def crossed(kv_params: KvTransferParams) -> KvTransferParams:
    return codec.decode(codec.encode(kv_params), KvTransferParams)


async def test_transfer_when_it_has_crossed_the_wire_then_ids_and_state_are_unharmed() -> None:
    kv_params = crossed(handed_out(transfers(), draft_tokens=[1, 2]))
    found = transfers().import_kv(request(kv_params=kv_params), None)
    assert found == params(draft_tokens=[1, 2], request_type="generation_only")
    assert list(kv_params.first_token_ids) == [42]
    assert kv_params.first_logprobs == (TokenLogprob(42, -0.5),)
    assert kv_params.kv_bytes == 64 * 2 * 2 * 2 * 16


async def test_transfer_when_logprobs_are_objects_then_they_are_rebuilt() -> None:
    told = [[{42: Logprob(-0.5, 1), 7: Logprob(-1.5, None)}]]
    kv_params = crossed(handed_out(transfers(NEW), first_gen_log_probs=told))
    assert transfers(NEW).import_kv(request(kv_params=kv_params), Logprob)["first_gen_log_probs"] == told


async def test_transfer_when_it_holds_a_field_that_decode_lacks_then_the_field_is_named() -> None:
    kv_params = crossed(handed_out(transfers(NEW), disagg_request_id=9))
    with pytest.raises(TransferMismatch) as caught:
        transfers(OLD).import_kv(request(kv_params=kv_params), None)
    assert caught.value.field == "disagg_request_id"


@pytest.mark.parametrize(("name", "theirs"), [("release", "1.1"), ("transceiver", "NIXL"), ("attn_backend", "FA")])
async def test_transfer_when_prefill_is_of_another_kind_then_the_difference_is_named(name: str, theirs: str) -> None:
    kv_params = handed_out(transfers())
    kv_params = msgspec.structs.replace(kv_params, kv_compat={**kv_params.kv_compat, name: theirs})
    with pytest.raises(TransferMismatch) as caught:
        transfers().import_kv(request(kv_params=kv_params), None)
    assert caught.value.field == name


async def test_transfer_when_prompts_differ_then_refused() -> None:
    with pytest.raises(TransferMismatch, match="the prompt has"):
        transfers().import_kv(request(41, kv_params=handed_out(transfers())), None)


async def test_transfer_when_it_is_late_then_expired() -> None:
    kv_params = msgspec.structs.replace(handed_out(transfers()), expires_at=time.time() - 1)
    with pytest.raises(TransferExpired):
        transfers().import_kv(request(kv_params=kv_params), None)


async def test_transfer_when_its_inside_is_of_another_version_then_refused() -> None:
    kv_params = handed_out(transfers())
    inside = codec.decode(kv_params.engine_state, dict)
    for engine_state in (codec.encode({**inside, "version": 9}), b"nonsense"):
        with pytest.raises(TransferMismatch):
            transfers().import_kv(
                request(kv_params=msgspec.structs.replace(kv_params, engine_state=engine_state)), None
            )


@pytest.mark.parametrize("lacking", ["first_gen_tokens", "ctx_request_id", "opaque_state"])
def test_pack_when_something_needed_is_missing_then_refused_with_its_name(lacking: str) -> None:
    with pytest.raises(RequestRejected, match=lacking):
        wire.pack(params(**{lacking: None}), release="1.2.1")


def test_pack_when_the_request_id_is_zero_then_it_counts() -> None:
    wire.pack(params(ctx_request_id=0), release="1.2.1")


def test_pack_when_a_value_can_not_travel_then_refused_with_its_name() -> None:
    with pytest.raises(RequestRejected, match="draft_tokens"):
        wire.pack(params(draft_tokens=object()), release="1.2.1")


def test_carried_when_release_is_old_then_only_its_names() -> None:
    assert wire.transferred_fields(OLD) == ("first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens")


async def test_kv_connector_when_nobody_fetches_then_the_engine_is_asked_to_give_up() -> None:
    at, given_up = transfers(), []
    for outcome in (ReleaseOutcome.FETCHED, ReleaseOutcome.ABORTED):
        kv_params = at.export_kv(request(), params(), (), lambda outcome=outcome: given_up.append(outcome))
        assert len(at) == 1
        at.release(kv_params.transfer_id, outcome)
        at.release(kv_params.transfer_id, outcome)
        assert len(at) == 0
    assert given_up == [ReleaseOutcome.ABORTED]


async def test_kv_connector_when_closed_then_no_transfer_is_held() -> None:
    at = transfers()
    handed_out(at)
    at.close()
    assert len(at) == 0


def test_context_when_release_knows_global_ids_then_they_are_unique_and_63_bits() -> None:
    desks = [transfers(NEW, prefill_instance_id=holder) for holder in (1, 2, (1 << 63) - 1)]
    ids = [at.context_params()["disagg_request_id"] for at in desks for _ in range(3)]
    assert len(set(ids)) == len(ids)
    assert all(1 << 42 <= each < 1 << 63 for each in ids)


def test_context_when_release_knows_no_global_ids_then_none_is_sent() -> None:
    assert transfers(OLD).context_params() == {"request_type": "context_only"}
