"""The responses that are kept: by id, with all the items that the model was shown, so that each stands alone.

That a response was deleted or has gone does not break the later ones of its conversation.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, InternalError, InvalidRequest, ResponseNotFound
from dynamo_trtllm.frontend.responses.items import (
    FRONTEND_ID_CHARS,
    PREFIX,
    frontend_id_of,
    is_response_id,
    response_of,
)
from dynamo_trtllm.request_plane.store import Store, StoreLimits

_log = logging.getLogger(__name__)

_WRITE_S: Final = 30.0  # longest write of one response
_CLOSE_S: Final = 5.0  # longest wait for the writes under way when the frontend ends
_PENDING_BYTES: Final = 64 << 20  # of writes under way; beyond, an answer waits for its own
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)  # between look-ups of a response that another frontend has generated
MAX_REFERRED_BYTES: Final = 32 << 20  # of the stored responses that one request refers to


def store_limits(config: FrontendConfig) -> StoreLimits:
    return StoreLimits(
        max_entries=config.response_store_entries,
        max_bytes=config.response_store_bytes,
        max_value_bytes=min(config.response_store_entry_bytes, config.response_store_bytes),
        ttl_s=config.response_store_ttl_s,
    )


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response with what it answers."""

    response: dict[str, Any]  # as it was answered
    items: list[dict[str, Any]]  # its input: those of the turns before it, then its own

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Everything said so far, its answer included."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """Names and finds responses. `shared`: other frontends find them too. `max_bytes`: the most of a stored one."""

    def __init__(
        self,
        store: Store,
        *,
        shared: bool,
        max_bytes: int,
        on_write_failed: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`on_write_failed` is called with the error's code for each response that could not be stored."""
        self._store = store
        self._writes = PendingWrites(store, on_write_failed)
        self.max_bytes = max_bytes
        self._shared = shared
        self._frontend_id = secrets.token_hex(FRONTEND_ID_CHARS // 2)
        self.id_prefix = PREFIX + self._frontend_id

    async def put(self, response_id: str, data: bytes, owner: str) -> None:
        """Begin to store a response; it is readable here once this returns. The write continues after that, so a store
        that is slow or unreachable delays no answer."""
        await self._writes.start(response_id, data, owner)

    async def aclose(self) -> None:
        """Wait a bounded time for the writes under way. The store stays open."""
        await self._writes.aclose()

    async def read(self, response_id: str, field: str | None = None) -> bytes:
        """Return a response as it is stored. Raises as `get`."""
        data = await self._read(response_id) if is_response_id(response_id) else None
        if data is None:
            raise self.missing(response_id, field)
        return data

    async def _read(self, response_id: str) -> bytes | None:
        if (data := self._writes.data(response_id)) is not None:
            return data
        data = await self._store.get(response_id)
        if self._shared and frontend_id_of(response_id) != self._frontend_id:
            for pause_s in _PAUSES_S:  # another frontend may still be writing what its client has already got
                if data is not None:
                    break
                await asyncio.sleep(pause_s)
                data = await self._store.get(response_id)
        return data

    async def get(self, response_id: str, field: str | None = None) -> StoredResponse:
        """Raises ResponseNotFound, with `field` for the request's field that names it; Disconnected, Unreachable."""
        return codec.decode(await self.read(response_id, field), StoredResponse)

    async def delete(self, response_id: str) -> None:
        """Raises as `get`."""
        await self._writes.finished(response_id)  # a write that ends later would restore it
        await self.get(response_id)
        await self._store.delete(response_id)

    def missing(self, response_id: str, field: str | None) -> ResponseNotFound:
        """Says why it may not be here and what to do."""
        if not is_response_id(response_id):
            reason = "it is no id of a response of this server"
        elif not self._shared and frontend_id_of(response_id) != self._frontend_id:
            reason = (
                "it was made by another frontend, or by this one before a restart, and each keeps its own; start the "
                "frontends with --response-store jetstream to share them"
            )
        elif frontend_id_of(response_id) != self._frontend_id:
            reason = (
                "it was deleted, made with store=false, has given way to newer ones, or is still being made, which "
                "only its own frontend can show or cancel"
            )
        else:
            reason = (
                "it was deleted, made with store=false, not finished, or has given way to newer ones; send the whole "
                "conversation as input"
            )
        return ResponseNotFound(f"response {response_id!r} is not stored here: {reason}", field=field)


class _Write(NamedTuple):
    data: bytes
    task: asyncio.Task[None]


class PendingWrites:
    """The writes to a store that are under way. Each value is readable here until its write ends.

    A write that fails is logged and counted, and its value is gone.
    """

    def __init__(self, store: Store, on_failed: Callable[[str], None]) -> None:
        self._store = store
        self._on_failed = on_failed
        self._writes: dict[str, _Write] = {}  # the newest of each key
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0

    async def start(self, key: str, data: bytes, owner: str) -> None:
        """Return at once; when more than _PENDING_BYTES are under way, return when this write has ended."""
        before = self._writes.get(key)
        task = asyncio.create_task(self._write(key, data, owner, before), name=f"write of {key}")
        write = self._writes[key] = _Write(data, task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(key, write))
        self._bytes += len(data)
        if self._bytes > _PENDING_BYTES:
            await asyncio.wait({task})

    def data(self, key: str) -> bytes | None:
        """Return the value that is being written under `key`."""
        write = self._writes.get(key)
        return None if write is None else write.data

    async def finished(self, key: str) -> None:
        """Wait for the write of `key`, if one is under way: at most _WRITE_S."""
        if (write := self._writes.get(key)) is not None:
            await asyncio.wait({write.task})

    async def aclose(self) -> None:
        """Give all writes _CLOSE_S, then cancel them."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _write(self, key: str, data: bytes, owner: str, before: _Write | None) -> None:
        async with asyncio.timeout(_WRITE_S):
            if before is not None:  # the later value must win
                await asyncio.wait({before.task})
            await self._store.put(key, data, owner)

    def _ended(self, key: str, write: _Write) -> None:
        self._tasks.discard(write.task)
        self._bytes -= len(write.data)
        if self._writes.get(key) is write:
            del self._writes[key]
        if write.task.cancelled():
            error: BaseException | None = DeadlineExceeded("the frontend ended before it was written")
        elif isinstance(error := write.task.exception(), TimeoutError):
            error = DeadlineExceeded(f"the store took more than {_WRITE_S:g} s")
        if error is None:
            return
        code = error.code if isinstance(error, DynamoError) else InternalError.code
        _log.warning(
            "%s is not stored (%s): %s", key, code, error, exc_info=None if isinstance(error, DynamoError) else error
        )
        self._on_failed(code)


class _Conversation:
    """All items of a stored response, and the first item of each id: clients may use an id twice."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items
        self.by_id: dict[str, dict[str, Any]] = {item["id"]: item for item in reversed(items)}


class References:
    """The stored responses that one request refers to. Each is read once, however many references it has. Their total
    size is limited: a reference is short, but its response may be long."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._read: dict[str, _Conversation] = {}  # by the response's id
        self._bytes_left = MAX_REFERRED_BYTES

    async def conversation(self, response_id: str, field: str) -> list[dict[str, Any]]:
        """Return all items up to this response. Raises as `ResponseStore.get`, and InvalidRequest beyond the limit."""
        return (await self._conversation(response_id, field)).items

    async def item(self, item_id: str, field: str) -> dict[str, Any]:
        """Return an item of a stored response's input or output. Raises as `conversation`."""
        response_id = response_of(item_id)
        if response_id is None:
            raise InvalidRequest(f"{field} is {item_id!r}, which is not an item id of this server", field=field)
        item = (await self._conversation(response_id, field)).by_id.get(item_id)
        if item is None:
            raise ResponseNotFound(f"{response_id} has no item {item_id!r}; send the item itself", field=field)
        return item

    async def _conversation(self, response_id: str, field: str) -> _Conversation:
        if response_id not in self._read:
            data = await self._store.read(response_id, field)
            self._bytes_left -= len(data)
            if self._bytes_left < 0:
                raise InvalidRequest(
                    f"the responses referred to have more than {MAX_REFERRED_BYTES} bytes together; send the items "
                    "themselves",
                    field=field,
                )
            self._read[response_id] = _Conversation(codec.decode(data, StoredResponse).conversation)
        return self._read[response_id]
