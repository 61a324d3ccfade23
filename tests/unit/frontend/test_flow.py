"""The state machine of a request, event by event: without a network, a clock or a task."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions, Signal
from dynamo_trtllm.frontend.routing.generation_flow import GenerationFlow, State
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.suspects import Death, RequestProgress
from dynamo_trtllm.protocol.errors import (
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
    WorkerDied,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    Instance,
    Phase,
    ReleaseKv,
    ReleaseOutcome,
    ReleaseSlot,
    Role,
    token_ids,
)
from tests.kit.cases import each_case
from tests.kit.instances import make_instance
from tests.kit.routing import FINISHED, kv_chunk, request

PREFILL = make_instance(1, role=Role.PREFILL)
DECODE = make_instance(2, role=Role.DECODE)
OTHER_DECODE = make_instance(3, role=Role.DECODE)
SLOT_FIRST = msgspec.structs.replace(DECODE, strategy="decode_first")
KEEPING = msgspec.structs.replace(PREFILL, keeps_unfetched_kv=True)
PAIR = WorkerSelection(PREFILL, DECODE)
ALONE = WorkerSelection(None, make_instance(4, role=Role.AGGREGATED))
SELECT: tuple[Any, ...] = ("select", 0, frozenset(), None, False)
FREED = ("send_control", PREFILL, ReleaseKv("t", ReleaseOutcome.ABORTED))
FETCHED = ("send_control", PREFILL, ReleaseKv("t", ReleaseOutcome.FETCHED))
NONE = NoInstances("none")
NO_OTHER = None  # no other decode instance


class Played:
    """A flow whose driver records what is called, and answers selections with prepared results."""

    def __init__(self, selection: WorkerSelection | None = None, **options: Any) -> None:
        self._calls: list[tuple[Any, ...]] = []
        self._selected: deque[Any] = deque()
        self.timeline = ChoiceTimeline()
        self.flow = GenerationFlow(
            self, request(), self.timeline, RouterOptions(**options), selection
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._calls.append((name, *arguments))
            return self._selected.popleft() if name.startswith("select") else None

        return call

    def is_pause_short(self, decode: Instance) -> bool:
        """The first token is not sent early: see test_early_token.py."""
        return False

    def on(self, event: Any, *selected: Any) -> list[Any]:
        """Return the calls that an event causes, and after them the event for the client.

        `selected`: the results.
        """
        self._calls = []
        self._selected.extend(selected)
        event_out = self.flow.handle(event)
        assert not self._selected
        return self._calls if event_out is None else [*self._calls, event_out]

    def play(self, *events: Any) -> list[Any]:
        """Return what the last event causes. A tuple is an event with results of selections."""
        caused: list[Any] = []
        for event in events:
            caused = self.on(*event) if isinstance(event, tuple) else self.on(event)
        return caused


def phases(caused: Sequence[Any]) -> list[tuple[int, Phase]]:
    return [(action[1].id, action[2].phase) for action in named("call_worker", caused)]


def named(name: str, caused: Sequence[Any]) -> list[Any]:
    return [action for action in caused if isinstance(action, tuple) and action[0] == name]


TO_PREFILL = ((Signal.START, PAIR),)
TO_DECODE = (*TO_PREFILL, kv_chunk("t"))
TO_RESERVE = ((Signal.START, WorkerSelection(PREFILL, SLOT_FIRST)),)


def test_flow_of_a_pair_makes_each_next_call() -> None:
    played = Played()
    first = played.on(Signal.START, PAIR)
    assert first[0] == SELECT
    assert (phases(first), played.flow.state) == ([(1, Phase.PREFILL)], State.PREFILL)
    assert (phases(played.on(kv_chunk("t"))), played.flow.state) == (
        [(2, Phase.DECODE)],
        State.DECODE,
    )
    assert played.on(FINISHED[0]) == [FETCHED, ("record_transfer", (1, 2)), FINISHED[0]]
    assert played.on(FINISHED[1]) == [FINISHED[1]]
    assert played.on(FINISHED[2]) == [FINISHED[2]]
    assert played.flow.state is State.ENDED


def test_flow_when_one_worker_does_both_then_there_is_one_call() -> None:
    played = Played()
    assert phases(played.on(Signal.START, ALONE)) == [(4, Phase.AGGREGATED)]
    assert played.on(FINISHED[0]) == [("record_transfer", (None, 4)), FINISHED[0]]


def test_flow_decode_first_names_the_slot_in_the_call() -> None:
    played = Played()
    ((_, decode, reservation_id),) = named("reserve_decode_slot", played.play(*TO_RESERVE))
    assert decode is SLOT_FIRST
    assert phases(played.on(Signal.SLOT_RESERVED)) == [(1, Phase.PREFILL)]
    ((_, _, call),) = played.on(kv_chunk("t"))
    assert call.reservation_id == reservation_id


@each_case(
    ("events", "freed"),
    [
        ((), []),
        (((Signal.START, NONE),), []),
        (TO_RESERVE, [ReleaseSlot("r1-1")]),
        (TO_PREFILL, []),
        (TO_DECODE, [ReleaseKv("t", ReleaseOutcome.ABORTED)]),
        (
            (*TO_DECODE, (Draining("leaves"), OTHER_DECODE)),
            [ReleaseKv("t", ReleaseOutcome.ABORTED)],
        ),
        # while it is checked
        ((*TO_DECODE, TransferFailed("broke")), [ReleaseKv("t", ReleaseOutcome.ABORTED)]),
        ((*TO_DECODE, TransferFailed("broke"), (Signal.WORKER_LISTENS, PAIR)), []),  # freed by then
        ((*TO_DECODE, FINISHED[0]), []),  # fetched
        ((*TO_DECODE, *FINISHED), []),
    ],
)
def test_flow_cancelled_frees_what_it_holds_once(
    events: Sequence[Any], freed: list[ReleaseKv | ReleaseSlot]
) -> None:
    played = Played(hold_s=1.0)
    played.play(*events)
    assert [message for _, _, message in played.on(Signal.CANCEL)] == freed
    assert played.flow.state is State.ENDED
    for event in (Signal.CANCEL, FINISHED[0], Disconnected("late"), Signal.WORKERS_CHANGED):
        assert played.on(event) == []


@pytest.mark.parametrize(
    ("events", "phase"), [((), Phase.AGGREGATED), ((kv_chunk("t"),), Phase.DECODE)]
)
def test_flow_cancel_fetches_kv_that_only_a_fetch_frees(
    events: Sequence[Any], phase: Phase
) -> None:
    """The phase of an undecided call is the default: while prefill runs, there is no decode call
    yet.
    """
    played = Played()
    played.play((Signal.START, WorkerSelection(KEEPING, DECODE)), *events)
    ((name, prefill, decode, call),) = played.on(Signal.CANCEL)
    assert (name, prefill, decode, call.phase) == ("collect_kv", KEEPING, DECODE, phase)
    assert (call.kv_params is None) == (phase is Phase.AGGREGATED)
    assert played.flow.state is State.ENDED
    assert played.on(Signal.CANCEL) == []


@pytest.mark.parametrize(
    ("events", "freed"),
    [
        ((), [ReleaseSlot("r1-1")]),  # while the slot is reserved
        ((Signal.SLOT_RESERVED,), [ReleaseSlot("r1-1"), "collect_kv"]),  # there may be no KV
        ((Signal.SLOT_RESERVED, kv_chunk("t")), ["collect_kv"]),  # the decode call uses the slot
        ((Signal.SLOT_RESERVED, kv_chunk("t"), FINISHED[0]), []),  # fetched
    ],
)
def test_flow_cancel_during_fetch_frees_an_unused_slot(
    events: Sequence[Any], freed: list[Any]
) -> None:
    played = Played()
    played.play((Signal.START, WorkerSelection(KEEPING, SLOT_FIRST)), *events)
    caused = played.on(Signal.CANCEL)
    assert [action[2] if action[0] == "send_control" else action[0] for action in caused] == freed


@pytest.mark.parametrize(
    "events",
    [
        ((Disconnected("gone"), PAIR),),
        (TransferFailed("broke"), (Signal.WORKER_LISTENS, PAIR)),
        (RequestRejected("no"),),
    ],
)
def test_flow_failed_fetching_call_is_not_repeated(events: Sequence[Any]) -> None:
    played = Played()
    played.play((Signal.START, WorkerSelection(KEEPING, DECODE)), kv_chunk("t"))
    caused = played.play(*events)
    assert named("collect_kv", caused) == []
    assert [message for _, _, message in named("send_control", caused)] == [FREED[2]]


@pytest.mark.parametrize("events", [TO_PREFILL, TO_DECODE])
def test_flow_failed_before_a_token_avoids_that_worker(events: Sequence[Any]) -> None:
    played = Played()
    played.play(*events)
    *_, recorded, select, _ = played.on(Disconnected("gone"), PAIR)
    failed = 1 if len(events) == 1 else 2
    assert (recorded[0], recorded[1].id) == ("record_failure", failed)
    assert select == ("select", 1, frozenset([failed]), None, False)


@pytest.mark.parametrize("error", [TransferFailed("broke"), TransferTimeout("it did not come")])
def test_flow_failed_transfer_avoids_the_prefill_worker(error: KvTransferError) -> None:
    played = Played()
    assert played.play(*TO_DECODE, error) == [
        ("record_transfer", (1, 2), error),
        ("check_worker", PREFILL),
    ]
    assert played.on(Signal.WORKER_LISTENS, PAIR)[:-1] == [
        FREED,
        ("record_failure", DECODE, error, "retrying"),
        ("select", 1, frozenset(), 1, False),
    ]
    second = TransferFailed("again")
    assert played.play(kv_chunk("u"), second, Signal.WORKER_LISTENS)[-1] is second


def test_flow_prefill_worker_dead_in_transfer_has_failed() -> None:
    played = Played()
    transfer_error = TransferFailed("broke")
    death = WorkerDied("gone")
    assert played.play(*TO_DECODE, transfer_error, (death, PAIR))[:-1] == [
        FREED,
        ("record_death", PREFILL),
        ("is_death_explained", PREFILL),
        ("record_failure", PREFILL, death, "retrying"),
        ("select", 1, frozenset([1]), None, False),
    ]
    assert death.__cause__ is transfer_error


@pytest.mark.parametrize("tokens", [0, 1])
def test_deaths_by_another_request_use_up_no_retries(tokens: int) -> None:
    """Before and after the first token of the answer."""
    played = Played(retries=0, migrations=0)
    played.is_death_explained = lambda worker: True  # type: ignore[attr-defined]
    chunks = [FINISHED[0]] * tokens
    played.play((Signal.START, ALONE), *chunks)
    for _ in range(3):
        assert phases(played.on(WorkerDied("gone"), ALONE)) == [(4, Phase.AGGREGATED)]
    played.is_death_explained = lambda worker: False  # type: ignore[attr-defined]
    last = WorkerDied("gone")
    assert played.on(last)[-1] is last


def test_request_charged_with_two_late_deaths_awaits_its_turn() -> None:
    """Neither death has singled it out, so it is tried without other suspects."""
    played = Played()
    late = RequestProgress(50, 50)
    played.on(Signal.START, ALONE)
    played.timeline.suspicion.deaths = {Death(8, set(), set(), set()): late}
    played.on(WorkerDied("gone"), ALONE)
    awaits_trial = [played.flow.awaits_trial]
    played.timeline.suspicion.deaths[Death(9, set(), set(), set())] = late
    played.on(WorkerDied("gone"), ALONE)
    awaits_trial.append(played.flow.awaits_trial)
    assert awaits_trial == [False, True]


def test_flow_rejected_decode_call_moves_the_same_kv() -> None:
    played = Played()
    other, _, (_, worker, call) = played.play(*TO_DECODE, (Draining("leaves"), OTHER_DECODE))
    assert other == ("select_other_decode", PREFILL, frozenset([2]))
    assert worker is OTHER_DECODE
    assert call.kv_params is not None
    assert call.kv_params.transfer_id == "t"
    other, *_, select, _ = played.on(Overloaded("full"), NO_OTHER, PAIR)
    assert other == ("select_other_decode", PREFILL, frozenset([2, 3]))
    assert select == ("select", 1, frozenset([3]), None, False)


def test_flow_with_another_decode_worker_frees_first_slot() -> None:
    played = Played()
    played.play(*TO_RESERVE, Signal.SLOT_RESERVED, kv_chunk("t"))
    *_, freed, (_, _, call) = played.on(Draining("leaves"), OTHER_DECODE)
    assert freed == ("send_control", SLOT_FIRST, ReleaseSlot("r1-1"))
    assert call.reservation_id is None
    assert played.on(Signal.CANCEL) == [FREED]


def test_flow_when_no_slot_is_free_then_none_is_freed() -> None:
    assert not named("send_control", Played().play(*TO_RESERVE, (Overloaded("full"), PAIR)))


def test_try_forward_passes_no_first_chunk_of_an_attempt() -> None:
    played = Played(retries=1)
    token = Chunk(token_ids=token_ids([5]))
    played.play(*TO_DECODE)
    assert not played.flow.try_forward(token)
    played.on(token)
    assert played.flow.try_forward(token)
    played.on(WorkerDied("gone"), PAIR)
    assert not played.flow.try_forward(token)


def test_flow_broken_stream_migrates_the_rest() -> None:
    *_, (_, _, call) = Played().play(
        *TO_DECODE, FINISHED[0], FINISHED[1], (Disconnected("gone"), PAIR)
    )
    assert list(call.token_ids) == [1, 2, 3, 10, 11, 12]
    assert (call.num_resumed_output_tokens, call.sampling.max_tokens) == (3, 5)


def test_flow_with_only_its_end_lost_is_complete() -> None:
    played = Played()
    chunk = Chunk(token_ids=token_ids(range(8)))  # as many as were requested
    *_, last = played.play(*TO_DECODE, chunk, Disconnected("gone"))
    assert last == Chunk(finish_reason=FinishReason.LENGTH)
    assert played.flow.state is State.ENDED


def test_flow_with_only_its_end_lost_needs_no_migration() -> None:
    played = Played(migrations=0)
    chunk = Chunk(token_ids=token_ids(range(8)))  # as many as were requested
    *_, last = played.play(*TO_DECODE, chunk, Disconnected("gone"))
    assert last == Chunk(finish_reason=FinishReason.LENGTH)
    assert played.timeline.migrations == 0


@pytest.mark.parametrize("count", [0, 2])
def test_flow_of_failing_calls_ends_at_the_limit(count: int) -> None:
    played = Played(retries=count)
    last = played.play(*TO_PREFILL, *[(Disconnected("gone"), PAIR)] * count, Disconnected("last"))[
        -1
    ]
    assert isinstance(last, Disconnected)
    assert last.message == "last"


def test_flow_rejected_by_workers_counts_no_retry() -> None:
    *_, select, _ = Played(retries=0).play((Signal.START, ALONE), (Draining("leaves"), PAIR))
    assert select == ("select", 1, frozenset([4]), None, False)


@pytest.mark.parametrize("error", [RequestRejected("no"), TransferMismatch("differ")])
def test_flow_when_an_error_is_not_a_workers_then_it_ends(error: DynamoError) -> None:
    played = Played()
    events = (
        ((Signal.START, error),) if isinstance(error, TransferMismatch) else (*TO_DECODE, error)
    )
    assert played.play(*events)[-1] is error
    assert played.flow.state is State.ENDED


def test_flow_when_prefill_returns_no_kv_then_it_is_retried() -> None:
    recorded, *_ = Played().play(*TO_PREFILL, (Chunk(finish_reason=FinishReason.KV_TRANSFER), PAIR))
    assert recorded[0] == "record_failure"
    assert isinstance(recorded[2], StreamIncomplete)


def test_flow_without_workers_waits_for_unproven_pairs() -> None:
    played = Played(hold_s=3.0)
    assert played.on(Signal.START, NONE) == [SELECT, ("wait_for_workers", 3.0)]
    assert played.on(Signal.WORKERS_CHANGED, NONE) == [SELECT, ("wait_for_workers", 3.0)]
    assert played.on(Signal.WAIT_TIMED_OUT, NONE) == [("select", 0, frozenset(), None, True), NONE]


def test_flow_of_failed_workers_retries_with_doubling_pauses() -> None:
    played = Played(retries=2, hold_s=3.0)
    limits = []
    played.on(Signal.START, ALONE)
    for _ in range(2):
        ((_, limit_s),) = named("wait_for_workers", played.on(Draining("leaves"), NONE))
        limits.append(limit_s)
        again = named("select", played.on(Signal.WAIT_TIMED_OUT, NONE, ALONE))[-1]
        assert again[2] == frozenset()
    assert limits == [1.0, 2.0]
    last_try = played.on(Draining("for good"), NONE, NONE)
    assert [is_last_resort for *_, is_last_resort in named("select", last_try)] == [False, True]
    assert isinstance(last_try[-1], Draining)


def test_flow_when_all_workers_leave_later_then_it_waits_less() -> None:
    played = Played(retries=2, hold_s=3.0)
    round_ = (Signal.WAIT_TIMED_OUT, NONE, ALONE)
    played.play((Signal.START, ALONE), (Draining("leaves"), NONE), round_)
    # The first pause took 1 of 3 seconds, the second one takes the rest.
    assert named("wait_for_workers", played.on(Draining("leaves"), NONE))[0][1] == 2.0
    # Limits count from the end of the last attempt, so this wait ends at once.
    gone = played.on(Signal.WAIT_TIMED_OUT, NONE, NONE)
    assert named("wait_for_workers", gone)[0][1] == 2.0


def test_flow_when_all_workers_are_full_then_it_does_not_wait() -> None:
    *_, select, error = Played(hold_s=3.0).play(
        (Signal.START, ALONE), (Overloaded("full"), NONE, NONE)
    )
    assert select == ("select", 1, frozenset([4]), None, True)
    assert isinstance(error, Overloaded)


def test_failed_probe_records_only_the_transfer() -> None:
    error = TransferFailed("broke")
    played = Played(PAIR)
    assert phases(played.on(Signal.START)) == [(1, Phase.PREFILL)]
    assert played.play(kv_chunk("t"), error) == [("record_transfer", (1, 2), error), FREED, error]
    assert played.flow.state is State.ENDED


def test_probe_when_it_passes_then_its_caller_records_it() -> None:
    assert Played(PAIR).play(Signal.START, kv_chunk("t"), FINISHED[0]) == [FETCHED, FINISHED[0]]
