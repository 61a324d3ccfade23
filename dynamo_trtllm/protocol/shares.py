"""Define the shares of elastic workers: how much of the prefill and of the decode work each takes.

The shares of all elastic workers of a namespace are one record, so that a change is one write, and
all frontends learn of it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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


ALL_WORK: Final = Shares(1.0, 1.0)
MAX_REASON_CHARACTERS: Final = 400


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
    wire: Count = 1  # WIRE_VERSION of the writer
