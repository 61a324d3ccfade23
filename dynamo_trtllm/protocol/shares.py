"""Define the shares of elastic workers: how much of the prefill and of the decode work each takes.

The shares of all elastic workers of a namespace are one record, so that a change is one write, and
all frontends learn of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from dynamo_trtllm.protocol.number_types import Count, EpochSeconds, Number, Share


class Shares(msgspec.Struct, frozen=True):
    """How much work of each kind a worker takes, compared with other workers of its model.

    A worker with a share of 0.5 gets half of the calls that one with 1 gets. With 0, it gets such
    calls only if no other worker can run them. Workers of fixed roles count as 1 in their role.
    """

    prefill: Share
    decode: Share

    @property
    def problem(self) -> str:
        """Why a worker can't have these shares, as text; "" if it can."""
        if self.prefill or self.decode:
            return ""
        return "both shares are 0, and the worker would get no calls; raise one of them"


def shares_object(shares: Shares, since_s: float | None) -> dict[str, Any]:
    """Return the shares of a worker as `/health` has them.

    Args:
        shares: the shares.
        since_s: when they changed last, in seconds since the epoch; None: they are those with which
            the worker has registered.
    """
    since = None
    if since_s is not None:
        since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="milliseconds")
    return {"prefill_share": shares.prefill, "decode_share": shares.decode, "shares_since": since}


ALL_WORK: Final = Shares(1.0, 1.0)
MAX_REASON_CHARACTERS: Final = 400
MAX_WRITER_CHARACTERS: Final = 200
MAX_CHANGES: Final = 50  # in the history of a table


class ShareChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one write of a share table has changed, and why."""

    epoch: Number = 0  # of the table, as the next two
    revision: Number = 0
    written_at: EpochSeconds = 0.0
    writer: str = ""  # the process that wrote it: a planner, or `shares` of an operator
    reason: str = ""  # of a planner: with the times that it predicted before and after
    before: Mapping[Number, Shares] = {}  # of the workers whose shares were set, by instance id
    after: Mapping[Number, Shares] = {}


class ShareTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shares of the elastic workers of a namespace.

    A worker that is not in it has the shares with which it has registered.

    Frontends use the table that was written last. Epoch and revision are for its writers: one whose
    epoch is lower than that of the table has been replaced, and must not write.
    """

    epoch: Number = 0  # of the planner that wrote it; 0: an operator, before there was a planner
    revision: Number = 0  # how many tables were written, with this one
    workers: Mapping[Number, Shares] = {}  # by instance id
    written_at: EpochSeconds = 0.0
    reason: str = ""  # why the shares were changed, as text for people
    # When the shares of each worker changed last, by instance id.
    since: Mapping[Number, EpochSeconds] = {}
    history: tuple[ShareChange, ...] = ()  # the latest writes with this one, the newest last
    wire: Count = 1  # WIRE_VERSION of the writer
