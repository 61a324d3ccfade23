"""Log what a planner decides: a line for each change of shares, and few for the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from dynamo_trtllm.planner.decide import Decision, DecisionOutcome
from dynamo_trtllm.protocol.shares import Shares

log = logging.getLogger(__name__)

# Outcomes of predictions count as one kind: a load at a limit alternates between them every few
# seconds.
_PREDICTED: Final = frozenset(
    {
        DecisionOutcome.CHANGE,
        DecisionOutcome.DRAINED,
        DecisionOutcome.FITS,
        DecisionOutcome.NOTHING_BETTER,
        DecisionOutcome.WAITING,
    }
)

_MAX_SETTINGS: Final = 32  # most workers that a line names


class DecisionLog:
    """The decisions for one pool of workers, of which there is one a second.

    Changes of shares are logged at the level INFO, and so is a decision of another kind than the
    one before. All outcomes of predictions are one kind, and each other outcome is a kind of its
    own. A new outcome of the same kind is logged at the level DEBUG.

    Args:
        is_advice: the shares are not changed. Then the same changes are logged once.
    """

    def __init__(self, *, is_advice: bool) -> None:
        self._is_advice = is_advice
        self._last: Decision | None = None
        self._advised: Mapping[int, Shares] = {}  # the changes that were advised last
        self._num_unreachable = 0  # limits that were logged as unreachable

    def add(self, decision: Decision, pool: str) -> None:
        """Log a decision, if it differs from those before it. `pool`: the pool's name now."""
        last = self._last
        self._last = decision
        is_other_kind = last is None or _kind(last) != _kind(decision)
        is_change = bool(decision.changes)
        if self._is_advice and is_change:
            is_change = decision.changes != self._advised
            self._advised = decision.changes
        if is_change or is_other_kind:
            self._write(logging.INFO, decision, pool)
            self._num_unreachable = 0
        elif last is not None and last.outcome is not decision.outcome:
            self._write(logging.DEBUG, decision, pool)
        # A limit at the edge of what is possible is logged once until the shares change.
        if len(decision.unreachable) > self._num_unreachable:
            self._num_unreachable = len(decision.unreachable)
            log.warning("%s: %s", pool, "; ".join(decision.unreachable))

    def _write(self, level: int, decision: Decision, pool: str) -> None:
        if self._is_advice and decision.changes:
            what = f"would change {_settings(decision.changes)}"
        else:
            what = f"decided {decision.outcome}"
        log.log(level, "%s: %s: %s", pool, what, decision.reason)


def _settings(changes: Mapping[int, Shares]) -> str:
    """Return changes as `shares --set` takes them, such as "1f=1/0 2a=0/1"."""
    settings = []
    for instance_id, shares in changes.items():
        settings.append(f"{instance_id:x}={shares.prefill:g}/{shares.decode:g}")
    text = " ".join(settings[:_MAX_SETTINGS])
    num_more = len(settings) - _MAX_SETTINGS
    return f"{text} and {num_more} more" if num_more > 0 else text


def _kind(decision: Decision) -> str:
    return "predicted" if decision.outcome in _PREDICTED else decision.outcome
