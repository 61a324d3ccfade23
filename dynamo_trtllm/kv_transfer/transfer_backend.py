"""Define the interface of KV transfer backends, and check KV transfer parameters.

The decode worker reads KV from the memory of the prefill worker. A backend transfers regions of
memory (address, bytes, device). The engine gathers KV blocks into such regions before the transfer,
and scatters them after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from dynamo_trtllm.kv_transfer.checksums import Checksums
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    DeadlineExceeded,
    DynamoError,
    TransferExpired,
    TransferFailed,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Phase,
    Sampling,
    decode,
)

T = TypeVar("T")


class Destination(NamedTuple):
    """The memory into which KV is read."""

    # Regions with the sizes of the published regions, in the same order.
    regions: Sequence[MemoryRegion]
    # Called with the index of each region, in order, as soon as the region is complete. The backend
    # calls it on the event loop or on a thread of its own, but never after `TransferBackend.read`
    # has ended. It must be fast.
    on_region: Callable[[int], None] | None = None


class TransferBackend(Protocol):
    """A KV transfer backend. Each engine has one.

    All methods are called on the event loop. A backend runs blocking calls of its library on
    threads of its own.
    """

    # The name in KV transfer parameters and logs, such as "nixl/ucx" or "tcp".
    name: str
    checksums: Checksums
    # Decides what a reader presents, and checks it. If a library serves the readers, the backend
    # ignores the guard.
    guard: TransferGuard
    # Called on each thread that passes memory to the library, before `start` returns or when the
    # thread starts. An engine with GPU memory sets this, to make its GPU the current GPU of the
    # thread.
    prepare_thread: Callable[[], None]

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """Start the backend.

        Args:
            on_fetched: called on the event loop with the id of a transfer each time a peer reports
                that it has read the KV. The transfer may have been unpublished since then.

        Raises:
            ConfigError: the backend can't start with this configuration.
        """

    @property
    def address(self) -> str:
        """The "host:port" to which readers connect.

        "": the backend is not started, or the library chooses the address.
        """

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        """Return the "host:port" to which a read with this offer connects.

        "": the address is unknown, because the offer is in the format of a library.

        Raises:
            TransferFailed: another backend created the offer.
        """

    async def register(self, region: MemoryRegion) -> None:
        """Register memory until `aclose`.

        Regions within it can then be published and fetched without registration.

        Raises:
            TransferFailed: this backend can't transfer such memory. Nothing is registered.
        """

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        """Make regions readable for every peer that has the returned bytes, until `unpublish`.

        Args:
            transfer_id: the id of the transfer.
            regions: the regions, in order.
            ready: how many of the first regions hold their data. None: all. Readers wait for
                `mark_ready` before they read the other regions.

        Returns:
            The offer, which a peer passes to `read`.

        Raises:
            TransferFailed: the backend is not running, or can't transfer such memory. If this
                raises or is cancelled, the memory may be reused after `unpublish`.
        """

    def mark_ready(self, transfer_id: str, ready: int) -> None:
        """Report that the first `ready` regions hold their data. Unknown ids are ignored."""

    async def unpublish(self, transfer_id: str) -> None:
        """Stop publishing a transfer. Unknown ids are ignored.

        When this returns, the memory may be reused.
        """

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        """Read a published transfer into memory of this process, and notify the prefill worker.

        After this returns, raises or is cancelled, nothing more is written to the regions of `to`.
        The data is valid only when this has returned, because some backends compare the checksum
        at the end.

        Args:
            transfer_id: the id of the transfer.
            offer: the bytes that `publish` returned.
            to: the memory into which the KV is read.
            timeout_s: the longest time for the read, in seconds.

        Raises:
            TransferTimeout: the read took longer than `timeout_s`.
            TransferFailed: the peer died, the transfer is no longer published, or the checksum is
                wrong.
        """

    def check(self) -> None:
        """Check that this backend can send and fetch KV.

        This is called often, so it must be cheap.

        Raises:
            EngineFailed: the backend can't send or fetch KV any more.
        """

    async def aclose(self) -> None:
        """Unpublish all transfers and stop the backend."""


def decode_offer(form: type[T], offer: bytes, transfer_id: str, backend: str) -> T:
    """Decode the offer of a transfer.

    Raises:
        TransferFailed: another backend created the offer.
    """
    try:
        return decode(offer, form)
    except BadFrame as exc:
        raise TransferFailed(
            f"KV transfer {transfer_id}: the offer was not created by transfer backend {backend}"
        ) from exc


def collecting_call(
    request: GenerateRequest, kv_params: KvTransferParams, *, deadline: float, priority: int = 0
) -> GenerateRequest:
    """Return a decode call that fetches the KV of a prompt and generates as little as possible.

    The only purpose of the call is the fetch, after which the library of the prefill worker frees
    the KV. An engine rejects a decode call that has nothing to generate. Therefore the call may
    generate one token more than prefill has generated.

    Args:
        request: the request whose KV is not needed any more.
        kv_params: parameters from its prefill call.
        deadline: the deadline of the call, in seconds since the epoch.
        priority: the priority of the call; see `GenerateRequest`.
    """
    return GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        sampling=Sampling(max_tokens=len(kv_params.first_token_ids) + 1, temperature=0.0),
        deadline=deadline,
        phase=Phase.DECODE,
        kv_params=kv_params,
        cache_salt=request.cache_salt,
        priority=priority,
    )


TRANSFER_PARAMS_VERSION = 1  # version of KvTransferParams

# The fields of KvLayout that must be equal at prefill and decode. The number of ranks may differ.
# An engine that needs equal numbers puts its own into `kv_compat`, too.
EQUAL_LAYOUT = tuple(name for name in KvLayout.__struct_fields__ if name != "tensor_parallel_size")

_FLAGS = {"layout.block_tokens": "--kv-block-size"}  # the flags that set a field, by field


class TransferIdentity(NamedTuple):
    """The values that the parameters of all KV transfers of one engine have in common."""

    engine: str
    prefill_instance_id: int
    model: str
    layout: KvLayout
    kv_compat: Mapping[str, str]  # further values that must be equal at prefill and decode
    transport: str  # the name of the backend, which is not compared


def check_params(kv_params: KvTransferParams, identity: TransferIdentity, *, now: float) -> None:
    """Check that a decode engine can use KV transfer parameters.

    Args:
        identity: the identity of the decode engine.
        now: seconds since the epoch.

    Raises:
        TransferMismatch: a value differs. The error names the field and both values.
        TransferExpired: the transfer has expired.
    """
    # Each entry has the name of a field, its value at prefill, and its value at decode.
    compared: list[tuple[str, object, object]] = [
        ("version", kv_params.version, TRANSFER_PARAMS_VERSION),
        ("engine", kv_params.engine, identity.engine),
        ("model", kv_params.model, identity.model),
    ]
    for name in EQUAL_LAYOUT:
        at_prefill = getattr(kv_params.layout, name)
        at_decode = getattr(identity.layout, name)
        compared.append((f"layout.{name}", at_prefill, at_decode))
    # If only one side has a name, the value of the other side is None, so the values differ.
    names = sorted(kv_params.kv_compat.keys() | identity.kv_compat.keys())
    compared += [
        (name, kv_params.kv_compat.get(name), identity.kv_compat.get(name)) for name in names
    ]
    for name, at_prefill, at_decode in compared:
        if at_prefill != at_decode:
            flag = f" ({_FLAGS[name]})" if name in _FLAGS else ""
            raise TransferMismatch(
                f"KV transfer {kv_params.transfer_id}: {name} is {at_prefill!r} at prefill and"
                f" {at_decode!r} at decode; start both workers with the same model and"
                f" settings{flag}",
                field=name,
            )
    if kv_params.expires_at <= now:
        raise TransferExpired(
            f"KV transfer {kv_params.transfer_id} expired {now - kv_params.expires_at:.1f} s ago"
        )


class Deadline(NamedTuple):
    """The time limit that a fetch reaches first.

    The kind of error tells the frontend whether the KV transfer is at fault. The frontend decides
    by this what to retry.
    """

    left_s: float  # seconds until the deadline is reached
    error: type[DynamoError]  # the error of a fetch that has reached the deadline
    message: str


def first_deadline(
    kv_params: KvTransferParams, deadline: float, timeout_s: float, now: float
) -> Deadline:
    """Return the time limit that a fetch reaches first.

    Args:
        deadline: the deadline of the request, in seconds since the epoch.
        timeout_s: the longest time of any fetch.
        now: seconds since the epoch.
    """
    late = f"KV transfer {kv_params.transfer_id} did not finish before"
    # If two deadlines are equal, `min` returns the one that comes first here.
    deadlines = (
        Deadline(deadline - now, DeadlineExceeded, f"{late} the request's deadline passed"),
        Deadline(kv_params.expires_at - now, TransferTimeout, f"{late} it expired"),
        Deadline(timeout_s, TransferTimeout, f"{late} --kv-fetch-timeout-s {timeout_s:g} passed"),
    )
    return min(deadlines, key=attrgetter("left_s"))
