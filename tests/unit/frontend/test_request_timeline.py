"""What happens to a request is reported once, and what it holds is released when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.access.api_keys import ApiKey
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits, RequestAdmission
from dynamo_trtllm.frontend.requests.answer import Answer, RunningAnswers
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.choice import ChoiceDelta
from dynamo_trtllm.frontend.requests.completions import TEXT
from dynamo_trtllm.frontend.requests.fair_queue import Claim
from dynamo_trtllm.frontend.requests.preprocess import prepare_text
from dynamo_trtllm.frontend.requests.request_reports import RequestLog, extras_of
from dynamo_trtllm.frontend.requests.send_answer import RunningChoices
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline, TimelineSubscribers
from dynamo_trtllm.frontend.requests.token_counters import Client, CountedRequest
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.errors import Cancelled, Overloaded
from dynamo_trtllm.protocol.messages import ClientShare, PhaseTimings
from dynamo_trtllm.protocol.phases import Span
from dynamo_trtllm.protocol.streams import OnEvent, Stream
from dynamo_trtllm.support.http_server.exchange import FlushBatch, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.request_head import Headers
from tests.kit.admission import FREE
from tests.kit.frontend_app import MODEL, Catalog, ScriptedRouter, chunk


def received(subscribers: TimelineSubscribers) -> tuple[HttpRequest, RequestTimeline]:
    request = HttpRequest("POST", "/v1/completions", "", Headers(), "10.0.0.1", lambda: None)
    request.feed(b"{}")
    request.complete()
    return request, RequestTimeline(request, "completions", subscribers)


def answer_of_two_choices() -> Answer:
    body = CompletionRequest(model=MODEL, prompt=["hi"], n=2)
    plan = prepare_text(body, Catalog().get(MODEL), body.call("r", 0.0, ""))
    builder = TEXT.builder(ResponseMeta(id="cmpl-1", model=MODEL, created=0), body, plan)
    return Answer(
        "cmpl-1",
        builder,
        plan,
        is_streamed=False,
        wants_stats=False,
        nvext_fields=frozenset(),
        ignored="",
        on_complete=partial(TEXT.on_complete, builder, ""),
    )


def listening(events: list[tuple[Any, ...]]) -> TimelineSubscribers:
    """Return subscribers that note the name of each event, and its values after the timeline."""

    def note(name: str) -> Callable[..., None]:
        return lambda timeline, *values: events.append((name, *values))

    subscribers = TimelineSubscribers()
    for name, functions in vars(subscribers).items():
        functions.append(note(name))
    return subscribers


def test_timeline_reports_each_event_once_in_order() -> None:
    events: list[tuple[Any, ...]] = []
    _, timeline = received(listening(events))
    answer = answer_of_two_choices()
    timeline.body_received()
    timeline.planned(answer.plan)
    timeline.accepted(answer)
    timeline.left_queue()
    answer.create_choices()
    timeline.started()
    one, two = answer.choices
    for delta in (
        ChoiceDelta(index=1),  # without a token
        ChoiceDelta(index=1, tokens=1),
        ChoiceDelta(index=0, tokens=2),
        ChoiceDelta(index=1, tokens=1, finish="stop"),
        ChoiceDelta(index=0, tokens=1, finish="length"),
    ):
        timeline.delta_arrived(delta)
    timeline.ended("ok", 200)
    names = [name for name, *_ in events]
    assert names[:4] == ["received", "planned", "left_queue", "started"]
    assert events[4:8] == [
        ("first_token", two, True),
        ("first_token", one, False),
        ("last_token", two),
        ("last_token", one),
    ]
    assert names[8:] == ["ended"]
    end = events[8][1]
    assert (end.code, end.status, timeline.first_s) == ("ok", 200, two.timeline.first_s)


@pytest.mark.parametrize("first", [0, 1])
def test_phases_before_the_first_token_are_those_of_its_choice(first: int) -> None:
    _, timeline = received(TimelineSubscribers())
    answer = answer_of_two_choices()
    answer.create_choices()
    timeline.accepted(answer)
    timeline.started()
    assert timeline.ttft_phases(answer.choices) == {}
    begun_s = timeline.begun_s
    for number, choice in enumerate(answer.choices):
        choice.timeline.spans = [Span("select", begun_s + 1.0), Span("decode", begun_s + 3.0)]
        choice.timeline.num_spans_of_ttft = 1
        choice.timeline.first_s = begun_s + (2.0 if number == first else 3.0)
    phases = timeline.ttft_phases(answer.choices)
    assert sum(phases.values()) == pytest.approx(2.0)
    assert phases["frontend", "select"] == pytest.approx(1.0)


def test_log_line_excludes_one_token_choices_from_the_gap(caplog: pytest.LogCaptureFixture) -> None:
    subscribers = TimelineSubscribers()
    RequestLog().subscribe(subscribers)
    _, timeline = received(subscribers)
    answer = answer_of_two_choices()
    answer.create_choices()
    timeline.accepted(answer)
    timeline.started()
    for choice, num_tokens in zip(answer.choices, (5, 1), strict=True):
        choice.num_tokens = num_tokens
        choice.timeline.first_s = 10.0
        choice.timeline.last_s = 10.0 + 0.5 * (num_tokens - 1)
    with caplog.at_level(logging.INFO):
        timeline.ended("ok", 200)
    assert "tpot=0.5000s" in caplog.text


def test_stats_ignore_a_choice_without_tokens() -> None:
    _, timeline = received(TimelineSubscribers())
    answer = answer_of_two_choices()
    answer.wants_stats = True
    answer.create_choices()
    timeline.accepted(answer)
    timeline.started()
    one = answer.choices[1].timeline
    one.first_s = timeline.begun_s + 0.5
    one.last_s = timeline.begun_s + 1.5
    stats = extras_of(answer, timeline)["dynamo_trtllm"]
    assert stats["ttft_s"] == pytest.approx(0.5)
    without, with_tokens = stats["choices"]
    assert with_tokens["total_s"] == pytest.approx(1.5)
    assert without["ttft_s"] == without["total_s"] >= 0


async def test_choices_keep_the_order_of_waiting_deltas() -> None:
    on_event: list[OnEvent] = []
    writable = [True]
    written: list[bytes] = []

    class Router:
        view = ClusterView()

        def generate(self, request: Any, timeline: Any, listener: OnEvent) -> Stream:
            on_event.append(listener)
            return Stream(listener)

    class Response(HttpResponse):
        @property
        def is_writable(self) -> bool:
            return writable[0]

        def start_events(self, headers: Mapping[str, str] | None = None) -> None: ...

        def write(self, data: bytes) -> None:
            written.append(data)

    state = AppState(FrontendConfig(), Catalog(), Router(), FrontendMetrics())  # type: ignore[arg-type]
    _, timeline = received(TimelineSubscribers())
    answer = answer_of_two_choices()
    answer.is_streamed = True
    answer.create_choices()
    timeline.accepted(answer)
    timeline.started()
    response = Response(
        asyncio.Transport(), FlushBatch(), lambda: None, error_form=openai_error, stall_s=60.0
    )
    async with RunningChoices(answer, response, response, timeline, FREE, state) as deltas:
        arrived = aiter(deltas)
        waiting = asyncio.ensure_future(anext(arrived))
        await asyncio.sleep(0)
        one, two = on_event
        one(chunk("a"))
        assert len(written) == 1
        writable[0] = False
        one(chunk("b"))
        writable[0] = True
        two(chunk("c"))
        assert len(written) == 1
        assert [(await waiting).index, (await anext(arrived)).index] == [0, 1]
        waiting = asyncio.ensure_future(anext(arrived))
        await asyncio.sleep(0)
        one(chunk("d"))  # nothing waits any more
        assert len(written) == 2
        one(Overloaded("the worker is full"))
        two(chunk("e"))
        assert len(written) == 2
        with pytest.raises(Overloaded):
            await waiting


async def test_choices_of_failed_block_end_uncounted() -> None:
    router = ScriptedRouter([chunk("a"), asyncio.Event()])
    state = AppState(FrontendConfig(), Catalog(), router, FrontendMetrics())  # type: ignore[arg-type]
    _, timeline = received(TimelineSubscribers())
    answer = answer_of_two_choices()
    answer.create_choices()
    timeline.accepted(answer)
    timeline.started()
    response = HttpResponse(
        asyncio.Transport(), FlushBatch(), lambda: None, error_form=openai_error, stall_s=60.0
    )

    async def fail_after_first_delta() -> None:
        async with RunningChoices(answer, response, response, timeline, FREE, state) as deltas:
            async for _ in deltas:
                assert (router.running, len(state.output_budget.outputs)) == (2, 1)
                raise Overloaded("the worker is full")

    with pytest.raises(Overloaded):
        await fail_after_first_delta()
    await asyncio.sleep(0)
    assert (router.running, len(state.output_budget.outputs)) == (0, 0)


async def test_answer_of_ended_choices_is_not_found() -> None:
    running = RunningAnswers()
    answer = answer_of_two_choices()
    with running.track(answer, ""):
        assert running.builder(answer.id, "") is answer.builder
        assert running.builder(answer.id, "another") is None
    assert running.builder(answer.id, "") is None


@pytest.mark.parametrize("is_shutdown", [False, True])
async def test_cancelled_answer_leaves_its_task_as_it_was(is_shutdown: bool) -> None:
    running = RunningAnswers()
    answer = answer_of_two_choices()
    tracked = asyncio.Event()

    async def run() -> int:
        task = asyncio.current_task()
        assert task is not None
        try:
            with running.track(answer, ""):
                tracked.set()
                await asyncio.Event().wait()
        except Cancelled:
            pass
        return task.cancelling()

    task = asyncio.create_task(run())
    await tracked.wait()
    for _ in range(2):
        running.cancel(answer.id)
    if is_shutdown:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == 0


@pytest.mark.parametrize("fails", [True, False])
async def test_admission_returns_bytes_and_permits(fails: bool) -> None:
    limits = AdmissionLimits(FrontendConfig(max_inflight=2), ClusterView())
    request, timeline = received(TimelineSubscribers())
    try:
        with RequestAdmission(limits, timeline) as admission:
            body = await admission.read_body(request)
            assert (body.data, limits.body_budget.in_use) == (b"{}", 2)
            await admission.acquire_places(answer_of_two_choices().plan)
            assert limits.choice_permits.in_use == 2
            if fails:
                raise Overloaded("the worker is full")
            admission.release_body()
            assert (body.data, limits.body_budget.in_use) == (b"", 0)
    except Overloaded:
        assert fails
    assert (limits.body_budget.in_use, limits.choice_permits.in_use) == (0, 0)


async def test_admission_counts_output_twice_and_no_cached_tokens() -> None:
    limits = AdmissionLimits(FrontendConfig(), ClusterView())
    _, timeline = received(TimelineSubscribers())
    counter = limits.choice_permits.counters(MODEL).counter(Client(timeline.facts.client))
    answer = answer_of_two_choices()
    prompt_tokens = answer.plan.longest_prompt
    with RequestAdmission(limits, timeline) as admission:
        await admission.acquire_places(answer.plan)
        assert counter.value == 2 * prompt_tokens
        answer.create_choices()
        timeline.accepted(answer)
        timeline.started()
        answer.choices[0].num_tokens = 5
        answer.choices[1].timeline.prefill_stats = PhaseTimings(cached_tokens=prompt_tokens)
    assert counter.value == prompt_tokens + 2 * 5


@pytest.mark.parametrize(
    ("key", "priority", "rank"),
    [
        (None, -5, 0),  # no client places itself before others
        (None, 5, 5),
        (ApiKey(name="k", sha256="", priority=-3), -3, -3),
        (ApiKey(name="k", sha256="", priority=4), 7, 7),
    ],
)
async def test_priority_counts_among_clients_if_the_key_allows_it(
    monkeypatch: pytest.MonkeyPatch, key: ApiKey | None, priority: int, rank: int
) -> None:
    limits = AdmissionLimits(FrontendConfig(), ClusterView())
    claims: list[Claim] = []

    async def acquire(claim: Claim, *_: object) -> CountedRequest:
        claims.append(claim)
        return limits.choice_permits.counters(MODEL).begin(
            claim.client, ClientShare.EVEN, 0, lambda: 0
        )

    monkeypatch.setattr(limits.choice_permits, "acquire", acquire)
    request = HttpRequest("POST", "/v1/completions", "", Headers(), "10.0.0.1", lambda: None)
    request.sender = None if key is None else Tenant(key, None)
    plan = answer_of_two_choices().plan
    (first, *others) = plan.choices
    call = replace(first.request, priority=priority)
    plan = replace(plan, choices=(replace(first, request=call), *others))
    timeline = RequestTimeline(request, "completions", TimelineSubscribers())
    with RequestAdmission(limits, timeline) as admission:
        await admission.acquire_places(plan)
    (claim,) = claims
    assert (claim.rank, claim.priority) == (rank, priority)
    assert claim.client.name == ("10.0.0.1" if key is None else "k")
