"""Plan the shares of all elastic workers of a namespace, from what is observed.

The module does no I/O and reads no clock: `process` runs it, and simulations in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dynamo_trtllm.planner.decide import ChangeTiming, Decision, decide
from dynamo_trtllm.planner.observe import Observer, PoolKey
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.shares import MAX_REASON_CHARACTERS, Shares

PLAN_EVERY_S: Final = 1.0


class Planner:
    """Decides once per call for each pool of workers.

    Args:
        observer: what is known of the workers.
        limits: the limits of the times of requests.
    """

    def __init__(self, observer: Observer, limits: TimeLimits) -> None:
        self._observer = observer
        self._limits = limits
        self._timings: dict[PoolKey, ChangeTiming] = {}

    def decisions(self, now: float) -> dict[PoolKey, Decision]:
        """Return a decision for each pool. The decisions of earlier calls count as carried out.

        Args:
            now: seconds of a monotonic clock.
        """
        decisions: dict[PoolKey, Decision] = {}
        timings: dict[PoolKey, ChangeTiming] = {}
        for key, observation in self._observer.observations(now).items():
            before = self._timings.get(key, ChangeTiming())
            decisions[key], timings[key] = decide(observation, self._limits, before)
        # The timings of pools that are gone are dropped.
        self._timings = timings
        return decisions


def changes_of(decisions: Mapping[PoolKey, Decision]) -> dict[int, Shares]:
    """Return the shares that all decisions together change, by instance id."""
    return {
        instance_id: shares
        for decision in decisions.values()
        for instance_id, shares in decision.changes.items()
    }


def reason_of(decisions: Mapping[PoolKey, Decision]) -> str:
    """Return why the shares change, short enough for a share table."""
    reasons = [
        f"{key.model}: {decision.reason}" for key, decision in decisions.items() if decision.changes
    ]
    return "; ".join(reasons)[:MAX_REASON_CHARACTERS]
