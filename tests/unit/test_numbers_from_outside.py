"""A number from another process is finite and in its range, or its message is rejected, and nothing
else ends.
"""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from dynamo_trtllm.cluster.discovery.discovery_interface import Added, CardChosen, RejectionChanged
from dynamo_trtllm.cluster.discovery.instance_cache import InstanceCache
from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import (
    Ack,
    Batch,
    ClientMessage,
    ControlRequest,
    Frame,
    StreamReport,
    _FrameHeader,
)
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.subjects import control_subject
from dynamo_trtllm.config.commands import (
    ChatConfig,
    ClearNamespaceConfig,
    ExplainConfig,
    LaunchConfig,
    ServeConfig,
    StatusConfig,
)
from dynamo_trtllm.config.deployment import DeploymentConfig, RestartConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.external.external_transfers import EngineState
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs
from dynamo_trtllm.engines.torch.kv_connector import TorchState
from dynamo_trtllm.engines.trtllm.transfer_params import _TrtllmState
from dynamo_trtllm.engines.vllm.transfer_params import RequiredParams, _VllmState
from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.completions import CompletionRequest
from dynamo_trtllm.frontend.api.messages import MessagesRequest
from dynamo_trtllm.frontend.api.request_model import RequestModel, parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.frontend.process.control_pipe import _Message
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.frontend.routing.worker_load import (
    ClusterLoad,
    instance_cost,
)
from dynamo_trtllm.kv_transfer.nixl.bindings import NixlOffer
from dynamo_trtllm.kv_transfer.tcp import _TcpOffer
from dynamo_trtllm.observability.recording_server import RecordingPart, RecordingQuery
from dynamo_trtllm.protocol.errors import BadFrame, ConfigError, InvalidRequest, StreamIncomplete
from dynamo_trtllm.protocol.frontend_samples import FrontendSample
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage
from dynamo_trtllm.protocol.kv_events import KvCacheUpdate
from dynamo_trtllm.protocol.messages import (
    FileChunk,
    Instance,
    KvTransferParams,
    LoadReport,
    decode,
    encode,
)
from dynamo_trtllm.protocol.number_types import MAX_INT64
from dynamo_trtllm.protocol.shares import ShareTable
from tests.kit.cases import each_case
from tests.kit.forecasts import predicted_times
from tests.kit.generator_streams import call_stream
from tests.kit.instances import make_instance, make_transfer_params
from tests.kit.number_fields import BAD_NUMBERS, bad_messages, good_message
from tests.unit.worker.test_service import ANSWER, MeteredService, PlainEngine, request

MESSAGES = (
    *(Ack, Batch, ClientMessage, ControlRequest, FileChunk, Frame, StreamReport, _FrameHeader),
    *(
        FrontendSample,
        FrontendUsage,
        Instance,
        KvCacheUpdate,
        KvTransferParams,
        LoadReport,
        RecordingPart,
        RecordingQuery,
        ShareTable,
        _Message,
    ),
    *(EngineState, NixlOffer, RequiredParams, TorchState, _TcpOffer, _TrtllmState, _VllmState),
)
# form: the types of engine states and offers
WITHOUT_NUMBERS = {"StoredResponse", "_RawBatch", "form"}
CONFIGS = (
    *(WorkerConfig, FrontendConfig, TorchArgs, MockArgs, RestartConfig, DeploymentConfig),
    *(ChatConfig, StatusConfig, ExplainConfig, LaunchConfig, ServeConfig, ClearNamespaceConfig),
)
MESSAGE = '"messages": [{"role": "user", "content": "x"}]'
BODIES: dict[type[RequestModel], str] = {
    ChatRequest: MESSAGE,
    CompletionRequest: '"prompt": "x"',
    MessagesRequest: f'{MESSAGE}, "max_tokens": 5',
    ResponseRequest: '"input": "x"',
    TokenizeRequest: '"prompt": "x"',
    DetokenizeRequest: '"tokens": [1]',
}
JSON_NUMBERS = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-1e999",
        "1e308",
        "-1e308",
        "-0.0",
        "-1",
        "true",
        '"5"',
        '"nan"',
    ),
    *(
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "9" * 400,
        "9" * 1_000_000,
    ),
)
# See the docstrings of these fields. Log-probabilities may be minus infinity.
READERS_CHECK = re.compile(
    r"\.(TokenLogprob\.(logprob|top)|Fit\.(coefficients|low|high))\b|\.(_Logprob\.logprob|first_gen_log_probs[][]*)$"
)
PACKAGE = Path(__file__).parents[2] / "dynamo_trtllm"
INSTANCE = msgspec.structs.replace(make_instance(1), publishes_kv_events=True)
KEY = instance_key(endpoint_of(INSTANCE), 1)


def test_decoded_message_types_are_all_listed() -> None:
    calls = re.compile(r"(?<![.\w])decode\([\w.]+, ([A-Z_]\w+|form)\)")
    decoded = {
        found
        for path in PACKAGE.rglob("*.py")
        for found in calls.findall(path.read_text(encoding="utf-8"))
    }
    assert len(decoded) > 12
    assert decoded - WITHOUT_NUMBERS <= {message.__name__ for message in MESSAGES}


