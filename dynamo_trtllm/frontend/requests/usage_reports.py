"""Tell the other frontends of a namespace, once a second, what clients take of the workers here.

So the shares of clients, the limits of API keys, and the limits on what is at workers hold over all
processes of all frontends, as of a second ago. While NATS is away, or if a report is lost, each
process counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from dynamo_trtllm.access.key_usage import UsageTable
from dynamo_trtllm.access.other_frontends import REPORT_AGE_S
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.token_counters import MAX_REPORTED
from dynamo_trtllm.frontend.routing.worker_capacity import WINDOW, ChoiceCosts
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.frontend_usage import (
    FrontendUsage,
    ModelUsage,
    frontend_usage_subject,
)
from dynamo_trtllm.protocol.messages import decode, encode

log = logging.getLogger(__name__)

REPORT_S: Final = 1.0  # between two reports of a process
_ONE_CLIENT: Final = {"": 1.0}  # weights, as if the requests of one more client waited


class UsageReports:
    """The other frontend processes of a namespace, including those of the same frontend.

    Args:
        limits: of this process. What clients take is read from them, and the shares of the workers
            are set there.
        keys: usage of the API keys; None: no key has limits.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        keys: UsageTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._keys = keys
        self._clock = clock
        self._id = secrets.randbits(62) + 1
        self._frontend_id = self._id if keys is None else keys.frontend_id
        # By id of the process: its last report, and when it came.
        self._peers: dict[int, tuple[FrontendUsage, float]] = {}

    async def run(
        self, plane: RequestPlane, namespace: str, on_unreadable: Callable[[], None]
    ) -> None:
        """Publish and receive reports until cancelled.

        Args:
            plane: connects the frontends.
            namespace: of the frontends.
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
                while has_usage:  # the last report says that nothing is used
                    self._limits.has_requests.clear()
                    report = self.report()
                    has_usage = bool(report.models or report.keys)
                    plane.try_publish(subject, encode(report))
                    self.set_shares()
                    await asyncio.sleep(REPORT_S)
        finally:
            await unsubscribe()

    def report(self) -> FrontendUsage:
        """Return what clients take here. Tokens are those since the last report."""
        models: dict[str, ModelUsage] = {}
        for model, window in self._limits.start_windows.by_model.items():
            counters = self._limits.choices.counters(model)
            counters.update()
            prefill, start, run = (usage.total for usage in window.usages)
            waiting = self._limits.choices.weights(model)
            usage = ModelUsage(
                (prefill, start, run),
                dict(islice(waiting.items(), MAX_REPORTED)),
                counters.take_unreported(),
            )
            if run or waiting or usage.tokens:
                models[model] = usage
        keys = {} if self._keys is None else self._keys.totals()
        return FrontendUsage(self._id, self._frontend_id, models, keys)

    def receive(self, report: FrontendUsage) -> None:
        """Take the report of a process."""
        if report.process == self._id:
            return
        self._peers[report.process] = (report, self._clock())
        for model in self._limits.start_windows.by_model:
            usage = report.models.get(model)
            if usage is not None:
                self._limits.choices.counters(model).count_others(usage.tokens)
        # The processes of this frontend share memory.
        if self._keys is not None and report.frontend != self._frontend_id:
            self._keys.others.report(report.process, report.keys)
        self.set_shares()

    def set_shares(self) -> None:
        """Set what this process may take of the workers."""
        now_s = self._clock()
        for process, (_, reported_s) in list(self._peers.items()):
            if now_s - reported_s >= REPORT_AGE_S:
                del self._peers[process]  # it has ended, or nothing comes through
        for model, window in self._limits.start_windows.by_model.items():
            others = [
                report.models[model] for report, _ in self._peers.values() if model in report.models
            ]
            window.set_limits(shares(self._limits.choices.weights(model), others))


def shares(waiting: Mapping[str, float], others: Sequence[ModelUsage]) -> list[int]:
    """Return what a process may take of the workers of a model, as parts of WINDOW.

    Processes in which requests wait divide the workers in proportion to the weights of the clients
    that wait there. The others take what they need, but no more than equal parts.

    Args:
        waiting: weights of the clients whose requests wait in this process, by name.
        others: what other processes have reported.
    """
    own = waiting or _ONE_CLIENT
    busy = [usage.waiting for usage in others if usage.waiting]
    num_processes = Counter(name for names in (own, *busy) for name in names)
    weight = _weight(own, num_processes)
    total = weight + sum(_weight(names, num_processes) for names in busy)
    # What is for the processes in which requests wait, if the others take all that they can get.
    least = WINDOW * (1 + len(busy)) // (1 + len(others))
    limits: list[int] = []
    for index in range(len(ChoiceCosts._fields)):
        taken = sum(usage.taken[index] for usage in others if not usage.waiting)
        limits.append(int(max(least, WINDOW - taken) * weight / total))
    return limits


def _weight(waiting: Mapping[str, float], num_processes: Mapping[str, int]) -> float:
    """Return the weight of a process. Each client divides its weight among its processes."""
    return sum(weight / num_processes[name] for name, weight in waiting.items())
