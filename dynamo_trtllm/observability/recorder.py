"""Record the events of requests in a file that outlives the process (the flight recorder).

The file is a ring of slots of a fixed size, and is mapped into memory. So recording an event takes
one write without a system call, and the events of a killed process can still be read. The file
contains ids, times and numbers, and no text of requests. The module `recordings` reads it.

The file must be on tmpfs. If it were on a disk, a write could wait for the disk, and would block
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import mmap
import os
import re
import stat
import struct
import time
from array import array
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import xxhash

log = logging.getLogger(__name__)

MAGIC: Final = b"DTRTRING"
VERSION: Final = 2
HEADER_BYTES: Final = 4096  # the same on all machines, whatever their page size is
SUFFIX: Final = ".ring"
_INCOMPLETE: Final = ".new"  # the suffix of a file whose header is not written yet
# An incomplete file of this age is left from a crash. Writing a header takes far less time.
_INCOMPLETE_S: Final = 60.0

# The fields of `RecordingHeader` up to `namespace`, in this order. They are written once.
_HEADER: Final = struct.Struct("<8sIIQQQQQQ36sQ32s256s")
# The fields of `RecordingHeader` behind `namespace`. Each tick writes them.
_ALIVE: Final = struct.Struct("<QQQ")
_ALIVE_OFFSET: Final = HEADER_BYTES - _ALIVE.size
# The fields of a slot: number of the event, time in ns since boot, request, event, choice, three
# values, reason, and the number again. If the two numbers differ, the slot was not written
# completely.
SLOT: Final = struct.Struct("<QQQHHQQQ28sQ")
NUM_SLOTS: Final = ((4 << 20) - HEADER_BYTES) // SLOT.size  # number of slots in a file of 4 MiB

# With these global names, recording an event looks up fewer attributes.
_SLOT_BYTES = SLOT.size
_pack_slot = SLOT.pack_into
_now_ns = time.monotonic_ns

# The limits for files of processes that have ended: their number, the part of the file system that
# they take, and their age.
KEPT_FILES: Final = 20
KEPT_SHARE: Final = 1 / 8
KEPT_S: Final = 24 * 3600.0
TICK_S: Final = 1.0  # time between two ticks
# Most progress events per tick. More would fill the ring too fast.
PROGRESS_PER_TICK: Final = 256
BLOCK_TOKENS: Final = 512  # tokens per hash of a prompt, as in Mooncake's traces
# Most hashes of a prompt: one in its event TOKENIZED, and three in each of 20 events PROMPT_HASHES.
HASHED_BLOCKS: Final = 61
_MAX_CHOICE: Final = 0xFFFF
_MAX_ID_CHARS: Final = 256  # peers of a worker may send longer request ids
_UNSAFE_NAME = re.compile(r"[^\w-]", re.ASCII)
_UNIQUE_PART = re.compile(r"[0-9a-f]{16}")  # the unique part of a request id
_CHOICE_INDEX = re.compile(r"[0-9]+")
# Calls that no client asked for: a frontend checks a worker, or an engine warms up. The whole id is
# matched, because the id of a client's request begins with text that the client chose.
_OF_NO_CLIENT = re.compile(r"(?:probe|warm-up)-[0-9]{1,15}")


class RecordedEvent(IntEnum):
    """What happened.

    The files contain these numbers, so a number must never get another meaning. The comments name
    the values a, b and c of an event, and its reason.
    """

    STARTED = 1
    DRAINING = 3
    STOPPED = 4
    CONNECTION_LOST = 5  # reason: etcd or nats
    PEER_LOST = 6  # reason: error code
    CONNECTION_AWAITED = 7  # reason: etcd; a start or registration waits for it
    CONNECTED = 8  # reason: etcd; it has answered, also after CONNECTION_LOST
    SHARES_CHANGED = 9  # a: epoch, b: revision of the table that a frontend uses now; both 0: none
    # Events of a request in the frontend.
    RECEIVED = 32  # a: hash of the client's X-Request-Id, or 0
    # a: prompt tokens, b: max_tokens, c: hash of the first block, or 0; once per prompt
    TOKENIZED = 33
    PROMPT_HASHES = 34  # a, b, c: hashes of the next 3 blocks; 0: no block is left
    # a: prefill instance or 0, b: decode instance, c: shares of elastic ones, see `recorded_shares`
    PLACED = 36
    # a, b: a quarantined pair, its prefill instance (or 0) and its decode instance. Both 0: there
    # is no pair.
    WAITING_FOR_WORKERS = 37
    RESERVING_SLOT = 38  # a: decode instance
    CALL_SENT = 39  # a: instance; reason: phase
    CALL_FAILED = 42  # a: instance, b: 1 if the request goes on; reason: error code
    FIRST_TOKEN = 43  # also of a call in a worker
    PROGRESS = 44  # a: tokens so far; also of a call in a worker
    LAST_TOKEN = 45  # a: tokens
    FINISHED = 46  # a: HTTP status, b: tokens; reason: finish reason or error code
    # a: instance, b: its cost, c: cost of the cheapest other instance, or NO_COST; reason: router
    # mode; once for each role
    PLACED_BY_COST = 47
    # a: predicted time to first token and b: longest predicted gap in µs, c: requests that miss a
    # limit; reason: path
    PATH_CHOSEN = 48
    # Events of a call in a worker.
    CALL_RECEIVED = 64  # a: prompt tokens; reason: phase; it waits in the engine from now on
    STARTED_IN_ENGINE = 66
    WAITING_FOR_KV_BLOCKS = 67
    WAITING_FOR_BUFFER = 68  # the call waits for space in the transfer buffer
    PREFILL_DONE = 69
    KV_PUBLISHED = 70  # a: bytes
    KV_FETCH_STARTED = 71  # a: prefill instance, b: bytes
    KV_FETCHED = 72
    KV_RELEASED = 73  # fetched or aborted
    KV_EXPIRED = 74
    CALL_ENDED = 75  # a: tokens; reason: finish reason or error code


NO_COST: Final = (1 << 64) - 1  # there is no other instance


class RecordedStream(Protocol):
    """A running stream whose progress is recorded."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...


