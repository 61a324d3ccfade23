"""The state machine of a request, event by event: without a network, a clock or a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.errors import (
    Disconnected,
    Draining,
    DynamoError,
    KvTransferError,
    NoInstances,
    Overloaded,
    RequestRejected,
    StreamIncomplete,
    TransferFailed,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.frontend.generation.flow import GenerationFlow, State
from dynamo_trtllm.frontend.generation.flow_events import (
    Action,
    CallWorker,
    PipelineOptions,
    RecordFailure,
    RecordTransfer,
    ReserveDecodeSlot,
    RouteTrace,
    SelectOtherDecode,
    SelectWorkers,
    SendControl,
    Signal,
    WaitForWorkers,
)
from dynamo_trtllm.messages import (
    Chunk,
    FinishReason,
    Phase,
    ReleaseKv,
    ReleaseOutcome,
    ReleaseSlot,
    Role,
    token_ids,
)
from dynamo_trtllm.router.policy import WorkerSelection
from tests.instances import make_instance
from tests.unit.frontend.pipeline_helpers import FINISHED, kv_chunk, request

PREFILL, DECODE, OTHER_DECODE = (
    make_instance(1, role=Role.PREFILL),
    make_instance(2, role=Role.DECODE),
    make_instance(3, role=Role.DECODE),
)
SLOT_FIRST = msgspec.structs.replace(DECODE, strategy="decode_first")
PAIR = WorkerSelection(PREFILL, DECODE)
ALONE = WorkerSelection(None, make_instance(4, role=Role.AGGREGATED))
SELECT = SelectWorkers(0, frozenset(), None, False)
FREED = SendControl(PREFILL, ReleaseKv("t", ReleaseOutcome.ABORTED))
FETCHED = SendControl(PREFILL, ReleaseKv("t", ReleaseOutcome.FETCHED))
NONE = NoInstances("none")


def flow(**options: Any) -> GenerationFlow:
    return GenerationFlow(request(), RouteTrace(), PipelineOptions(**options))


def played(machine: GenerationFlow, *events: Any) -> Sequence[Action]:
    """Return the actions of the last event."""
    actions: Sequence[Action] = ()
    for event in events:
        actions = machine.on(event)
    return actions


def phases(actions: Sequence[Action]) -> list[tuple[int, Phase]]:
    return [(each.worker.id, each.request.phase) for each in actions if isinstance(each, CallWorker)]


TO_DECODE = (Signal.START, PAIR, kv_chunk("t"))


def test_flow_when_a_pair_serves_then_each_event_leads_to_the_next_call() -> None:
    machine = flow()
    assert machine.on(Signal.START) == (SELECT,)
    assert (phases(machine.on(PAIR)), machine.state) == ([(1, Phase.PREFILL)], State.PREFILL)
    assert (phases(machine.on(kv_chunk("t"))), machine.state) == ([(2, Phase.DECODE)], State.DECODE)
    assert machine.on(FINISHED[0]) == (FETCHED, RecordTransfer((1, 2)), FINISHED[0])
    assert machine.on(FINISHED[1]) == (FINISHED[1],)
    assert machine.on(FINISHED[2]) == (FINISHED[2],)
    assert machine.state is State.ENDED


def test_flow_when_one_worker_does_both_then_there_is_one_call() -> None:
    machine = flow()
    assert phases(played(machine, Signal.START, ALONE)) == [(4, Phase.AGGREGATED)]
    assert machine.on(FINISHED[0]) == (RecordTransfer((None, 4)), FINISHED[0])


def test_flow_when_the_decode_slot_comes_first_then_the_decode_call_names_it() -> None:
    machine = flow()
    (reserve,) = played(machine, Signal.START, WorkerSelection(PREFILL, SLOT_FIRST))
    assert isinstance(reserve, ReserveDecodeSlot)
    assert phases(machine.on(Signal.SLOT_RESERVED)) == [(1, Phase.PREFILL)]
    (call,) = machine.on(kv_chunk("t"))
    assert isinstance(call, CallWorker)
    assert call.request.reservation_id == reserve.reservation_id


@pytest.mark.parametrize(
    ("events", "freed"),
    [
        ((), []),
        ((Signal.START,), []),
        ((Signal.START, NONE), []),
        ((Signal.START, WorkerSelection(PREFILL, SLOT_FIRST)), [ReleaseSlot("r1-1")]),
        ((Signal.START, PAIR), []),
        (TO_DECODE, [ReleaseKv("t", ReleaseOutcome.ABORTED)]),
        ((*TO_DECODE, Draining("leaves")), [ReleaseKv("t", ReleaseOutcome.ABORTED)]),
        ((*TO_DECODE, TransferFailed("broke")), []),  # freed by then
        ((*TO_DECODE, FINISHED[0]), []),  # fetched
        ((*TO_DECODE, *FINISHED), []),
    ],
)
def test_flow_when_it_is_cancelled_then_it_frees_what_it_holds_once_and_ends(
    events: Sequence[Any], freed: list[ReleaseKv | ReleaseSlot]
) -> None:
    machine = flow(hold_s=1.0)
    played(machine, *events)
    assert [each.message for each in machine.on(Signal.CANCEL) if isinstance(each, SendControl)] == freed
    assert machine.state is State.ENDED
    for event in (Signal.CANCEL, FINISHED[0], Disconnected("late"), PAIR, DECODE, Signal.WORKERS_CHANGED):
        assert machine.on(event) == ()


@pytest.mark.parametrize("events", [(Signal.START, PAIR), TO_DECODE])
def test_flow_when_a_call_fails_before_a_token_then_it_selects_without_that_worker(events: Sequence[Any]) -> None:
    machine = flow()
    played(machine, *events)
    *_, recorded, select = machine.on(Disconnected("gone"))
    assert isinstance(recorded, RecordFailure)
    failed = 1 if len(events) == 2 else 2
    assert recorded.worker.id == failed
    assert select == SelectWorkers(1, frozenset([failed]), None, False)


@pytest.mark.parametrize("error", [TransferFailed("broke"), TransferTimeout("it did not come")])
def test_flow_when_the_kv_transfer_fails_then_both_workers_stay_and_the_prefill_worker_is_avoided(
    error: KvTransferError,
) -> None:
    machine = flow()
    actions = played(machine, *TO_DECODE, error)
    assert actions == (
        RecordTransfer((1, 2), error),
        FREED,
        RecordFailure(DECODE, error, "retrying"),
        SelectWorkers(1, frozenset(), 1, False),
    )
    second = TransferFailed("again")
    *_, last = played(machine, PAIR, kv_chunk("u"), second)
    assert last is second


def test_flow_when_a_decode_worker_does_not_take_the_call_then_another_one_fetches_the_same_kv() -> None:
    machine = flow()
    assert played(machine, *TO_DECODE, Draining("leaves")) == (SelectOtherDecode(PREFILL, frozenset([2])),)
    _, call = machine.on(OTHER_DECODE)
    assert isinstance(call, CallWorker)
    assert call.worker is OTHER_DECODE
    assert call.request.kv_params is not None
    assert call.request.kv_params.transfer_id == "t"
    assert machine.on(Overloaded("full")) == (SelectOtherDecode(PREFILL, frozenset([2, 3])),)
    *_, select = machine.on(Signal.NO_OTHER_DECODE)
    assert select == SelectWorkers(1, frozenset([3]), None, False)


def test_flow_when_another_decode_worker_takes_over_then_the_slot_of_the_first_is_freed() -> None:
    machine = flow()
    played(machine, Signal.START, WorkerSelection(PREFILL, SLOT_FIRST), Signal.SLOT_RESERVED, kv_chunk("t"))
    played(machine, Draining("leaves"))
    _, freed, call = machine.on(OTHER_DECODE)
    assert freed == SendControl(SLOT_FIRST, ReleaseSlot("r1-1"))
    assert isinstance(call, CallWorker)
    assert call.request.reservation_id is None
    assert machine.on(Signal.CANCEL) == (FREED,)


def test_flow_when_no_slot_is_free_then_none_is_freed() -> None:
    machine = flow()
    played(machine, Signal.START, WorkerSelection(PREFILL, SLOT_FIRST))
    assert not [each for each in machine.on(Overloaded("full")) if isinstance(each, SendControl)]


def test_flow_when_a_stream_breaks_then_the_rest_migrates_with_the_tokens_so_far() -> None:
    machine = flow()
    played(machine, *TO_DECODE, FINISHED[0], FINISHED[1], Disconnected("gone"))
    (call,) = machine.on(PAIR)
    assert isinstance(call, CallWorker)
    assert list(call.request.token_ids) == [1, 2, 3, 10, 11, 12]
    assert (call.request.num_resumed_output_tokens, call.request.sampling.max_tokens) == (3, 5)


def test_flow_when_only_the_end_was_lost_then_it_ends_as_complete() -> None:
    machine = flow()
    chunk = Chunk(token_ids=token_ids(range(8)))  # as many as were requested
    *_, last = played(machine, *TO_DECODE, chunk, Disconnected("gone"))
    assert last == Chunk(finish_reason=FinishReason.LENGTH)
    assert machine.state is State.ENDED


@pytest.mark.parametrize("count", [0, 2])
def test_flow_when_calls_keep_failing_then_the_limit_ends_it_with_the_last_error(count: int) -> None:
    machine = flow(retries=count)
    played(machine, Signal.START)
    last: Sequence[Action] = ()
    for number in range(count + 1):
        assert machine.state is State.SELECTING
        last = played(machine, PAIR, Disconnected(str(number)))
    assert isinstance(last[-1], Disconnected)
    assert last[-1].message == str(count)


def test_flow_when_workers_do_not_accept_it_then_no_retry_is_counted() -> None:
    machine = flow(retries=0)
    *_, select = played(machine, Signal.START, ALONE, Draining("leaves"))
    assert select == SelectWorkers(1, frozenset([4]), None, False)


@pytest.mark.parametrize("error", [RequestRejected("no"), TransferMismatch("differ")])
def test_flow_when_an_error_is_not_a_workers_then_it_ends(error: DynamoError) -> None:
    machine = flow()
    events = (Signal.START, error) if isinstance(error, TransferMismatch) else (*TO_DECODE, error)
    assert played(machine, *events)[-1] is error
    assert machine.state is State.ENDED


def test_flow_when_prefill_returns_no_kv_then_it_is_retried() -> None:
    machine = flow()
    *_, recorded, _ = played(machine, Signal.START, PAIR, Chunk(finish_reason=FinishReason.KV_TRANSFER))
    assert isinstance(recorded, RecordFailure)
    assert isinstance(recorded.error, StreamIncomplete)


def test_flow_when_there_are_no_workers_then_it_waits_and_tries_unproven_pairs_before_it_ends() -> None:
    machine = flow(hold_s=3.0)
    assert played(machine, Signal.START, NONE) == (WaitForWorkers(3.0),)
    assert machine.on(Signal.WORKERS_CHANGED) == (SELECT,)
    assert machine.on(NONE) == (WaitForWorkers(3.0),)
    assert machine.on(Signal.WAIT_TIMED_OUT) == (SelectWorkers(0, frozenset(), None, True),)
    assert machine.on(NONE) == (NONE,)


def test_flow_when_all_workers_failed_then_they_are_tried_again_after_pauses_that_double() -> None:
    machine, limits = flow(retries=2, hold_s=3.0), []
    played(machine, Signal.START)
    for _ in range(2):
        (wait,) = played(machine, ALONE, Draining("leaves"), NONE)
        assert isinstance(wait, WaitForWorkers)
        limits.append(wait.limit_s)
        (again,) = played(machine, Signal.WAIT_TIMED_OUT, NONE)
        assert isinstance(again, SelectWorkers)
        assert again.excluded == frozenset()
    assert limits == [1.0, 2.0]
    last_try = played(machine, ALONE, Draining("for good"), NONE)
    assert [each.is_last_resort for each in last_try if isinstance(each, SelectWorkers)] == [True]
    (error,) = machine.on(NONE)
    assert isinstance(error, Draining)


def test_flow_when_all_workers_are_full_then_it_does_not_wait() -> None:
    machine = flow(hold_s=3.0)
    assert played(machine, Signal.START, ALONE, Overloaded("full"), NONE) == (
        SelectWorkers(1, frozenset([4]), None, True),
    )
    (error,) = machine.on(NONE)
    assert isinstance(error, Overloaded)


def test_probe_when_it_fails_then_it_ends_at_once_and_records_only_the_transfer() -> None:
    error = TransferFailed("broke")
    probe = GenerationFlow(request(), RouteTrace(), PipelineOptions(), PAIR)
    assert phases(probe.on(Signal.START)) == [(1, Phase.PREFILL)]
    assert played(probe, kv_chunk("t"), error) == (RecordTransfer((1, 2), error), FREED, error)
    assert probe.state is State.ENDED


def test_probe_when_it_passes_then_its_caller_records_it() -> None:
    probe = GenerationFlow(request(), RouteTrace(), PipelineOptions(), PAIR)
    assert played(probe, Signal.START, kv_chunk("t"), FINISHED[0]) == (FETCHED, FINISHED[0])
