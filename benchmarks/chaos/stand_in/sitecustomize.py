"""A stand-in for bugs of engines: ends the process of a worker that runs a request with a certain
session id.

Python imports this module at the start of a process that has its folder in PYTHONPATH. Only the
workers of `scripts/chaos` have it there, so no request can end a worker of another deployment in
this way.

The session id is TRIGGER, a cause (see `die`), a phase and a point, separated by colons. The phase
is "prefill", "decode" or "any". The point is a number of tokens which the call returns before,
LAST_STEP, or, in the phase "prefill", KV_READ: when KV is read from the worker after the call.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from typing import Any

from dynamo_trtllm.kv_transfer.tcp import PublishedRegions, TcpBackend
from dynamo_trtllm.protocol.errors import EngineFailed
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest
from dynamo_trtllm.protocol.streams import OnEvent, StreamEvent, StreamHandle
from dynamo_trtllm.worker.service import WorkerService

TRIGGER = "stand-in-query-of-death"
LAST_STEP = "last"
KV_READ = "kv"

_generate = WorkerService.generate
_send = TcpBackend._send
_dies_at_kv_read: list[tuple[WorkerService, str]] = []  # with the cause


def die(service: WorkerService, cause: str) -> None:
    """End this process, or its engine, as a bug of an engine does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    match cause:
        case "segmentation-fault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "out-of-memory":  # what the kernel sends then
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "system-exit":  # a library that calls sys.exit in the event loop
            raise SystemExit(1)
        case "engine-failed":  # an engine in processes of its own: this one outlives it
            _fail_engine(service.engine, "the engine has died")


def _fail_engine(engine: Any, reason: str) -> None:
    """Fail an engine as it fails by itself: the adapter of a library, the torch engine, or the mock
    engine.
    """
    if hasattr(engine, "fail"):
        engine.fail(reason)
    elif hasattr(engine, "_end"):
        engine._end(EngineFailed(reason))
    else:
        raise EngineFailed(reason)


def generate(service: WorkerService, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
    """Run a call as `WorkerService.generate` does, unless it carries the trigger for this phase."""
    trigger, *rest = (request.conversation_id or "").split(":")
    if trigger != TRIGGER or rest[1] not in ("any", str(request.phase)):
        return _generate(service, request, on_event)
    cause = rest[0]
    point = rest[2]
    if point == "0":
        die(service, cause)
    num_tokens = 0

    def pass_on(event: StreamEvent) -> None:
        nonlocal num_tokens
        if not isinstance(event, Chunk):
            on_event(event)
            return
        num_tokens += len(event.token_ids)
        has_ended = event.finish_reason is not None
        if point == LAST_STEP and has_ended and event.kv_params is None:
            die(service, cause)
        if point == KV_READ and has_ended:
            _dies_at_kv_read.append((service, cause))
        on_event(event)
        if point.isdecimal() and num_tokens >= int(point):
            die(service, cause)

    return _generate(service, request, pass_on)


async def send(
    backend: TcpBackend, connection: socket.socket, magic: bytes, entry: PublishedRegions
) -> None:
    """Send KV as `TcpBackend._send` does, unless a request ends this worker when KV is read."""
    if _dies_at_kv_read:
        die(*_dies_at_kv_read.pop())
    await _send(backend, connection, magic, entry)


setattr(WorkerService, "generate", generate)  # noqa: B010  # replaces a method
setattr(TcpBackend, "_send", send)  # noqa: B010  # replaces a method
