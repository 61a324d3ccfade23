"""A request plane that calls worker services directly, in the same event loop.

Messages are not encoded, take no time, and are never lost. The order of events is that of the
calls.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo_trtllm.cluster.request_plane.client import PlaneClient, PlaneLimits
from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.receivers import StreamReceiver
from dynamo_trtllm.engines.mock.stream import MockStream
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.clocks import Clocks
from dynamo_trtllm.protocol.messages import Control, GenerateRequest, Phase
from dynamo_trtllm.protocol.streams import OnEvent, StreamEvent
from dynamo_trtllm.support.background import BackgroundTasks
from dynamo_trtllm.worker.service import WorkerCall, WorkerService

# A caller gets the load with an event of its streams, at most once in this time. This is the same
# as in `cluster.request_plane.server`.
_LOAD_EVERY_S: Final = 0.05


class _Worker:
    """A service, and when its callers next get its load."""

    __slots__ = ("next_load_s", "service")

    def __init__(self, service: WorkerService) -> None:
        self.service = service
        self.next_load_s = 0.0


class DirectClient(PlaneClient):
    """Calls services by their subjects.

    Args:
        clocks: the clocks of the simulation.
        transport: carries what workers broadcast.
    """

    def __init__(self, clocks: Clocks, transport: InprocTransport) -> None:
        super().__init__(transport, PlaneLimits(), BackgroundTasks(), _ignore)
        self._clocks = clocks
        self._workers: dict[str, _Worker] = {}
        # By id of a request: the longest time between two tokens of its call that generates them.
        self.worst_gaps_s: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, service: WorkerService) -> None:
        """Make a service known."""
        self._workers[service.instance.subject] = _Worker(service)

    def generate(self, subject: str, request: GenerateRequest, on_event: OnEvent) -> StreamReceiver:
        """Start one call. See `PlaneClient.generate`."""
        worker = self._workers[subject]
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            # The timer is set below, before the stream can end.
            deadline.cancel()
            # A call that was rejected has no stream of the engine.
            stream = source.source if isinstance(source, WorkerCall) else None
            if isinstance(stream, MockStream) and request.phase is not Phase.PREFILL:
                self.worst_gaps_s[request.request_id] = stream.worst_gap_s

        def send_cancel(*, awaits_kv: bool) -> None:
            # If the KV of the prompt is awaited, the call is only stopped, so that it sends the KV.
            # `stop` returns False if it can't do that.
            is_stopped = awaits_kv and source.stop()
            if not is_stopped:
                source.cancel()

        receiver = StreamReceiver(on_event, self._tasks, on_end, send_cancel)
        left_s = request.deadline - self._clocks.epoch()
        deadline = loop.call_later(left_s, _deadline_passed, receiver)
        source = worker.service.generate(request, self._events_of(worker, receiver))
        return receiver

    def _events_of(self, worker: _Worker, receiver: StreamReceiver) -> OnEvent:
        """Return what passes the events of a call to its receiver, and loads to this client."""
        emit = receiver.emit
        on_report = self._on_load
        if on_report is None:
            return emit
        now = self._clocks.monotonic

        def on_event(event: StreamEvent) -> None:
            emit(event)
            if now() >= worker.next_load_s:
                worker.next_load_s = now() + _LOAD_EVERY_S
                on_report(worker.service.load_report())

        return on_event

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        """Send a control verb. See `PlaneClient.control`."""
        return await self._workers[subject].service.control(verb)

    async def check_listener(self, subject: str, *, num_pings: int = 1) -> None:
        """Do nothing: services do not end within a simulation."""


class DirectPlane(RequestPlane):
    """A request plane whose client calls services directly."""

    client: DirectClient

    def __init__(self, clocks: Clocks) -> None:
        transport = InprocTransport()
        super().__init__(transport, PlaneLimits())
        # The client reads what workers publish by this plane.
        self.client = DirectClient(clocks, transport)


def _deadline_passed(receiver: StreamReceiver) -> None:
    receiver.emit(errors.DeadlineExceeded.while_generating())


def _ignore(_error: errors.BadFrame) -> None: ...
