"""What a worker accepts and rejects: calls, reserved slots, KV that waits to be fetched."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_trtllm.engines.engine_interface import EngineStats
from dynamo_trtllm.protocol.errors import KvTransfersFull, Overloaded
from dynamo_trtllm.protocol.messages import (
    MAX_RESERVATION_S,
    GenerateRequest,
    Phase,
    Sampling,
    token_ids,
)
from dynamo_trtllm.worker.worker_admission import WorkerAdmission


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def call(reservation_id: str | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=token_ids([1]),
        sampling=Sampling(max_tokens=1),
        deadline=2e9,
        reservation_id=reservation_id,
    )


def stats(*, pending_kv_blocks: int, total: int = 100) -> EngineStats:
    return EngineStats(
        running=0,
        waiting=0,
        kv_blocks_used=pending_kv_blocks,
        kv_blocks_total=total,
        pending_kv_transfers=7,
        pending_kv_blocks=pending_kv_blocks,
    )


def test_call_without_free_place_is_rejected(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=2, clock=clock)
    with admission.admit(call(), None):
        with admission.admit(call(), None):
            with pytest.raises(Overloaded, match="2 calls and 0 reserved slots of 2"):
                with admission.admit(call(), None):
                    raise AssertionError("it was let in")
            assert admission.active() == 2
        with admission.admit(call(), None):
            pass
    assert admission.active() == 0


def test_call_when_it_fails_then_its_place_is_free(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    with pytest.raises(ValueError, match="boom"), admission.admit(call(), None):
        raise ValueError("boom")
    assert admission.active() == 0


def test_call_when_no_limit_is_known_then_all_come_in(clock: Clock) -> None:
    admission = WorkerAdmission(clock=clock)
    admission.reserve("a", clock.now + 1)
    with admission.admit(call(), None), admission.admit(call(), None):
        assert admission.active() == 2
    assert admission.reserved_slots() == 0


def test_reservation_of_a_peer_lasts_a_minute_at_most(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 1e9)
    clock.now += MAX_RESERVATION_S
    assert admission.reserved_slots() == 0


def test_reservation_when_made_then_it_counts_as_a_call(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 10)
    with pytest.raises(Overloaded, match="0 calls and 1 reserved slots"):
        with admission.admit(call(), None):
            raise AssertionError("it was let in")
    with pytest.raises(Overloaded):
        admission.reserve("b", clock.now + 10)


def test_reservation_is_taken_by_its_call(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 10)
    with admission.admit(call("a"), None):
        assert (admission.active(), admission.reserved_slots()) == (1, 0)
    assert (admission.active(), admission.reserved_slots()) == (0, 0)


def test_reservation_given_back_frees_the_place(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 10)
    admission.unreserve("a")
    admission.unreserve("a")
    admission.reserve("b", clock.now + 10)
    assert admission.reserved_slots() == 1


def test_reservation_repeated_lasts_longer(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 1)
    admission.reserve("a", clock.now + 10)
    clock.now += 5
    assert admission.reserved_slots() == 1


def test_reservation_expired_goes_to_others(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=1, clock=clock)
    admission.reserve("a", clock.now + 1)
    clock.now += 1
    assert admission.reserved_slots() == 0
    admission.reserve("b", clock.now + 1)
    with pytest.raises(Overloaded), admission.admit(call("a"), None):
        raise AssertionError("it was let in")
    clock.now += 1
    with admission.admit(call("a"), None):
        assert admission.active() == 1


def test_prefill_over_transfer_share_is_rejected(clock: Clock) -> None:
    admission = WorkerAdmission(max_active=9, max_pending_kv_fraction=0.5, clock=clock)
    with admission.admit(call(), stats(pending_kv_blocks=50)):
        pass
    with admission.admit(call(), stats(pending_kv_blocks=51)):
        clock.now += 1
    with pytest.raises(Overloaded, match="7 pending KV transfers hold 51 of 100 KV blocks"):
        with admission.admit(call(), stats(pending_kv_blocks=51)):
            raise AssertionError("it was let in")
    assert admission.active() == 0


def test_prefill_after_one_long_prompt_is_accepted(clock: Clock) -> None:
    admission = WorkerAdmission(max_pending_kv_fraction=0.5, clock=clock)
    for blocks in (94, 0, 94, 0, 94):  # of 100: the next one comes right after the transfer
        with admission.admit(call(), stats(pending_kv_blocks=blocks)):
            clock.now += 0.6


def test_prefill_with_unknown_blocks_is_accepted(clock: Clock) -> None:
    admission = WorkerAdmission(max_pending_kv_fraction=0.5, clock=clock)
    with admission.admit(call(), stats(pending_kv_blocks=51, total=0)):
        pass


def prompt(tokens: int) -> GenerateRequest:
    return msgspec.structs.replace(call(), token_ids=token_ids([1] * tokens), phase=Phase.PREFILL)


def test_kv_for_other_workers_has_a_limit(clock: Clock) -> None:
    admission = WorkerAdmission(max_transfer_blocks=10, block_tokens=16, clock=clock)
    with admission.admit(prompt(64), stats(pending_kv_blocks=0)):
        # 4 blocks of the call that runs, and 3 of KV that waits.
        with pytest.raises(KvTransfersFull, match="takes 7 of at most 10"):
            with admission.admit(prompt(64), stats(pending_kv_blocks=3)):
                raise AssertionError("it was let in")
        with admission.admit(prompt(48), stats(pending_kv_blocks=3)):
            pass
        # It takes other calls.
        with admission.admit(prompt(1600), None):
            pass
    with admission.admit(prompt(160), stats(pending_kv_blocks=0)):
        pass


def test_refusal_of_kv_for_others_frees_what_it_counted(clock: Clock) -> None:
    admission = WorkerAdmission(max_transfer_blocks=10, block_tokens=16, clock=clock)
    for _ in range(20):
        with pytest.raises(KvTransfersFull):
            with admission.admit(prompt(161), stats(pending_kv_blocks=0)):
                raise AssertionError("it was let in")
    assert admission.active() == 0
    with admission.admit(prompt(160), stats(pending_kv_blocks=0)):
        pass
