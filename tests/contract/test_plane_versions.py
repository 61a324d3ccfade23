"""Peers of the wire version before this one and of those after it, played message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.frames import (
    PING,
    Ack,
    Batch,
    CancelStream,
    ErrorPayload,
    Frame,
    OpenStream,
)
from dynamo_trtllm.cluster.request_plane.subjects import control_subject
from dynamo_trtllm.cluster.request_plane.transport import Receive, Transport, Unsubscribe
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    InternalError,
    StreamIncomplete,
    TransferTimeout,
    VersionMismatch,
)
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Chunk,
    FinishReason,
    GenerateRequest,
    Instance,
    TokenLogprob,
    decode,
    encode,
    token_ids,
    wire_mismatch,
)
from tests.kit.cases import each_case
from tests.kit.generator_streams import call_stream
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.request_planes import (
    LIMITS,
    SUBJECT,
    PlanePair,
    Script,
    ScriptedService,
    check_fails,
    collect,
    count_up,
    make_request,
    one_then_wait,
    until,
)
from tests.kit.waiting import SOON_S

LONG_S = 3 * LIMITS.ping_interval_s  # a peer that is not understood is given up by then


def link_of(plane: Any) -> Transport:
    return plane._transport  # type: ignore[no-any-return]


def plain(value: Any) -> list[Any]:
    """The message as lists and dictionaries, to be changed."""
    return msgspec.msgpack.decode(encode(value))  # type: ignore[no-any-return]


async def listen(transport: Transport, take: Receive) -> Unsubscribe:
    """Listen as a worker. Returns when all callers' messages arrive."""

    def take_or_answer(data: bytes, reply: str) -> None:
        if data == PING:
            transport.publish(reply, PING)
        else:
            take(data, reply)

    listening = await transport.subscribe(SUBJECT, take_or_answer)
    await transport.request(SUBJECT, PING, timeout_s=SOON_S)
    return listening


class Caller:
    """A caller with another wire version, which sends and answers what the test passes in."""

    def __init__(self, transport: Transport, answers: Callable[[bytes], bool]) -> None:
        self.transport = transport
        self.inbox = transport.new_inbox()
        self.answers = answers
        self.arrived: list[bytes] = []

    async def listen(self) -> None:
        await self.transport.subscribe(self.inbox, self.take)

    def take(self, data: bytes, reply: str) -> None:
        self.arrived.append(data)
        if reply and self.answers(data):
            self.transport.publish(reply, PING)

    def opening(self, wire: int, more: tuple[Any, ...] = ()) -> bytes:
        body = plain(OpenStream(1, self.inbox, make_request(seconds=60), 60.0))
        assert body[0] == "open"
        return msgspec.msgpack.encode([[*body[:5], wire, *more]])

    async def ask(self, data: bytes) -> Ack:
        return decode(await self.transport.request(SUBJECT, data, timeout_s=SOON_S), Ack)

    def frames(self) -> list[Frame]:
        return [
            frame for data in self.arrived if data != PING for frame in decode(data, Batch).frames
        ]


async def last_frame(bench: PlanePair, script: Script, wire: int) -> list[Any]:
    """Return the last frame that a caller of a wire version gets, as a list."""
    await bench.worker.serve(SUBJECT, ScriptedService(script))
    caller = Caller(link_of(bench.caller), answers=lambda data: True)
    await caller.listen()
    assert (await caller.ask(caller.opening(wire))).failure is None
    await until(lambda: len(caller.frames()) > 0)
    ((frames, *_), *_) = [
        msgspec.msgpack.decode(data) for data in caller.arrived if decode(data, Batch).frames
    ]
    return frames[-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("wire", "name"), [(WIRE_VERSION - 1, "handoff"), (WIRE_VERSION, "kv_transfer")]
)
async def test_last_chunk_when_caller_has_version_3_then_former_name(
    bench: PlanePair, wire: int, name: str
) -> None:
    async def prefill(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        params = make_transfer_params("t")
        yield Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=params)

    _, _, chunk, *_ = await last_frame(bench, prefill, wire)
    assert chunk["finish_reason"] == name
    assert decode(msgspec.msgpack.encode(chunk), Chunk).finish_reason is FinishReason.KV_TRANSFER


