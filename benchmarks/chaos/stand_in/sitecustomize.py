"""A stand-in for bugs of engines: ends the process of a worker that runs a request with a certain session id.

Python imports this module at the start of a process that has its folder in PYTHONPATH. Only the workers of
`scripts/chaos` have it there, so no request can end a worker of another deployment in this way.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

from dynamo_trtllm.errors import EngineFailed
from dynamo_trtllm.messages import Chunk, GenerateRequest
from dynamo_trtllm.streams import OnEvent, StreamEvent, StreamHandle
from dynamo_trtllm.worker.service import WorkerService

# The session id is this word, a cause, a phase and a number of tokens, separated by colons.
TRIGGER = "stand-in-query-of-death"

_generate = WorkerService.generate


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
        case "engine-failed":  # an engine in processes of its own: this one outlives it
            fail = getattr(service.engine, "fail", None)
            if fail is None:
                raise EngineFailed("the engine has died")
            fail("the engine has died")


def generate(service: WorkerService, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
    """Run a call as `WorkerService.generate` does, unless it carries the trigger for this phase."""
    trigger, *rest = (request.conversation_id or "").split(":")
    if trigger != TRIGGER or rest[1] not in ("any", str(request.phase)):
        return _generate(service, request, on_event)
    cause, num_left = rest[0], int(rest[2])
    if not num_left:
        die(service, cause)

    def count(event: StreamEvent) -> None:
        nonlocal num_left
        on_event(event)
        if isinstance(event, Chunk):
            num_left -= len(event.token_ids)
            if num_left <= 0:
                die(service, cause)

    return _generate(service, request, count)


setattr(WorkerService, "generate", generate)  # noqa: B010  # replaces a method
