"""Count the KV transfers that a worker rejects, by reason."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

from dynamo_trtllm.protocol.errors import TransferRejected
from dynamo_trtllm.protocol.messages import KvTransferParams


class Rejection(StrEnum):
    """The reasons for which a prefill or decode worker rejects a KV transfer.

    The error is TransferExpired for EXPIRED, and TransferRejected for all others.
    """

    NO_RECEIVER = "no_receiver"
    UNSIGNED = "unsigned"
    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    FORGED = "forged"
    WRONG_REQUEST = "wrong_request"
    WRONG_RECEIVER = "wrong_receiver"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    WRONG_PREFILL_WORKER = "wrong_prefill_worker"
    UNKNOWN_PREFILL_WORKER = "unknown_prefill_worker"
    WRONG_ADDRESS = "wrong_address"


CountRejection: TypeAlias = Callable[[Rejection], None]
"""A function that counts a rejection by its reason."""


def count_nothing(reason: Rejection) -> None:
    """Count nothing, where there are no metrics."""


def rejection(
    kv_params: KvTransferParams, reason: Rejection, why: str, count: CountRejection
) -> TransferRejected:
    """Count a rejection, and return the error to raise."""
    count(reason)
    return TransferRejected(f"KV transfer {kv_params.transfer_id} was rejected: {why}")
