"""Know what waits at the frontends, from the reports of their processes. Callers pass the time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from dynamo_trtllm.protocol.frontend_usage import FrontendUsage

# Processes report once a second while they have requests. After this time without a report, a
# process has ended, or has no requests.
REPORT_AGE_S: Final = 3.0


class FrontendQueue(NamedTuple):
    """The choices of requests for one model that are at no worker yet."""

    choices: int = 0
    tokens: int = 0  # of their prompts, as far as they have to be computed
    # The decode workers have no place for them. Otherwise the prefill workers have none.
    waits_for_decode: bool = False

    def part(self, fraction: float) -> FrontendQueue:
        """Return a fraction of the choices."""
        return self._replace(
            choices=round(fraction * self.choices), tokens=round(fraction * self.tokens)
        )


class _TimedReport(NamedTuple):
    report: FrontendUsage
    received_s: float


class FrontendQueues:
    """The queues of all frontends of a namespace."""

    def __init__(self) -> None:
        self._received: dict[int, _TimedReport] = {}  # the last report, by id of the process

    def on_report(self, report: FrontendUsage, now: float) -> None:
        """Take the report of a process. `now`: seconds of a monotonic clock."""
        self._received[report.process] = _TimedReport(report, now)

    def of_model(self, model: str, now: float) -> FrontendQueue:
        """Return what waits for a model at all processes together."""
        usages = [report.models[model] for report in self._reports(now) if model in report.models]
        # What most choices wait for decides. Processes differ only while a limit is nearly reached.
        at_decode = sum(usage.queued_choices for usage in usages if usage.waits_for_decode)
        at_prefill = sum(usage.queued_choices for usage in usages if not usage.waits_for_decode)
        return FrontendQueue(
            choices=at_decode + at_prefill,
            tokens=sum(usage.queued_tokens for usage in usages),
            waits_for_decode=at_decode > at_prefill,
        )

    def lacks_pairs(self, model: str, now: float) -> bool:
        """Return whether all processes that use a model have quarantined all pairs of it."""
        usages = [report.models[model] for report in self._reports(now) if model in report.models]
        return bool(usages) and all(usage.lacks_pairs for usage in usages)

    def _reports(self, now: float) -> Iterable[FrontendUsage]:
        """Return the reports of the processes that still report."""
        for process, received in list(self._received.items()):
            if now - received.received_s >= REPORT_AGE_S:
                del self._received[process]
        return [received.report for received in self._received.values()]