@pytest.mark.parametrize(
    ("wire", "code"), [(WIRE_VERSION - 1, "handoff_timeout"), (WIRE_VERSION, "transfer_timeout")]
)
async def test_error_when_caller_has_version_3_then_former_code(
    bench: PlanePair, wire: int, code: str
) -> None:
    async def decode_call(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise TransferTimeout("too late")
        yield

    failure = (await last_frame(bench, decode_call, wire))[3]
    assert failure[0] == code
    error = ErrorPayload(*failure).error()
    assert (type(error), error.code) == (TransferTimeout, "transfer_timeout")


async def test_token_arrives_with_its_log_probabilities(bench: PlanePair) -> None:
    scored = Chunk(token_ids=token_ids([7]), logprobs=(TokenLogprob(7, -0.5),))

    async def score(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield scored
        yield Chunk(finish_reason=FinishReason.STOP)

    await bench.worker.serve(SUBJECT, ScriptedService(score))
    assert (await collect(bench.caller, make_request()))[0] == scored


@pytest.mark.parametrize("ahead", [1, 2])
async def test_worker_serves_callers_of_the_next_version_only(bench: PlanePair, ahead: int) -> None:
    service = ScriptedService(count_up)
    await bench.worker.serve(SUBJECT, service)
    caller = Caller(link_of(bench.caller), answers=lambda data: True)
    await caller.listen()
    answer = await caller.ask(caller.opening(WIRE_VERSION + ahead, more=({"unknown": "field"}, 3)))
    if ahead == 1:
        assert answer.failure is None
        await until(lambda: len(caller.frames()) == 5)
    else:
        assert answer.failure is not None
        assert isinstance(answer.failure.error(), VersionMismatch)
        assert (
            f"wire versions {WIRE_VERSION + 2} (peer) and {WIRE_VERSION} (this process)"
            in answer.failure.message
        )
        assert not service.started.is_set()


async def test_cancel_by_caller_that_does_not_expect_kv_cancels_call(bench: PlanePair) -> None:
    """As releases before `awaits_kv` send it. Those releases skip the field."""
    service = ScriptedService(one_then_wait)
    await bench.worker.serve(SUBJECT, service)
    caller = Caller(link_of(bench.caller), answers=lambda data: True)
    await caller.listen()
    assert (await caller.ask(caller.opening(WIRE_VERSION))).failure is None
    await until(lambda: len(caller.frames()) == 1)
    short = msgspec.msgpack.encode([["cancel", 1, caller.inbox]])
    link_of(bench.caller).publish(SUBJECT, short)
    await asyncio.wait_for(service.closed.wait(), SOON_S)
    former = msgspec.defstruct(
        "Former", [("stream", int), ("inbox", str)], array_like=True, tag="cancel"
    )
    assert decode(encode(CancelStream(1, "i", awaits_kv=True)), former) == former(1, "i")


@pytest.mark.parametrize("subject", [SUBJECT, control_subject(SUBJECT)])
async def test_worker_rejects_unknown_later_message_and_continues(
    bench: PlanePair, subject: str
) -> None:
    await bench.worker.serve(SUBJECT, ScriptedService(count_up))
    for unknown in ([["migrate", 1, "inbox"]], [{"type": "migrate", "to": 7}], {"new": "form"}):
        transport = link_of(bench.caller)
        reply = await transport.request(subject, msgspec.msgpack.encode(unknown), timeout_s=SOON_S)
        failure = decode(reply, Ack).failure
        assert failure is not None
        assert failure.code == BadFrame.code
    assert len(await collect(bench.caller, make_request())) == 5


async def test_caller_ends_only_streams_with_unknown_messages(bench: PlanePair) -> None:
    gate = asyncio.Event()

    async def gated(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        yield Chunk(token_ids=token_ids([7]))
        await gate.wait()
        yield Chunk(finish_reason=FinishReason.STOP)

    service = ScriptedService(gated)
    await bench.worker.serve(SUBJECT, service)
    caller = bench.caller
    transport = link_of(bench.worker)
    async with (
        aclosing(call_stream(caller, SUBJECT, make_request(name="good", seconds=60))) as good,
        aclosing(call_stream(caller, SUBJECT, make_request(name="bad", seconds=60))) as bad,
    ):
        await anext(good)
        await anext(bad)
        inbox = caller.client._inbox_subject  # type: ignore[attr-defined]
        stream = max(caller.client._running[SUBJECT])  # type: ignore[attr-defined]
        fine = plain(Chunk(token_ids=token_ids()))
        for message in (
            ["a new kind of message", {"for": "streams"}],
            [[["another kind of frame"]], None],
            [[[9999, 0, {"finish_reason": "unknown to this version"}]], None],  # of no stream
            [[[stream - 1, 1, {**fine, "unknown": ["field"]}, None, "one more"]], None, "and more"],
            [[[stream, 1, {"finish_reason": "unknown to this version"}]], ["unknown", "report"]],
        ):
            transport.publish(inbox, msgspec.msgpack.encode(message))
        with pytest.raises(
            StreamIncomplete, match=r"unreadable frame.*unknown to this version.*compatible version"
        ):
            await asyncio.wait_for(anext(bad), SOON_S)
        # the one with unknown fields
        assert (await asyncio.wait_for(anext(good), SOON_S)).finish_reason is None
        await good.aclose()
    await until(lambda: service.open == 0)


async def test_failure_with_unknown_code_is_internal(bench: PlanePair) -> None:
    transport = link_of(bench.worker)

    def take(data: bytes, reply: str) -> None:
        if reply:
            transport.publish(
                reply,
                msgspec.msgpack.encode([["a_new_code", "something new", None, "more"], b"", 1]),
            )

    listening = await listen(transport, take)
    error = await check_fails(collect(bench.caller, make_request()), InternalError)
    assert error.message == "something new"
    await listening()


def test_instance_without_version_has_version_1() -> None:
    record = msgspec.msgpack.decode(encode(make_instance(1)))
    record.pop("wire", None)
    assert decode(msgspec.msgpack.encode({**record, "unknown": {"field": 1}}), Instance).wire == 1


@each_case(
    ("theirs", "works"), [(2, False), (3, True), (4, True), (5, True), (6, False), (-7, False)]
)
def test_wire_mismatch_allows_neighbor_versions(theirs: int, works: bool) -> None:
    assert (wire_mismatch(theirs) == "") is works