@each_case("message", MESSAGES)
def test_bad_number_in_a_message_is_rejected_by_name(message: Any) -> None:
    decode(good_message(message), message)
    for bad in bad_messages(message):
        try:
            decode(bad.data, message)
        except BadFrame:
            continue
        assert not bad.is_never_valid or READERS_CHECK.search(bad.path), bad


@each_case("ids", [[-1], [1 << 32], [1], {"1": 2}, "1234", b"123"])
def test_token_ids_that_are_not_packed_are_rejected(ids: object) -> None:
    fields = msgspec.msgpack.decode(encode(make_transfer_params("t1")))
    with pytest.raises(BadFrame, match="KvTransferParams"):
        decode(msgspec.msgpack.encode(fields | {"first_token_ids": ids}), KvTransferParams)


async def test_worker_counts_bad_numbers_and_continues() -> None:
    transport = InprocTransport()
    bench = MeteredService(PlainEngine())
    num_unreadable = 0

    def count() -> None:
        nonlocal num_unreadable
        num_unreadable += 1

    plane = RequestPlane(transport, PlaneLimits(), on_unreadable=count)
    server = await plane.serve("s", bench.service)
    for message, subject in ((ClientMessage, "s"), (ControlRequest, control_subject("s"))):
        for bad in bad_messages(message):
            transport.publish(subject, bad.data)
    await asyncio.sleep(0)
    await server.until_finished()
    assert num_unreadable > 400
    chunks = [chunk async for chunk in call_stream(plane, "s", request())]
    assert chunks == list(ANSWER)
    await plane.aclose()


async def test_frontend_continues_despite_bad_worker_numbers() -> None:
    transport = InprocTransport()
    loads = ClusterLoad()
    known = ClusterPrefixes()
    cache = InstanceCache()
    plane = RequestPlane(transport, PlaneLimits())
    await plane.serve("s", MeteredService(PlainEngine()).service)
    await plane.client.watch_loads("dynamo", lambda report: loads.on_report(report, 0.0))
    known.add_instance(INSTANCE)
    gate = asyncio.Event()
    await plane.serve("waits", MeteredService(PlainEngine((gate, *ANSWER))).service)
    hit, other = (
        asyncio.create_task(anext(call_stream(plane, "waits", request()))) for _ in range(2)
    )
    for _ in range(20):  # both calls are acknowledged
        await asyncio.sleep(0)
    for bad in bad_messages(Batch):
        transport.publish("_INBOX.0", bad.data)
    for bad in bad_messages(LoadReport):
        transport.publish("dynamo.load", bad.data)
        await asyncio.sleep(0)
        instance_cost(loads.get(1), INSTANCE, 7, 0)
        predicted_times(loads.get(1), INSTANCE)
    for bad in bad_messages(KvCacheUpdate):
        with suppress(BadFrame, ValueError):  # see PrefixFeed
            known.on_update(decode(bad.data, KvCacheUpdate))
    for bad in bad_messages(Instance):
        cache.put(KEY, bad.data)
    with pytest.raises(StreamIncomplete):  # the frames have its number, 1
        await hit
    gate.set()
    assert await other == ANSWER[0]
    events = cache.put(KEY, encode(INSTANCE))
    assert [type(event) for event in events] == [CardChosen, RejectionChanged, Added]
    await plane.aclose()


def numeric_fields(model: type[BaseModel]) -> list[str]:
    """The names of the fields that may be a number."""
    return [
        name
        for name, field in model.model_fields.items()
        if re.search(r"\b(int|float)\b", str(field.annotation))
    ]


@each_case("config", CONFIGS)
def test_configuration_rejects_bad_numbers(config: type[BaseModel]) -> None:
    for name in numeric_fields(config):
        field = config.model_fields[name]
        adapter = TypeAdapter[Any](Annotated[field.annotation, field])
        for number in (*BAD_NUMBERS, 10**400, "1e999", "9" * 1_000_000):
            try:
                found = adapter.validate_python(number)
            except ValidationError:
                continue
            if isinstance(found, int | float):
                assert math.isfinite(found), (name, number)
                assert abs(found) <= MAX_INT64, (name, number)


@pytest.mark.parametrize("text", ["9" * 5000, "1e999", "NaN", "[" + "9" * 5000 + "]"])
def test_engine_arguments_json_rejects_bad_numbers(text: str) -> None:
    argv = [
        "--engine",
        "mock",
        "--model-path",
        "x",
        "--override-engine-args",
        f'{{"step_s": {text}}}',
    ]
    with pytest.raises(ConfigError):
        engine_arguments(load(WorkerConfig, prog="worker", argv=argv, environ={}), MockArgs, "mock")


@each_case("body", BODIES)
def test_request_body_rejects_bad_numbers(body: type[RequestModel]) -> None:
    for name in numeric_fields(body):
        for number in JSON_NUMBERS:
            try:  # of two equal keys, the last one counts
                parsed = parse(
                    body, f'{{"model": "x", {BODIES[body]}, "{name}": {number}}}'.encode()
                )
            except InvalidRequest:
                continue
            found = getattr(parsed, name)
            assert not isinstance(found, int | float) or math.isfinite(found)
