"""Fuzz the messages of the request plane and the records of etcd: MessagePack from any client."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from dynamo_trtllm.cluster.discovery.discovery_interface import RejectionChanged
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import (
    BadRecord,
    parse_instance_key,
    read_instance,
    shown_key,
    written,
)
from dynamo_trtllm.cluster.discovery.share_records import (
    read_share_table,
    share_key,
    written_share_table,
)
from dynamo_trtllm.cluster.request_plane.frames import (
    Ack,
    Batch,
    CancelStream,
    ClientMessage,
    ControlRequest,
    ErrorPayload,
    Frame,
    OpenStream,
    Ping,
    StreamReport,
    encode_frames,
    read_batch,
)
from dynamo_trtllm.frontend.responses_api.response_store import StoredResponse
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.frontend.routing.worker_load import (
    ClusterLoad,
    instance_cost,
)
from dynamo_trtllm.protocol.cost_model import CostModel
from dynamo_trtllm.protocol.errors import BadFrame, StreamIncomplete
from dynamo_trtllm.protocol.kv_events import KvCacheUpdate, pack_hashes
from dynamo_trtllm.protocol.messages import (
    WIRE_VERSION,
    Chunk,
    FileChunk,
    FinishReason,
    GenerateRequest,
    GetFile,
    LoadReport,
    OutputFormat,
    PhaseTimings,
    ReissueKvParams,
    ReleaseKv,
    ReleaseOutcome,
    ReserveSlot,
    ResyncKvEvents,
    Role,
    Sampling,
    StructuredOutput,
    TokenLogprob,
    decode,
    encode,
    token_ids,
)
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from tests.fuzz.target import Form, Target
from tests.kit.forecasts import predicted_times
from tests.kit.instances import make_instance, make_transfer_params

_RECEIVED = (
    *(ClientMessage, ControlRequest, Ack, LoadReport, KvCacheUpdate, FileChunk, StoredResponse),
    *(GenerateRequest, StreamReport),
)
_MAX_MESSAGE_BYTES = 300
_MAX_REASON_CHARS = 410  # of a record that is rejected
_KEY_END = b"\n"
_INSTANCE = msgspec.structs.replace(make_instance(1), publishes_kv_events=True)


def _encoded_again(value: Any) -> None:
    """Check that what was read is written and read as the same: NaN differs from itself."""
    data = encode(value)
    assert encode(decode(data, type(value))) == data


# --- frames of a worker -----------------------------------------------------------------------------


def check_frames(data: bytes) -> None:
    """Read a batch. Each unreadable frame fails its own stream, and nothing else does."""
    problems: list[BadFrame] = []
    try:
        batch = read_batch(data, problems.append)
    except BadFrame:
        assert len(problems) == 1
        return
    assert len(problems) <= 1
    if problems:
        assert batch.load is None
    _encoded_again(batch)
    for frame in batch.frames:
        if frame.failure is not None:
            frame.failure.error()
    _check_split(batch)


def _check_split(batch: Batch) -> None:
    """Check that frames which exceed the size of a message come in several, in the same order."""
    messages = encode_frames(batch.frames, _MAX_MESSAGE_BYTES, batch.load)
    received = [frame for message in messages for frame in decode(message, Batch).frames]
    assert [(frame.stream, frame.number) for frame in received] == [
        (frame.stream, frame.number) for frame in batch.frames
    ]
    for message in messages:
        if len(message) > _MAX_MESSAGE_BYTES:
            (frame,) = decode(message, Batch).frames
            assert frame.failure is not None


def _batches() -> Iterator[bytes]:
    scored = TokenLogprob(5, -0.5, ((5, -0.5), (7, float("-inf"))))
    stats = PhaseTimings(queue_s=0.5, more={"kv_transfer.read": 0.25}, transport="tcp")
    last = Chunk(finish_reason=FinishReason.STOP, stats=stats)
    kv = Chunk(finish_reason=FinishReason.KV_TRANSFER, kv_params=make_transfer_params("t1"))
    several = Chunk(token_ids=token_ids([1, 2]), logprobs=(scored, scored))
    failure = ErrorPayload.of(StreamIncomplete("frames are missing", field="n"))
    load = LoadReport(
        instance_id=1,
        number=2,
        running=3,
        waiting=4,
        queued_prefill_tokens=5,
        kv_blocks_used=6,
        kv_blocks_total=7,
        context_tokens=8,
        cost=CostModel(),
    )
    frames = [Frame(1, 0, 7), Frame(1, 1, several), Frame(2, 0, last), Frame(3, 0, kv)]
    yield encode(Batch(frames, StreamReport("s", 1, [(1, 2)]), load))
    yield encode(Batch([Frame(1, 0, None, failure)]))
    yield encode([[[1, 0, "x"], [2, 0, 5], "y", [3]], None])


# --- calls and control messages ----------------------------------------------------------------------


def check_calls(data: bytes) -> None:
    """Decode a message as each type that a process receives. BadFrame is the only error."""
    for wanted in _RECEIVED:
        try:
            value = decode(data, wanted)
        except BadFrame as exc:
            assert len(exc.message) < 5_000
            continue
        _encoded_again(value)
        if isinstance(value, LoadReport):
            _check_load(value)
        elif isinstance(value, KvCacheUpdate):
            _check_kv_events(value)


def _check_load(report: LoadReport) -> None:
    """Use a load report as the selection of workers does: all costs are numbers."""
    loads = ClusterLoad()
    loads.on_report(report, 0.0)
    load = loads.get(report.instance_id)
    assert math.isfinite(instance_cost(load, _INSTANCE, 7, 0))
    for role in Role:
        instance = msgspec.structs.replace(_INSTANCE, role=role)
        assert all(map(math.isfinite, predicted_times(load, instance)))


def _check_kv_events(update: KvCacheUpdate) -> None:
    """Apply an update, which the reader may reject with ValueError, and find a prompt."""
    known = ClusterPrefixes()
    known.add_instance(_INSTANCE)
    with contextlib.suppress(ValueError):
        known.on_update(update)
        known.on_update(update)
    known.remove_instance(_INSTANCE.id)
    assert not known.unsynced


def _calls() -> Iterator[bytes]:
    guided = StructuredOutput(
        alternatives=(OutputFormat(json_schema="{}", prefix="<|message|>"),),
        trigger="x",
        trigger_ids=token_ids([4]),
    )
    sampling = Sampling(
        max_tokens=5, temperature=0.5, logit_bias=((3, 1.5),), guided=guided, seed=-1, logprobs=2
    )
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids([1, 2]),
        sampling=sampling,
        deadline=5.0,
        kv_params=make_transfer_params("t1"),
        kv_receivers=(1, 2),
        dp_rank=0,
    )
    yield encode(ClientMessage(OpenStream(1, "inbox", request, 5.0, 4)))
    yield encode(ClientMessage(CancelStream(1, "inbox", True)))
    yield encode(ClientMessage(Ping("inbox", 1)))
    verbs = (
        ReleaseKv("t1", ReleaseOutcome.FETCHED),
        ReissueKvParams(make_transfer_params("t1"), (1,)),
        GetFile("a" * 64, 5),
        ReserveSlot("r", 5.0, 1.0),
        ResyncKvEvents(),
    )
    for verb in verbs:
        yield encode(ControlRequest(verb))
    yield encode(Ack(ErrorPayload("overloaded", "x"), b"data"))
    yield encode(LoadReport(1, 2, 3, 4, 5, 6, 7, 8))
    yield encode(FileChunk(b"data", 4))
    hashes = pack_hashes([1, 2])
    yield encode(
        KvCacheUpdate(instance_id=1, number=0, block_tokens=16, stored=hashes, removed=hashes)
    )
    yield encode(KvCacheUpdate(instance_id=1, number=1, cleared=True, snapshot=1, stored=hashes))
    yield encode(request)


# --- records ----------------------------------------------------------------------------------------


def check_records(data: bytes) -> None:
    """Read a record: the first line is its key."""
    head, _, record = data.partition(_KEY_END)
    key = head.decode("utf-8", "replace")
    shown = shown_key(key)
    assert "\n" not in shown
    assert len(shown) <= 300
    with contextlib.suppress(ValueError):
        parse_instance_key(key)
    events = InstanceCache().put(key, record)
    with contextlib.suppress(BadRecord):
        table = read_share_table(record)
        assert read_share_table(written_share_table(table)) == table
    try:
        instance = read_instance(key, record)
    except BadRecord as exc:
        reason = str(exc)
        assert len(reason) <= _MAX_REASON_CHARS
        assert reason.isprintable() or not any(ord(char) < 32 for char in reason)
        return
    own_key, again = written(instance)
    assert own_key == key
    assert written(read_instance(key, again)) == (key, again)
    assert not any(isinstance(event, RejectionChanged) for event in events)


def _records() -> Iterator[bytes]:
    for role in Role:
        instance = msgspec.structs.replace(make_instance(0xAB, role=role), can_aggregate=True)
        card = msgspec.structs.replace(
            instance.card,
            files={"tokenizer.json": "0" * 64},
            unsupported_features=("logprobs",),
        )
        full = msgspec.structs.replace(
            instance,
            card=card,
            kv_compat={"model": "/x"},
            kv_addresses=("127.0.0.1:5",),
            supported_features=("priority",),
        )
        for sent in (instance, full):
            key, record = written(sent)
            yield key.encode() + _KEY_END + record
    table = ShareTable(epoch=1, revision=2, workers={0xAB: Shares(0.5, 1.0)}, wire=WIRE_VERSION)
    yield share_key("dynamo").encode() + _KEY_END + written_share_table(table)


TARGETS = {
    "frames": Target(
        summary="batches of frames, which frontends receive from workers",
        check=check_frames,
        files=("cluster/request_plane/frames.py", "protocol/messages.py"),
        seeds=_batches,
        form=Form.MESSAGE_PACK,
        words=(b"stop", b"kv_transfer", b"handoff", b"ticket", b"token_ids", b"overloaded"),
    ),
    "calls": Target(
        summary="calls, control messages, replies, load reports and KV events",
        check=check_calls,
        files=(
            "protocol/messages.py",
            "frontend/routing/prefix_index.py",
            "frontend/routing/worker_load.py",
        ),
        seeds=_calls,
        form=Form.MESSAGE_PACK,
        words=(b"open", b"cancel", b"ping", b"release", b"reissue", b"file", b"reserve", b"ticket"),
    ),
    "records": Target(
        summary="records of instances and their keys in etcd",
        check=check_records,
        files=("cluster/discovery/records.py", "cluster/discovery/share_records.py"),
        seeds=_records,
        words=(b"v1/instances/dynamo/", b"card", b"pairing", b"files", b"wire", b"role"),
    ),
}
