"""Define the interface of KV transfer backends, and check KV transfer parameters.

The decode worker reads with one-sided reads. A backend transfers regions of memory (address, bytes,
device); the engine gathers KV blocks into regions and scatters them. `first_deadline` returns the
time limit that a fetch reaches first.
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
    """The memory that KV is read into."""

    # Regions with the sizes of the published regions, in the same order.
    regions: Sequence[MemoryRegion]
    # Called with the index of each region, in order, as soon as the region is complete. It runs on
    # the event loop or on a thread of the backend, never after `TransferBackend.read` has ended,
    # and must be fast.
    on_region: Callable[[int], None] | None = None


class TransferBackend(Protocol):
    """A KV transfer backend; each engine has one.

    All calls are made on the event loop. A backend runs blocking library calls on threads of its
    own.
    """

    # Name in KV transfer parameters and logs, such as "nixl/ucx" or "tcp".
    name: str
    checksums: Checksums
    # Says what a reader presents, and checks it. A backend whose library serves readers on its own
    # ignores it.
    guard: TransferGuard
    # Called on each thread that passes memory to the library, before `start` returns or when the
    # thread starts. An engine with GPU memory sets it, to make that GPU the thread's current one.
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
        """The "host:port" to which readers connect, once it is started; "": its library decides."""

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        """Return the "host:port" to which a read with this offer connects.

        Return "" if it is unknown, because the offer is in the format of a library.

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
            ready: the number of regions at the front that hold their data; None: all. Readers wait
                for `mark_ready` before they read the others.

        Returns:
            The offer: what a peer passes to `read`.

        Raises:
            TransferFailed: the backend is not running, or can't transfer such memory. If this
                raises or is cancelled, the memory may be reused after `unpublish`.
        """

    def mark_ready(self, transfer_id: str, ready: int) -> None:
        """Report that the first `ready` regions hold their data. Unknown ids are ignored."""

    async def unpublish(self, transfer_id: str) -> None:
        """Stop publishing; the memory may be reused when this returns. Unknown ids are ignored."""

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        """Read a published transfer into own memory and notify its prefill worker.

        Nothing is written to its regions after this returns, raises or is cancelled. The data is
        valid only after this returns, because some backends compare the checksum of all regions
        last.

        Args:
            transfer_id: the id of the transfer.
            offer: the bytes that `publish` returned.
            to: where the KV goes.
            timeout_s: the longest time for the read, in seconds.

        Raises:
            TransferTimeout: the time is over.
            TransferFailed: the peer died, the transfer is no longer published, or the checksum is
                wrong.
        """

    def check(self) -> None:
        """Check that this backend can send and fetch KV. It is called often and must be cheap.

        Raises:
            EngineFailed: it can't.
        """

    async def aclose(self) -> None:
        """Unpublish all transfers and stop the backend."""


def decode_offer(form: type[T], offer: bytes, transfer_id: str, backend: str) -> T:
    """Decode the offer of a transfer.

    Raises:
        TransferFailed: another backend created it.
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

    Its only purpose is the fetch, after which the prefill worker's library frees the KV. It allows
    one token more than prefill has generated, because an engine rejects a decode call that has
    nothing to generate.

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

# The fields of KvLayout that must be equal at prefill and decode. The number of ranks may differ
# where an engine allows it (`kv_compat`).
EQUAL_LAYOUT = tuple(name for name in KvLayout.__struct_fields__ if name != "tensor_parallel_size")

_FLAGS = {"layout.block_tokens": "--kv-block-size"}  # field -> flag of the worker that sets it


class TransferIdentity(NamedTuple):
    """What the parameters of all KV transfers of one engine have in common."""

    engine: str
    prefill_instance_id: int
    model: str
    layout: KvLayout
    kv_compat: Mapping[str, str]  # further values that must be equal at prefill and decode
    transport: str  # informational


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
    # A name that only one side has differs, too.
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

    The kind of error tells the frontend whether the KV transfer is at fault, and thus what to
    retry.
    """

    left_s: float  # seconds until it is reached
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
    # If two deadlines are equal, the first one counts.
    deadlines = (
        Deadline(deadline - now, DeadlineExceeded, f"{late} the request's deadline passed"),
        Deadline(kv_params.expires_at - now, TransferTimeout, f"{late} it expired"),
        Deadline(timeout_s, TransferTimeout, f"{late} --kv-fetch-timeout-s {timeout_s:g} passed"),
    )
    return min(deadlines, key=attrgetter("left_s"))
