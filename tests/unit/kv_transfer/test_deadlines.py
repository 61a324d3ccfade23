"""What ends a fetch first, and what is said of it: whether the KV transfer is at fault decides what is
tried next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.pending_transfers import KvTransfers
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, first_deadline
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    DynamoError,
    TransferExpired,
    TransferFailed,
    TransferRejected,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvTransferParams,
    Role,
    Sampling,
    token_ids,
)
from tests.kit.instances import make_instance, make_transfer_params


class Slow:
    """A backend that records the time limits of its fetches, which all fail with its error."""

    name = "slow"
    guard = TransferGuard()

    def __init__(self, error: DynamoError | None = None) -> None:
        self.error = error
        self.given_s = 0.0

    async def start(self, on_fetched: Callable[[str], None]) -> None: ...

    async def register(self, region: MemoryRegion) -> None: ...

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        return b""

    def mark_ready(self, transfer_id: str, ready: int) -> None: ...

    async def unpublish(self, transfer_id: str) -> None: ...

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        return "10.0.0.1:22"

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        self.given_s = timeout_s
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None: ...


def kv_params(expires_in_s: float) -> KvTransferParams:
    return msgspec.structs.replace(
        make_transfer_params("t1"), expires_at=time.time() + expires_in_s
    )


async def fetch(
    backend: Any,
    expires_in_s: float,
    *,
    deadline_in_s: float,
    timeout_s: float,
    guard: TransferGuard | None = None,
) -> None:
    params = kv_params(expires_in_s)
    deadline = time.time() + deadline_in_s
    sampling = Sampling(max_tokens=1)
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(),
        sampling=sampling,
        deadline=deadline,
        kv_params=params,
    )
    config = WorkerConfig(model_path="m", kv_fetch_timeout_s=timeout_s)
    transfers = KvTransfers(backend, config, engine="torch", instance_id=1, layout=params.layout)
    if guard is not None:
        transfers.use_guard(guard)
    await transfers.fetch(request, b"", Destination([]))


@pytest.mark.parametrize(
    ("deadline_s", "expiry_s", "timeout_s", "error", "said"),
    [
        (1, 9, 9, DeadlineExceeded, "the request's deadline passed"),
        (9, 1, 9, TransferTimeout, "it expired"),
        (9, 9, 1, TransferTimeout, "--kv-fetch-timeout-s 1 passed"),
    ],
)
async def test_fetch_timeout_names_the_first_limit(
    deadline_s: float, expiry_s: float, timeout_s: float, error: type[DynamoError], said: str
) -> None:
    backend = Slow(TransferTimeout("late"))
    with pytest.raises(error, match=said) as caught:
        await fetch(backend, expiry_s, deadline_in_s=deadline_s, timeout_s=timeout_s)
    assert type(caught.value) is error
    assert 0.5 < backend.given_s <= 1


async def test_fetch_when_it_fails_otherwise_then_that_is_reported() -> None:
    with pytest.raises(TransferFailed):
        await fetch(Slow(TransferFailed("gone")), 9, deadline_in_s=9, timeout_s=9)


async def test_fetch_gives_the_backend_the_remaining_time() -> None:
    backend = Slow()
    await fetch(backend, 9, deadline_in_s=9, timeout_s=3)
    assert backend.given_s == 3


@pytest.mark.parametrize("registered", ["10.0.0.1:22", "10.0.0.1:5000"])
async def test_fetch_connects_to_registered_addresses_only(registered: str) -> None:
    addresses = PrefillAddresses(stay_s=9, wait_s=0)
    prefill = make_instance(1, role=Role.PREFILL)
    addresses.add(msgspec.structs.replace(prefill, kv_addresses=(registered,)))
    backend = Slow()
    fetching = fetch(
        backend, 9, deadline_in_s=9, timeout_s=3, guard=TransferGuard(addresses=addresses)
    )
    if registered == "10.0.0.1:22":
        await fetching
        return
    with pytest.raises(TransferRejected, match="not a registered address"):
        await fetching
    assert backend.given_s == 0


@pytest.mark.parametrize(
    ("deadline_s", "expiry_s", "error"), [(-1, 9, DeadlineExceeded), (9, -1, TransferExpired)]
)
async def test_fetch_without_time_does_not_ask_the_backend(
    deadline_s: float, expiry_s: float, error: type[DynamoError]
) -> None:
    backend = Slow()
    with pytest.raises(error):
        await fetch(backend, expiry_s, deadline_in_s=deadline_s, timeout_s=9)
    assert backend.given_s == 0


def test_bound_with_prefill_clock_behind_leaves_no_time() -> None:
    now = time.time()
    assert first_deadline(kv_params(-100), now + 9, 9, now).left_s < 0


class FailsToUnpublish(Slow):
    """A backend with a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    async def unpublish(self, transfer_id: str) -> None:
        raise ValueError("a bug")

    async def aclose(self) -> None:
        self.is_closed = True


async def test_backend_that_fails_to_unpublish_is_closed() -> None:
    backend: Any = FailsToUnpublish()
    params = kv_params(9)
    config = WorkerConfig(model_path="m")
    transfers = KvTransfers(backend, config, engine="torch", instance_id=1, layout=params.layout)
    request = GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(),
        sampling=Sampling(max_tokens=1),
        deadline=0,
    )
    unpublished: list[bool] = []
    first = Chunk(token_ids=token_ids([7]))
    await transfers.publish(request, first, [], lambda: unpublished.append(True))
    await transfers.aclose()
    assert unpublished == [True]
    assert backend.is_closed