class _Ring:
    """The mapped file of one process. The process locks the file as long as it runs."""

    def __init__(self, path: Path, header: bytes, num_slots: int) -> None:
        self._num_slots = num_slots
        size = HEADER_BYTES + num_slots * SLOT.size
        new = path.with_suffix(_INCOMPLETE)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(new, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Reserve the space now. Otherwise a write would end the process with SIGBUS if the file
            # system is full.
            os.posix_fallocate(self._file, 0, size)
            self.memory = mmap.mmap(self._file, size)
            self.memory[: len(header)] = header
            new.rename(path)  # so readers find only files with a complete header
        except OSError:
            os.close(self._file)
            new.unlink(missing_ok=True)
            raise
        # Engines record from other threads, and `next` of this counter is atomic.
        self._numbers = itertools.count(1)

    def write(self, key: int, choice: int, event: int, a: int, b: int, c: int, reason: str) -> None:
        number = next(self._numbers)
        offset = HEADER_BYTES + number % self._num_slots * _SLOT_BYTES
        text = reason.encode()
        _pack_slot(
            self.memory, offset, number, _now_ns(), key, event, choice, a, b, c, text, number
        )

    def write_alive(self, num_running: int) -> None:
        _ALIVE.pack_into(
            self.memory, _ALIVE_OFFSET, time.time_ns(), time.monotonic_ns(), num_running
        )

    def close(self) -> None:
        # This releases the lock. Another thread may still write to the memory.
        os.close(self._file)


class Recorder:
    """The flight recorder of a process. It records nothing before `start` and after `stop`."""

    def __init__(self) -> None:
        self._ring: _Ring | None = None
        self._path: Path | None = None  # path of the newest file of this process
        self._num_users = 0
        # The running streams, each with the number of tokens that was recorded last.
        self._streams: dict[RecordedStream, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._handles_forks = False

    def start(
        self, folder: Path | None, *, namespace: str, kind: str, instance_id: int = 0
    ) -> None:
        """Create the file of this process and record from now on. Call it on the event loop.

        If a process has a second user of the recorder, such as an embedded worker, this user
        records into the file of the first user. If the first has no file, nothing is recorded. If
        the file can't be created, a warning is logged and nothing is recorded.

        Args:
            folder: the folder for the files, on tmpfs. None: record nothing.
            namespace: namespace of the process.
            kind: "frontend", or the role of a worker.
            instance_id: id of a worker, or 0 for a frontend.
        """
        self._num_users += 1
        if self._num_users > 1 or folder is None:
            return
        safe = _UNSAFE_NAME.sub("_", namespace[:64])
        name = f"{safe}-{kind}-{os.getpid()}-{instance_id:x}-{time.time_ns():x}{SUFFIX}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(folder)
            _check_memory(folder)
            # A process has one file, however often workers start and stop in it.
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            remove_old(folder)
            header = _packed_header(namespace, kind, instance_id, NUM_SLOTS)
            self._ring = _Ring(folder / name, header, NUM_SLOTS)
            self._path = folder / name
        except OSError as exc:
            advice = "set --recorder-dir to a folder in memory (tmpfs) with 4 MiB free"
            log.warning("flight recorder is off (%s); %s", exc, advice)
            return
        if not self._handles_forks:
            self._handles_forks = True
            os.register_at_fork(after_in_child=self._stop_in_child)
        self.record_process(RecordedEvent.STARTED)
        self._tick()

    def stop(self) -> None:
        """Stop recording when the last user stops. The file stays."""
        self._num_users -= 1
        if self._num_users or self._ring is None:
            return
        self.record_process(RecordedEvent.STOPPED)
        self._close()
        if self._timer is not None:
            self._timer.cancel()
        self._streams.clear()

    def content(self, begin: int, end: int) -> bytes:
        """Return these bytes of the file, or b"" if nothing is recorded."""
        return b"" if self._ring is None else self._ring.memory[begin:end]

    def _stop_in_child(self) -> None:
        """Stop recording in a forked process, because the file belongs to the parent.

        The users, the streams and the event loop are those of the parent, too. A deployment that
        the forked process starts has a file of its own.
        """
        self._close()
        self._path = None
        self._num_users = 0
        self._streams.clear()
        self._timer = None

    def _close(self) -> None:
        """Stop writing.

        If this process was forked, the file stays locked until the parent has ended, too.
        """
        ring = self._ring
        self._ring = None
        if ring is not None:
            ring.close()

    def record(
        self, request_id: str, event: int, a: int = 0, b: int = 0, c: int = 0, reason: str = ""
    ) -> None:
        """Record an event of a request or call. Thread-safe.

        Args:
            request_id: id of the call, as in `GenerateRequest`, or of the request.
            event: a `RecordedEvent`, which says what the values mean.
            a: first value, an unsigned integer of 64 bits.
            b: second value, like `a`.
            c: third value, like `a`.
            reason: an error code, finish reason, phase or router mode, of at most 28 bytes.
        """
        ring = self._ring
        if ring is not None:
            # The end of the id is used, because it has the unique part.
            if len(request_id) > _MAX_ID_CHARS:
                request_id = request_id[-_MAX_ID_CHARS:]
            key, choice = request_key(request_id)
            if key:
                ring.write(key, choice, event, a, b, c, reason)

    def record_process(self, event: int, reason: str = "", a: int = 0, b: int = 0) -> None:
        """Record an event of the process. The arguments are like those of `record`."""
        if self._ring is not None:
            self._ring.write(0, 0, event, a, b, 0, reason)

    def record_prompt(self, request_id: str, token_ids: array[int], max_tokens: int) -> None:
        """Record the length of a prompt, and hashes that show how far prompts begin alike."""
        if self._ring is None:
            return
        hashes = block_hashes(token_ids)
        first_hash = hashes[0] if hashes else 0
        self.record(request_id, RecordedEvent.TOKENIZED, len(token_ids), max_tokens, first_hash)
        # Each further event has three hashes. Zeros fill the last event.
        padded = [*hashes, 0, 0]
        for first in range(1, len(hashes), 3):
            self.record(
                request_id,
                RecordedEvent.PROMPT_HASHES,
                padded[first],
                padded[first + 1],
                padded[first + 2],
            )

    def follow(self, stream: RecordedStream) -> None:
        """Record the progress of a running stream, at most once a second, until `unfollow`."""
        if self._ring is not None:
            self._streams[stream] = 0

    def unfollow(self, stream: RecordedStream) -> None:
        """Stop recording the progress of a stream. Idempotent."""
        self._streams.pop(stream, None)

    def _tick(self) -> None:
        """Record that the event loop runs, and the progress of streams."""
        if self._ring is not None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
            self._ring.write_alive(len(self._streams))
            self.record_progress()

    def record_progress(self, limit: int = PROGRESS_PER_TICK) -> None:
        """Record the progress of at most `limit` streams.

        If there are more streams, the next calls record the progress of the others.
        """
        streams = self._streams
        for stream in list(itertools.islice(streams, limit)):
            # The stream goes to the end of the dict, so that the others come first next time.
            num_recorded = streams.pop(stream)
            num_tokens = stream.num_tokens
            streams[stream] = num_tokens
            if num_tokens != num_recorded:
                self.record(stream.request_id, RecordedEvent.PROGRESS, num_tokens)


RECORDER: Final = Recorder()  # the recorder of this process


@functools.lru_cache(maxsize=1024)
def request_key(request_id: str) -> tuple[int, int]:
    """Return the number of a request in the file, and the index of the choice.

    Both are 0 if the request is not recorded.

    An id that a frontend has made ends with 16 unique hexadecimal digits. If the request has
    several choices, `-` and the index of the choice follow.
    """
    if _OF_NO_CLIENT.fullmatch(request_id):
        return 0, 0
    head, _, tail = request_id.rpartition("-")
    if len(tail) == 16:
        unique = tail
        index = "0"
    else:
        unique = head[-16:]
        index = tail
    # A peer may send any id, and `int` also takes signs, blanks and underscores.
    if not _UNIQUE_PART.fullmatch(unique) or not _CHOICE_INDEX.fullmatch(index):
        return id_hash(request_id), 0
    return int(unique, 16), min(int(index), _MAX_CHOICE)


def block_hashes(token_ids: array[int]) -> list[int]:
    """Return a hash of 64 bits for each of the first blocks of a prompt.

    The hash of a block also depends on all blocks before it.
    """
    data = memoryview(token_ids).cast("B")
    block_bytes = BLOCK_TOKENS * token_ids.itemsize
    last = 0
    hashes = []
    hashed_bytes = min(len(data), HASHED_BLOCKS * block_bytes)
    for begin in range(0, hashed_bytes, block_bytes):
        block = data[begin : begin + block_bytes]
        last = xxhash.xxh3_64_intdigest(block, last)
        hashes.append(last)
    return hashes


def id_hash(text: str) -> int:
    """Return the hash of 64 bits that is recorded in place of a client's id."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    )


def recorder_folder(setting: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the files. None: nothing is recorded.

    Args:
        setting: value of `--recorder-dir`. "off": nothing is recorded.
        environ: environment of the process, of which XDG_RUNTIME_DIR is read.
    """
    if setting is not None:
        return None if setting == "off" else Path(setting)
    return runtime_folder(environ)


def runtime_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in memory for files of this user's running processes.

    Args:
        environ: environment of the process, of which XDG_RUNTIME_DIR is read.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "dynamo_trtllm")
    return Path(f"/dev/shm/dynamo_trtllm-{os.geteuid()}")


def check_owner(folder: Path) -> None:
    """Check that no other user can replace the folder, or change the files in it.

    In /dev/shm, another user may have created the folder first, or a symbolic link with its name.

    Raises:
        OSError: the folder, or a link with its name, belongs to another user, or other users have
            write access to the folder.
    """
    owner = os.geteuid()
    status = folder.stat()
    if folder.lstat().st_uid != owner or status.st_uid != owner:
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {folder}; use chmod 700")


def _check_memory(folder: Path) -> None:
    """Raise OSError if the files of a folder are not in memory."""
    kind = file_system(folder)
    if kind != "tmpfs":
        raise OSError(
            f"{folder} is on a file system of type {kind}, and requests would wait when its disk"
            " hangs"
        )


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as "tmpfs", or "unknown"."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for mount in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        place, _, source = mount.partition(" - ")
        if place.split()[2] == number:
            return source.split()[0]
    return "unknown"


def remove_old(folder: Path) -> None:
    """Remove old files of processes that have ended.

    Files of processes that ended more than `KEPT_S` ago are removed. Of the others, the newest
    `KEPT_FILES` stay, or fewer if these would take more than `KEPT_SHARE` of the file system. By
    default, a container has a file system of only 64 MiB.
    """
    ended = []
    for path in folder.glob(f"*{SUFFIX}"):
        # Another process may have just removed the file, or no recorder has written it.
        with contextlib.suppress(OSError, ValueError):
            if path.is_file() and not is_locked(path):
                with path.open("rb") as file:
                    header = RecordingHeader.read(file.read(HEADER_BYTES))
                ended.append((header.alive_at_s, path))
    num_kept = min(KEPT_FILES, _num_files(folder, KEPT_SHARE))
    ended.sort(reverse=True)
    for index, (ended_at, path) in enumerate(ended):
        is_old = time.time() - ended_at >= KEPT_S
        if index >= num_kept or is_old:
            path.unlink(missing_ok=True)
    # A process that was killed at its start leaves an incomplete file.
    for path in folder.glob(f"*{_INCOMPLETE}"):
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime >= _INCOMPLETE_S
            if is_old and path.is_file() and not is_locked(path):
                path.unlink(missing_ok=True)


def _num_files(folder: Path, share: float) -> int:
    """Return how many files of the flight recorder a share of the folder's file system can hold."""
    status = os.statvfs(folder)
    size = status.f_blocks * status.f_frsize
    return int(size * share) // (HEADER_BYTES + NUM_SLOTS * SLOT.size)


def is_locked(path: Path) -> bool:
    """Return whether the process that writes a file still runs, or is frozen."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def start_ticks(pid: int | str) -> int:
    """Return when a process started, in clock ticks since boot.

    A later process with the same id has another start time.

    Raises:
        OSError: there is no such process, or the process has ended and its parent has not noticed.
    """
    status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # The name of the program, in parentheses, may contain spaces. `starttime` is the 22nd field.
    fields_after_name = status.rpartition(")")[2].split()
    if fields_after_name[0] == "Z":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields_after_name[19])


class RecordingHeader(NamedTuple):
    """The first page of a file."""

    magic: bytes
    version: int
    slot_bytes: int
    num_slots: int
    header_bytes: int
    pid: int
    start_ticks: int  # start time of the process, see `start_ticks`
    epoch_ns: int  # when the file was created
    monotonic_ns: int  # when the file was created, by the clock of the events
    boot_id: bytes
    instance_id: int  # the id of a worker; 0: a frontend
    kind: bytes
    namespace: bytes
    # The time of the last tick, in nanoseconds since the epoch. 0: an older release wrote the file.
    alive_epoch_ns: int
    alive_ns: int  # the time of the last tick, by the clock of the events. 0: there was no tick.
    num_running: int  # number of streams at the last tick

    @classmethod
    def read(cls, data: bytes) -> RecordingHeader:
        """Return the header in the first page of a file.

        Raises:
            ValueError: the file is not of the flight recorder, or has another version.
        """
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
            raise ValueError("it is not a file of the flight recorder")
        header = cls(*_HEADER.unpack_from(data), *_ALIVE.unpack_from(data, _ALIVE_OFFSET))
        layout = (header.version, header.slot_bytes, header.header_bytes)
        if layout != (VERSION, SLOT.size, HEADER_BYTES):
            raise ValueError(
                f"its version is {header.version}, and this command reads version {VERSION}"
            )
        return header

    @property
    def alive_at_s(self) -> float:
        """The time at which the process was last known to run, in seconds since the epoch."""
        # `alive_epoch_ns` is not used here, because the date of the machine may have been changed
        # since the file was created.
        ran_for_ns = max(0, self.alive_ns - self.monotonic_ns)
        return (self.epoch_ns + ran_for_ns) / 1e9


def boot_id() -> bytes:
    """Return the id of this boot of the machine. The clock of the events starts at a boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def _packed_header(namespace: str, kind: str, instance_id: int, num_slots: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        SLOT.size,
        num_slots,
        HEADER_BYTES,
        os.getpid(),
        start_ticks("self"),
        time.time_ns(),
        time.monotonic_ns(),
        boot_id(),
        instance_id,
        kind.encode()[:32],
        namespace.encode()[:256],
    )
