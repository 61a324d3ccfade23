"""The package NIXL: importing it, opening an agent, describing memory to it, its errors. Nothing else names it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.config.environ import export
from dynamo_trtllm.errors import ConfigError, TransferFailed, install_hint
from dynamo_trtllm.kv_transfer.base import MemoryRegion
from dynamo_trtllm.kv_transfer.nixl.validity import ValiditySlots

_MOST_GPUS = 64


class _Here(threading.local):
    device: int | None = None


_here = _Here()


def use(device: int) -> None:
    """For the calling thread; cheap when it is so already. Raises TransferFailed where there is no such GPU."""
    if _here.device == device:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise TransferFailed(
            f"transfer backend nixl can't move memory of cuda:{device}: no CUDA driver ({exc})"
        ) from exc
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        (driver.cuInit, (ctypes.c_uint(0),)),
        (driver.cuDeviceGet, (ctypes.byref(handle), ctypes.c_int(device))),
        (driver.cuDevicePrimaryCtxRetain, (ctypes.byref(context), handle)),
        (driver.cuCtxSetCurrent, (context,)),
    ):
        if status := call(*arguments):
            raise TransferFailed(f"transfer backend nixl can't use cuda:{device}: {call.__name__} returned {status}")
    _here.device = device


def join() -> None:
    """Uses the first GPU that this process uses already; nothing where it uses none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    for device in range(_MOST_GPUS):
        if driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)):  # no more of them, or no driver call so far
            return
        driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active))
        if is_active.value:
            use(device)
            return


_VARIABLES = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}
_BACKENDS = ["UCX"]

Descriptor: TypeAlias = tuple[int, int, int]  # address, bytes, device


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader must know of an offer. The first three and a registered region's memory are always the same."""

    agent: str
    connection: bytes  # how to reach the agent
    validity_agent: bytes = msgspec.field(name="guards")  # how to reach the agent of its guards, and their page
    memory: bytes  # what a reader must know about the registration; empty when there are no bytes
    kind: str  # of memory, in NIXL's words
    descriptors: list[Descriptor] = msgspec.field(name="spots")  # of the pieces
    validity_slot: Descriptor = msgspec.field(name="guard")
    nonce: bytes  # what the guard holds while the offer stands
    ready: int  # pieces that held their data when it was made
    checksum: str = ""  # its method, see `checksums`; "": the guard has none

    @property
    def sizes_bytes(self) -> list[int]:
        return [descriptor[1] for descriptor in self.descriptors]


class Region(NamedTuple):
    """Registered memory."""

    piece: MemoryRegion
    handle: Any
    memory: bytes  # for readers

    def holds(self, piece: MemoryRegion) -> bool:
        begin, end = self.piece.address, self.piece.address + self.piece.num_bytes
        return piece.device == self.piece.device and begin <= piece.address and piece.address + piece.num_bytes <= end


class NixlBindings:
    """NIXL in this process. Raises ConfigError where it is not installed.

    Two agents: NIXL calls a transfer done when all that was posted to the same agent's peer before it is done (1.5.1
    flushes the endpoint), so a look at a guard beside KV on its way would wait for that KV.
    """

    def __init__(self) -> None:
        for variable, value in _VARIABLES.items():
            export(variable, value, wanted_by="kv_transfer/nixl")
        try:
            from nixl import _api as api
            from nixl import _bindings as bindings
        except ImportError as exc:
            raise ConfigError(f"transfer backend nixl: {exc}; {install_hint('nixl')}") from exc
        self._api: Any = api
        self.errors = _error_classes(bindings)
        self.agent: Any = None  # moves what is offered
        self.validity_agent: Any = None  # moves guards and words
        self.regions: list[Region] = []  # registered once, until the end

    def open(self, name: str, validity_slots: ValiditySlots) -> tuple[bytes, bytes]:
        """Makes the agents; how others reach them. Raises ConfigError when their UCX back end does not start."""
        # Its progress thread spins on a whole core for as long as the agent lives (seen with 1.5.1): the backend's
        # listener and the readers' polling make progress instead.
        sync = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        settings = self._api.nixl_agent_config(enable_prog_thread=False, backends=_BACKENDS, sync_mode=sync)
        join()
        try:
            agent = self._api.nixl_agent(name, settings)
            connection: bytes = agent.get_agent_metadata()
            validity_agent = self._api.nixl_agent(validity_agent_of(name), settings)
            page = validity_agent.register_memory([(validity_slots.address, validity_slots.num_bytes, 0, "")], "DRAM")
            validity_connection: bytes = validity_agent.get_partial_agent_metadata(page, True, _BACKENDS)
        except self.errors as exc:
            raise ConfigError(
                f"transfer backend nixl can't start its UCX back end: {exc!r}; choose transfer backend tcp"
            ) from exc
        self.agent, self.validity_agent = agent, validity_agent
        return connection, validity_connection

    def close(self) -> None:
        self.agent = self.validity_agent = None

    def progress(self) -> None:
        """Some transports need the holder's help."""
        for agent in (self.agent, self.validity_agent):
            agent.get_new_notifs()  # there are none, but this makes progress

    def register(self, pieces: Sequence[MemoryRegion]) -> tuple[Any, bytes]:
        """A registration of pieces of one kind, and what readers must know of it."""
        use_devices(pieces)
        descriptors = [(*descriptor, "") for descriptor in map(descriptor_of, pieces)]
        handle = self.agent.register_memory(descriptors, kind_of(pieces))
        try:
            return handle, self.agent.get_partial_agent_metadata(handle, False, _BACKENDS)
        except self.errors:
            self.agent.deregister_memory(handle)
            raise

    def region_of(self, pieces: Sequence[MemoryRegion]) -> Region | None:
        """The region that holds all of them."""
        return next((region for region in self.regions if all(map(region.holds, pieces))), None)

    def descriptors(self, descriptor: Descriptor, kind: str) -> Any:
        return self.agent.get_xfer_descs([descriptor], kind)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self.errors as exc:
            raise TransferFailed(f"{what}: {exc}") from exc


def validity_agent_of(agent: str) -> str:
    """The name of an agent's companion."""
    return f"{agent}-guards"


def descriptor_of(piece: MemoryRegion) -> Descriptor:
    return piece.address, piece.num_bytes, _device(piece)


def kind_of(pieces: Sequence[MemoryRegion]) -> str:
    """Raises TransferFailed for memory that NIXL can't move, or for several kinds in one transfer."""
    kinds = {piece.device.partition(":")[0] for piece in pieces}
    if not kinds <= {"cpu", "cuda"} or len(kinds) > 1:
        raise TransferFailed(
            f"transfer backend nixl moves CPU or CUDA pieces, one kind per transfer, not {sorted(kinds)}"
        )
    return "VRAM" if kinds == {"cuda"} else "DRAM"


def use_devices(pieces: Sequence[MemoryRegion]) -> None:
    """The calling thread is about to hand these to NIXL."""
    for device in {_device(piece) for piece in pieces if piece.device.startswith("cuda")}:
        use(device)


def _device(piece: MemoryRegion) -> int:
    return int(piece.device.partition(":")[2] or 0)


def _error_classes(bindings: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises; its exceptions have no base class of their own."""
    classes = [found for found in vars(bindings).values() if isinstance(found, type) and issubclass(found, Exception)]
    return (*classes, RuntimeError)
