"""Report once a second, to all frontends of a namespace, what clients take of the workers here.

With these reports, the shares of clients, the limits of API keys, and the limits on the requests
at workers hold for all processes of all frontends together, with a delay of a second. While NATS is
away, or if a report is lost, each process counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from dynamo_trtllm.access.key_usage import UsageTable
from dynamo_trtllm.access.other_frontends import REPORT_AGE_S
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.concurrency_limiter import (
    ConcurrencyLimiter,
    QueuedChoices,
)
from dynamo_trtllm.frontend.requests.token_counters import MAX_REPORTED
from dynamo_trtllm.frontend.routing.start_window import Stage, StartWindow
from dynamo_trtllm.frontend.routing.worker_capacity import WINDOW, ChoiceCosts
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.frontend_usage import (
    FrontendUsage,
    ModelUsage,
    frontend_usage_subject,
)
from dynamo_trtllm.protocol.messages import decode, encode

log = logging.getLogger(__name__)

REPORT_S: Final = 1.0  # the time between two reports of a process
# The weights of a process in which no request waits: the process counts as if it had a client of
# its own that waits.
_ONE_CLIENT: Final = {"": 1.0}


class _Received(NamedTuple):
    """A report of another process."""

    report: FrontendUsage
    received_s: float


class UsageReports:
    """The reports that the frontend processes of a namespace send each other.

    A frontend may have several processes.

    Args:
        limits: the limits of this process. What clients take here is read from them. Reports of
            other processes set which share of the workers this process may take.
        lacks_pairs: see `FleetHealth.lacks_pairs`.
        keys: usage of the API keys; None: no key has limits.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        lacks_pairs: Callable[[str], bool],
        keys: UsageTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._keys = keys
        self._lacks_pairs = lacks_pairs
        self._clock = clock
        self._id = secrets.randbits(62) + 1 if keys is None else keys.process_id
        self._frontend_id = self._id if keys is None else keys.frontend_id
        # The last report of each other process, by id of the process.
        self._received: dict[int, _Received] = {}

    async def run(
        self, plane: RequestPlane, namespace: str, on_unreadable: Callable[[], None]
    ) -> None:
        """Publish and receive reports until cancelled.

        Args:
            plane: connects the frontends.
            namespace: the namespace of the frontends.
            on_unreadable: called for each report that can't be read.
        """

        def receive(data: bytes, _: str) -> None:
            try:
                report = decode(data, FrontendUsage)
            except BadFrame as exc:
                on_unreadable()
                log.debug("unreadable report of a frontend: %s", exc.message)
                return
            self.receive(report)

        subject = frontend_usage_subject(namespace)
        unsubscribe = await plane.subscribe(subject, receive)
        try:
            while True:
                await self._limits.has_requests.wait()
                has_usage = True
                # Reports end with one that says that nothing is used.
                while has_usage:
                    self._limits.has_requests.clear()
                    report = self.report()
                    has_usage = bool(report.models or report.keys)
                    plane.try_publish(subject, encode(report))
                    self.set_shares()
                    await asyncio.sleep(REPORT_S)
        finally:
            await unsubscribe()

    def report(self) -> FrontendUsage:
        """Return what clients take here. Tokens are counted since the last report."""
        models: dict[str, ModelUsage] = {}
        for model, window in self._limits.start_windows.by_model.items():
            usage = model_usage(
                window, self._limits.choice_permits, lacks_pairs=self._lacks_pairs(model)
            )
            # Each running choice takes a part of the last stage until it ends.
            has_running = usage.taken[-1] > 0
            if has_running or usage.waiting or usage.tokens:
                models[model] = usage
        keys = {} if self._keys is None else self._keys.totals()
        return FrontendUsage(self._id, self._frontend_id, models, keys)

    def receive(self, report: FrontendUsage) -> None:
        """Take the report of a process."""
        if report.process == self._id:
            return
        self._received[report.process] = _Received(report, self._clock())
        for model in self._limits.start_windows.by_model:
            usage = report.models.get(model)
            if usage is not None:
                self._limits.choice_permits.counters(model).count_others(usage.tokens)
        # The processes of this frontend share memory, so only other frontends are counted here.
        if self._keys is not None and report.frontend != self._frontend_id:
            self._keys.others.report(report.process, report.keys)
        self.set_shares()

    def set_shares(self) -> None:
        """Set what this process may take of the workers, and what its clients are compared with."""
        now_s = self._clock()
        for process, received in list(self._received.items()):
            # A process without recent reports has ended, or its reports do not arrive.
            if now_s - received.received_s >= REPORT_AGE_S:
                del self._received[process]
        for model, window in self._limits.start_windows.by_model.items():
            others = []
            for received in self._received.values():
                usage = received.report.models.get(model)
                if usage is not None:
                    others.append(usage)
            window.set_limits(shares(self._limits.choice_permits.weights(model), others))
            self._limits.choice_permits.counters(model).note_others(
                chain.from_iterable(usage.waiting for usage in others),
                has_below=any(usage.has_below for usage in others),
            )


def model_usage(
    window: StartWindow, permits: ConcurrencyLimiter, *, lacks_pairs: bool = False
) -> ModelUsage:
    """Return what clients take of the workers of a model. Tokens count since the last call."""
    counters = permits.counters(window.model)
    counters.update()
    prefill, start, run = (usage.total for usage in window.usages)
    queued = permits.queued_choices(window.model)
    if window.full_stage is None:
        # The choices wait for permits of this frontend, not for workers, which have space.
        queued = QueuedChoices()
    return ModelUsage(
        taken=(prefill, start, run),
        waiting=dict(islice(permits.weights(window.model).items(), MAX_REPORTED)),
        tokens=counters.take_unreported(),
        has_below=counters.has_below,
        queued_choices=queued.choices,
        queued_tokens=window.computed_tokens(queued.prompt_tokens),
        waits_for_decode=window.full_stage is Stage.RUN,
        lacks_pairs=lacks_pairs,
    )


def shares(waiting: Mapping[str, float], others: Sequence[ModelUsage]) -> list[int]:
    """Return what a process may take of the workers of a model, as parts of WINDOW.

    Processes in which requests wait divide the workers in proportion to the weights of the clients
    that wait there. The other processes take what they need, but no more than equal parts.

    Args:
        waiting: weights of the clients whose requests wait in this process, by name.
        others: what other processes have reported.
    """
    own = waiting or _ONE_CLIENT
    busy = [usage.waiting for usage in others if usage.waiting]
    num_processes: Counter[str] = Counter()
    for names in (own, *busy):
        num_processes.update(names.keys())
    weight = _weight(own, num_processes)
    total = weight + sum(_weight(names, num_processes) for names in busy)
    # The part of all processes in which requests wait, if each other process takes an equal part.
    least = WINDOW * (1 + len(busy)) // (1 + len(others))
    limits: list[int] = []
    for index in range(len(ChoiceCosts._fields)):
        taken = sum(usage.taken[index] for usage in others if not usage.waiting)
        limits.append(int(max(least, WINDOW - taken) * weight / total))
    return limits


def _weight(waiting: Mapping[str, float], num_processes: Mapping[str, int]) -> float:
    """Return the weight of a process. Each client divides its weight among its processes."""
    return sum(weight / num_processes[name] for name, weight in waiting.items())
