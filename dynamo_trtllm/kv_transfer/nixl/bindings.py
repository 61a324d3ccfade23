"""Wrap the package NIXL: open its agents, register and describe memory, and translate its errors.

This is the only module that imports NIXL. A thread that passes GPU memory to NIXL needs a current
CUDA context, see `TransferBackend.prepare_thread`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.config.environ import export
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.nixl.validity import ValiditySlots
from dynamo_trtllm.protocol.errors import ConfigError, TransferFailed, install_hint
from dynamo_trtllm.protocol.number_types import Count, Number, UInt64

_VARIABLES = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}
_BACKENDS = ["UCX"]

Descriptor: TypeAlias = tuple[UInt64, Number, Count]  # address, bytes, device


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a reader needs to read a published transfer.

    All transfers of a backend have the same first three fields. All transfers of a registered
    region have the same `memory`.
    """

    agent: str
    connection: bytes  # metadata for connecting to the agent
    # The metadata of the validity agent, and of the memory with the validity slots.
    validity_agent: bytes = msgspec.field(name="guards")
    memory: bytes  # metadata of the registration; empty if the KV has no bytes
    kind: str  # kind of the memory, as NIXL calls it: DRAM or VRAM
    # The descriptors of the regions.
    descriptors: list[Descriptor] = msgspec.field(name="spots")
    validity_slot: Descriptor = msgspec.field(name="guard")
    nonce: bytes  # the validity slot has this nonce while the transfer is published
    ready: Count  # number of regions that held their data when the offer was created
    checksum: str = ""  # see `Checksums.method`; "": the validity slot has no checksum

    @property
    def sizes_bytes(self) -> list[int]:
        """Return the sizes of the regions in bytes."""
        return [num_bytes for _, num_bytes, _ in self.descriptors]


class RegisteredMemory(NamedTuple):
    """Registered memory."""

    region: MemoryRegion
    handle: Any
    memory: bytes  # metadata for readers

    def contains(self, region: MemoryRegion) -> bool:
        """Return whether `region` is completely in this memory."""
        if region.device != self.region.device:
            return False
        own_end = self.region.address + self.region.num_bytes
        end = region.address + region.num_bytes
        return self.region.address <= region.address and end <= own_end


class NixlBindings:
    """NIXL in this process.

    There are two agents, one for KV and one for validity slots. An agent reports a transfer as done
    only when all transfers that it has posted earlier to the same peer are done (NIXL 1.5.1 flushes
    the endpoint). So with a single agent, the read of a slot would wait for the KV that is being
    read.
    """

    def __init__(self) -> None:
        """Import NIXL.

        Raises:
            ConfigError: NIXL is not installed.
        """
        for variable, value in _VARIABLES.items():
            export(variable, value, wanted_by="kv_transfer/nixl")
        try:
            from nixl import _api as api
            from nixl import _bindings as bindings
        except ImportError as exc:
            raise ConfigError(f"transfer backend nixl: {exc}; {install_hint('nixl')}") from exc
        self._api: Any = api
        self.errors = _error_classes(bindings)
        self.agent: Any = None  # reads KV
        self.validity_agent: Any = None  # reads validity slots and writes acknowledgments
        self.registered: list[RegisteredMemory] = []  # registered until `close`

    def open(self, name: str, validity_slots: ValiditySlots) -> tuple[bytes, bytes]:
        """Create the agents.

        Returns:
            The metadata for connecting to the agent and to the validity agent.

        Raises:
            ConfigError: NIXL's UCX backend does not start.
        """
        # The progress thread of NIXL 1.5.1 uses a whole core as long as the agent exists. Instead,
        # the listener of the backend and the polling of readers make progress.
        sync = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        settings = self._api.nixl_agent_config(
            enable_prog_thread=False, backends=_BACKENDS, sync_mode=sync
        )
        try:
            agent = self._api.nixl_agent(name, settings)
            connection: bytes = agent.get_agent_metadata()
            validity_agent = self._api.nixl_agent(validity_agent_of(name), settings)
            page = validity_agent.register_memory(
                [(validity_slots.address, validity_slots.num_bytes, 0, "")], "DRAM"
            )
            validity_connection: bytes = validity_agent.get_partial_agent_metadata(
                page, True, _BACKENDS
            )
        except self.errors as exc:
            raise ConfigError(
                f"transfer backend nixl can't start its UCX backend: {exc!r}; use transfer"
                " backend tcp"
            ) from exc
        self.agent = agent
        self.validity_agent = validity_agent
        return connection, validity_connection

    def progress(self) -> None:
        """Let NIXL make progress. Some transports need it on the prefill worker."""
        for agent in (self.agent, self.validity_agent):
            # Notifications are not used, but this call makes progress.
            agent.get_new_notifs()

    def register(self, regions: Sequence[MemoryRegion]) -> tuple[Any, bytes]:
        """Register regions of one kind of memory.

        Returns:
            The handle, and the metadata for readers.
        """
        # In addition to the descriptor, NIXL requires a text, which may be empty.
        descriptors = [(*descriptor_of(region), "") for region in regions]
        handle = self.agent.register_memory(descriptors, kind_of(regions))
        try:
            memory = self.agent.get_partial_agent_metadata(handle, False, _BACKENDS)
        except self.errors:
            self.agent.deregister_memory(handle)
            raise
        return handle, memory

    def region_of(self, regions: Sequence[MemoryRegion]) -> RegisteredMemory | None:
        """Return the registered memory that contains all `regions`, or None."""
        for memory in self.registered:
            if all(memory.contains(region) for region in regions):
                return memory
        return None

    @contextlib.contextmanager
    def temporarily_registered(self, regions: Sequence[MemoryRegion]) -> Iterator[None]:
        """Register regions for the time of the context.

        If the regions are part of a registered region, nothing is done.
        """
        if not regions or self.region_of(regions) is not None:
            yield
            return
        handle, _ = self.register(regions)
        try:
            yield
        finally:
            self.agent.deregister_memory(handle)

    def descriptors(self, descriptor: Descriptor, kind: str) -> Any:
        """Return NIXL's transfer list with this descriptor. `kind` is DRAM or VRAM."""
        return self.agent.get_xfer_descs([descriptor], kind)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Convert NIXL's errors to TransferFailed. `what` is the start of the error text."""
        try:
            yield
        except self.errors as exc:
            raise TransferFailed(f"{what}: {exc}") from exc


def validity_agent_of(agent: str) -> str:
    """Return the name of the validity agent that belongs to an agent."""
    return f"{agent}-guards"


def descriptor_of(region: MemoryRegion) -> Descriptor:
    """Return NIXL's descriptor of a region."""
    _, _, number = region.device.partition(":")
    device = int(number) if number else 0
    return region.address, region.num_bytes, device


def kind_of(regions: Sequence[MemoryRegion]) -> str:
    """Return the kind of memory of the regions, as NIXL calls it: DRAM or VRAM.

    Raises:
        TransferFailed: NIXL can't transfer such memory, or the regions are of several kinds.
    """
    kinds = {region.device.partition(":")[0] for region in regions}
    if not kinds <= {"cpu", "cuda"} or len(kinds) > 1:
        raise TransferFailed(
            "transfer backend nixl transfers CPU or CUDA memory, one kind per transfer, not"
            f" {sorted(kinds)}"
        )
    return "VRAM" if kinds == {"cuda"} else "DRAM"


def _error_classes(bindings: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL raises, which have no common base class."""
    classes = [
        value
        for value in vars(bindings).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*classes, RuntimeError)
