"""The first token, sent when the prefill worker answers: in the flow, and over a request plane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.early_token import (
    DecodePauses,
    early_chunk,
    without_repeated,
)
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.request_router import RequestRouter, RoutedRequest
from dynamo_trtllm.frontend.routing.worker_load import ClusterLoad
from dynamo_trtllm.protocol.errors import (
    Disconnected,
    Draining,
    Overloaded,
    StreamIncomplete,
    TransferFailed,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    LoadReport,
    OutputFormat,
    RequestSlo,
    Role,
    Sampling,
    StructuredOutput,
    TokenLogprob,
    token_ids,
)
from tests.kit.cases import each_case
from tests.kit.generator_streams import routed_stream
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.routing import FINISHED, HANG, Cluster, kv_chunk, request

PARAMS = make_transfer_params("t")  # with the first token 10
LOGPROB = TokenLogprob(token_id=10, logprob=-1.0)


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    cluster.router = eager_router(cluster)
    return cluster


def eager_router(cluster: Cluster, **options: Any) -> RequestRouter:
    """Return a router that sends first tokens early, because decode workers answer at once."""
    router = RequestRouter(
        cluster.view, cluster.plane, RouterOptions(early_token_pause_s=60.0, **options)
    )
    for decode_id in (2, 3):
        router.pauses.note(decode_id, 0.001)
    return router


@each_case(
    "sampling",
    [
        {"guided": StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.5},
        {"seed": 1, "temperature": 0.5},
        {"logprobs": 2},  # and the prefill worker has reported none
    ],
)
def test_token_that_decode_may_change_is_not_sent_early(sampling: dict[str, Any]) -> None:
    assert early_chunk(Sampling(max_tokens=9, **sampling), PARAMS) is None


def test_early_token_has_its_log_probability() -> None:
    params = msgspec.structs.replace(PARAMS, first_logprobs=(LOGPROB,))
    early = early_chunk(Sampling(max_tokens=9, logprobs=2), params)
    assert early == Chunk(token_ids=token_ids([10]), logprobs=(LOGPROB,))


@each_case(
    ("sent", "chunks", "rest"),
    [
        ([10], [[10]], [[]]),
        ([10], [[10, 11]], [[11]]),
        ([10, 11], [[10], [11, 12]], [[], [12]]),
        ([10], [[], [10, 11]], [[], [11]]),
    ],
)
def test_repeated_tokens_are_dropped_in_any_chunks(
    sent: list[int], chunks: list[list[int]], rest: list[list[int]]
) -> None:
    to_come = token_ids(sent)
    found = []
    for ids in chunks:
        logprobs = tuple(TokenLogprob(token_id=id_, logprob=-1.0) for id_ in ids)
        chunk, to_come = without_repeated(
            Chunk(token_ids=token_ids(ids), logprobs=logprobs), to_come
        )
        assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
        found.append(list(chunk.token_ids))
    assert found == rest
    assert not to_come


@each_case(
    "chunk",
    [
        Chunk(token_ids=token_ids([11])),
        Chunk(token_ids=token_ids([11, 10])),
        Chunk(finish_reason=FinishReason.STOP),
    ],
)
def test_call_that_does_not_repeat_the_token_is_an_error(chunk: Chunk) -> None:
    with pytest.raises(StreamIncomplete, match="--early-token-pause-ms 0"):
        without_repeated(chunk, token_ids([10]))


# The phases before the first token stay.
RETRIED = ["select", "prefill", "retry", "select", "prefill", "first_token", "decode"]


@each_case(
    ("pauses", "is_short"),
    [
        ([], False),  # not known
        ([0.02], True),
        ([0.03], False),  # one does not say how much they vary
        ([0.03] * 10, True),
        ([0.03] * 10 + [0.2], False),
        ([0.03] * 10 + [0.2] + [0.03] * 20, True),
        ([0.01, 0.06] * 20, False),
        ([0.2] * 10 + [0.01] * 30, True),
        ([30.0] + [0.01] * 60, True),  # it counts as one second
    ],
)
def test_pause_is_short_if_nearly_all_are(pauses: list[float], is_short: bool) -> None:
    known = DecodePauses()
    for seconds in pauses:
        known.note(2, seconds)
    assert known.is_short(2, 0.05) is is_short
    assert not known.is_short(3, 0.05)


def test_pauses_of_workers_that_left_are_forgotten() -> None:
    known = DecodePauses()
    for decode_id in range(10_000):
        known.note(decode_id, 0.01)
    assert [known.is_short(decode_id, 1.0) for decode_id in (0, 9_999)] == [False, True]


@each_case(
    ("limit_s", "slo", "is_early"),
    [
        (60.0, None, True),
        (0.0, None, False),
        (60.0, RequestSlo(ttft_s=1.0), True),
        (60.0, RequestSlo(itl_s=60.0), True),
        (60.0, RequestSlo(itl_s=0.001), False),
    ],
)
def test_limit_of_the_pause_follows_that_between_tokens(
    limit_s: float, slo: RequestSlo | None, is_early: bool
) -> None:
    router = SimpleNamespace(
        options=RouterOptions(early_token_pause_s=limit_s, early_token_part=0.5),
        pauses=DecodePauses(),
        placement=None,
    )
    router.pauses.note(2, 0.01)
    asked = msgspec.structs.replace(request(), slo=slo)
    routed: Any = SimpleNamespace(_router=router, _flow=SimpleNamespace(request=asked))
    assert RoutedRequest.is_pause_short(routed, make_instance(2, role=Role.DECODE)) is is_early


def test_pause_is_not_short_while_the_worker_computes_prompts() -> None:
    """Its steps are longer then than in the pauses that are known."""
    loads = ClusterLoad()
    router = SimpleNamespace(
        options=RouterOptions(early_token_pause_s=60.0),
        pauses=DecodePauses(),
        placement=SimpleNamespace(loads=loads),
    )
    router.pauses.note(2, 0.01)
    routed: Any = SimpleNamespace(_router=router, _flow=SimpleNamespace(request=request()))
    decode = make_instance(2, role=Role.DECODE)

    def report(number: int, queued_tokens: int) -> None:
        idle = LoadReport(2, number, 0, 0, 0, 0, 1000, 0)
        loads.on_report(msgspec.structs.replace(idle, queued_prefill_tokens=queued_tokens), 0.0)

    assert RoutedRequest.is_pause_short(routed, decode)
    report(1, queued_tokens=5)
    assert not RoutedRequest.is_pause_short(routed, decode)
    report(2, queued_tokens=0)
    assert RoutedRequest.is_pause_short(routed, decode)
    # A whole request that no report includes yet.
    call = loads.of(2).place(prefill_tokens=5, kv_tokens=5)
    assert not RoutedRequest.is_pause_short(routed, decode)
    call.end()
    assert RoutedRequest.is_pause_short(routed, decode)


async def test_pauses_are_measured_without_early_tokens(cluster: Cluster) -> None:
    cluster.router = RequestRouter(
        cluster.view, cluster.plane, RouterOptions(early_token_pause_s=60.0)
    )
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")], [kv_chunk("u")])
    await cluster.add(2, Role.DECODE, FINISHED, FINISHED)
    spans = []
    for _ in range(2):
        timeline = ChoiceTimeline()
        await cluster.tokens(timeline)
        spans.append(timeline.num_spans_of_ttft)
    assert spans == [3, 2]


async def chunks_of(cluster: Cluster, timeline: ChoiceTimeline) -> AsyncIterator[Chunk]:
    async for chunk in routed_stream(cluster.router, request(), timeline):
        yield chunk


async def test_client_has_the_token_while_the_kv_moves(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")])
    decode = await cluster.add(2, Role.DECODE, [HANG])
    stream = chunks_of(cluster, ChoiceTimeline())
    first = await anext(stream)
    assert (list(first.token_ids), first.finish_reason) == ([10], None)
    await decode.hanging.wait()
    await stream.aclose()  # type: ignore[attr-defined]
    await decode.closed.wait()


async def test_stream_with_early_token_is_the_same_one(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")])
    await cluster.add(2, Role.DECODE, FINISHED)
    timeline = ChoiceTimeline()
    assert await cluster.tokens(timeline) == [10, 11, 12, 13]
    assert [span.phase for span in timeline.spans] == ["select", "prefill", "first_token", "decode"]
    assert timeline.num_spans_of_ttft == 2


@pytest.mark.parametrize(
    ("failure", "phases"),
    [
        # Another decode worker takes the call.
        (Draining("bye"), ["select", "prefill", "retry", "first_token", "decode"]),
        (TransferFailed("broke"), RETRIED),
        (Disconnected("gone"), RETRIED),
        # It has sampled another token.
        (Chunk(token_ids=token_ids([99])), RETRIED),
    ],
)
async def test_stream_continues_after_its_early_token(
    cluster: Cluster, failure: Any, phases: list[str]
) -> None:
    rest = [Chunk(token_ids=token_ids([11])), *FINISHED[2:]]
    params = msgspec.structs.replace(make_transfer_params("u"), first_token_ids=token_ids([11]))
    resumed = msgspec.structs.replace(kv_chunk("u"), kv_params=params)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")], [resumed])
    is_refused = isinstance(failure, Draining)
    decode = await cluster.add(2, Role.DECODE, [failure, HANG], rest)
    other = await cluster.add(3, Role.DECODE, FINISHED if is_refused else rest)
    timeline = ChoiceTimeline()
    tokens = await cluster.tokens(timeline)
    assert tokens == ([10, 11, 12, 13] if is_refused else [10, 11, 13])
    assert [span.phase for span in timeline.spans] == phases
    assert timeline.num_spans_of_ttft == 2
    assert (timeline.retries, timeline.migrations) == (0 if is_refused else 1, 0)
    last = (other.requests or decode.requests)[-1]
    assert list(last.token_ids) == ([1, 2, 3] if is_refused else [1, 2, 3, 10])
    assert last.num_resumed_output_tokens == (0 if is_refused else 1)


async def test_full_decode_workers_end_no_stream_that_has_begun(cluster: Cluster) -> None:
    cluster.router = eager_router(cluster, hold_s=0.05)
    params = msgspec.structs.replace(make_transfer_params("u"), first_token_ids=token_ids([11]))
    resumed = msgspec.structs.replace(kv_chunk("u"), kv_params=params)
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")], [resumed])
    rest = [Chunk(token_ids=token_ids([11])), *FINISHED[2:]]
    await cluster.add(2, Role.DECODE, [Overloaded("full")], rest)
    assert await cluster.tokens() == [10, 11, 13]


async def test_stream_that_decode_has_continued_migrates(cluster: Cluster) -> None:
    repeated = Chunk(token_ids=token_ids([10]))
    await cluster.add(1, Role.PREFILL, [kv_chunk("t")], [RuntimeError()])  # type: ignore[list-item]
    await cluster.add(2, Role.DECODE, [repeated, FINISHED[1], Disconnected("gone")])
    await cluster.add(3, Role.AGGREGATED, [FINISHED[2]])
    timeline = ChoiceTimeline()
    assert await cluster.tokens(timeline) == [10, 11, 12, 13]
    assert (timeline.retries, timeline.migrations) == (0, 1)
