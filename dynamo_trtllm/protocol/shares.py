"""Define the shares of elastic workers: how much prefill and decode work each worker takes.

The shares of all elastic workers of a namespace are in one record. So each change is one write, and
all frontends get the whole change at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from dynamo_trtllm.protocol.number_types import Count, EpochSeconds, Number, Share


class Shares(msgspec.Struct, frozen=True):
    """How much work of each kind a worker takes, compared with other workers of its model.

    A worker with a share of 0.5 gets half as many calls as a worker with a share of 1. A worker
    with a share of 0 gets such calls only if no other worker can run them. A worker of a fixed role
    counts as a worker with a share of 1 in its role.
    """

    prefill: Share
    decode: Share

    @property
    def problem(self) -> str:
        """Why a worker can't have these shares, as text, or "" if it can."""
        if self.prefill or self.decode:
            return ""
        return "both shares are 0, and the worker would get no calls; raise one of them"


def shares_object(shares: Shares, since_s: float | None) -> dict[str, Any]:
    """Return the shares of a worker as `/health` has them.

    Args:
        shares: the shares.
        since_s: when the shares changed last, in seconds since the epoch. None: they are the shares
            with which the worker has registered.
    """
    since = None
    if since_s is not None:
        since = datetime.fromtimestamp(since_s, UTC).isoformat(timespec="milliseconds")
    return {"prefill_share": shares.prefill, "decode_share": shares.decode, "shares_since": since}


ALL_WORK: Final = Shares(1.0, 1.0)
PREFILL_ONLY: Final = Shares(1.0, 0.0)
DECODE_ONLY: Final = Shares(0.0, 1.0)
MAX_REASON_CHARACTERS: Final = 400
MAX_WRITER_CHARACTERS: Final = 200
MAX_CHANGES: Final = 50  # most changes in the history of a table


class ShareChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The changes that one write has made in a share table, and the reason."""

    # The next three are values of the table that was written.
    epoch: Number = 0
    revision: Number = 0
    written_at: EpochSeconds = 0.0
    writer: str = ""  # the process that wrote the table: a planner, or `shares` of an operator
    reason: str = ""  # a planner's reason has the predicted times before and after the change
    # The shares before and after the change, by instance id of the workers whose shares were set.
    before: Mapping[Number, Shares] = {}
    after: Mapping[Number, Shares] = {}


class ShareTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shares of the elastic workers of a namespace.

    A worker that is not in the table has the shares with which it has registered.

    Frontends use the table that was written last. Epoch and revision are for the writers of the
    table. If the epoch of a writer is lower than that of the table, another writer has replaced it,
    and it must not write.
    """

    # The epoch of the planner that wrote the table. 0: no planner has written a table yet.
    epoch: Number = 0
    revision: Number = 0  # how many tables were written, including this one
    workers: Mapping[Number, Shares] = {}  # the shares, by instance id
    written_at: EpochSeconds = 0.0
    reason: str = ""  # why the shares were changed, as text for people
    # When the shares of each worker changed last, by instance id.
    since: Mapping[Number, EpochSeconds] = {}
    # The latest changes, including the change of this table. The newest change is last.
    history: tuple[ShareChange, ...] = ()
    wire: Count = 1  # the WIRE_VERSION of the writer
