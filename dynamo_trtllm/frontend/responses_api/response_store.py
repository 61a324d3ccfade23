"""Store responses by id, each with all items of its conversation, and build ids.

Deleting or evicting a response therefore does not break later responses of the same conversation.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.responses_api.key_value_store import KeyValueStore, StoreLimits
from dynamo_trtllm.frontend.responses_api.tool_items import ITEM_PREFIXES
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    DynamoError,
    InternalError,
    InvalidRequest,
    ResponseNotFound,
)
from dynamo_trtllm.protocol.messages import decode
from dynamo_trtllm.support.background import cancel_all

log = logging.getLogger(__name__)

_WRITE_S: Final = 30.0  # longest time of one write
_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)  # between look-ups of a response of another frontend
MAX_REFERRED_BYTES: Final = 32 << 20  # size of all stored responses that one request may refer to


PREFIX: Final = "resp_"
FRONTEND_ID_CHARS: Final = 8
_RESPONSE: Final = re.compile(r"resp_[0-9a-f]{40}")
_ITEM_PREFIX: Final = "|".join(ITEM_PREFIXES.values())
_ITEM: Final = re.compile(rf"(?:{_ITEM_PREFIX})_([0-9a-f]{{40}})[io][0-9a-f]{{4,}}")


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def frontend_id_of(response_id: str) -> str:
    """Return the id of the frontend that created the response."""
    return response_id[len(PREFIX) : len(PREFIX) + FRONTEND_ID_CHARS]


def item_id(kind: str, response_id: str, place: Literal["i", "o"], index: int) -> str:
    """Return the id of an item of a response's input ("i") or output ("o")."""
    return f"{kind}_{response_id.removeprefix(PREFIX)}{place}{index:04x}"


def store_limits(config: FrontendConfig) -> StoreLimits:
    return StoreLimits(
        max_entries=config.response_store_entries,
        max_bytes=config.response_store_bytes,
        max_value_bytes=min(config.response_store_entry_bytes, config.response_store_bytes),
        ttl_s=config.response_store_ttl_s,
    )


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response with its input."""

    response: dict[str, Any]  # the response that was sent to the client
    # The input of the response: the items of earlier turns, then its own.
    items: list[dict[str, Any]]
    owner: str = ""  # name of the API key of its client; "": there were no keys

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items up to and including this response's output."""
        return [*self.items, *self.response["output"]]


class LoadedResponse(NamedTuple):
    """A response from the store."""

    stored: StoredResponse
    num_bytes: int


class _Write(NamedTuple):
    data: bytes
    task: asyncio.Task[None]


@dataclass(eq=False)
class ResponseStore:
    """The store of responses, which also assigns their ids.

    A response is written in the background, so that a slow or unreachable store delays no answer.
    Until the write ends, only this frontend can read the response. A failed write is logged and
    counted, and its response is lost.

    Args:
        shared: other frontends use the same store.
        max_bytes: largest stored response.
        on_write_failed: called with the error's code if a response could not be stored.
        max_pending_bytes: the most bytes that may wait to be written. Beyond it, `put` waits for
            its own write.
        close_s: longest wait for pending writes when the frontend exits.
    """

    store: KeyValueStore
    _: KW_ONLY
    shared: bool
    max_bytes: int
    on_write_failed: Callable[[str], None]
    max_pending_bytes: int = 64 << 20
    close_s: float = 5.0

    def __post_init__(self) -> None:
        self._frontend_id = secrets.token_hex(FRONTEND_ID_CHARS // 2)
        self.id_prefix = PREFIX + self._frontend_id
        self._writes: dict[str, _Write] = {}  # the newest pending write of each response
        self._tasks: set[asyncio.Task[None]] = set()  # the tasks of all pending writes
        self._pending_bytes = 0

    async def put(self, response_id: str, data: bytes, owner: str) -> None:
        """Start to store a response.

        Returns at the end of the write if more than `max_pending_bytes` are pending.
        """
        before = self._writes.get(response_id)
        task = asyncio.create_task(
            self._write(response_id, data, owner, before), name=f"write of {response_id}"
        )
        write = _Write(data, task)
        self._writes[response_id] = write
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._written(response_id, write))
        self._pending_bytes += len(data)
        if self._pending_bytes > self.max_pending_bytes:
            await asyncio.wait({task})

    async def aclose(self) -> None:
        """Wait at most `close_s` for pending writes, then cancel them. The store stays open."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=self.close_s)
            await cancel_all(late)

    async def _write(
        self, response_id: str, data: bytes, owner: str, before: _Write | None
    ) -> None:
        if before is not None:  # writes of one response must not overtake each other
            await asyncio.wait({before.task})
        async with asyncio.timeout(_WRITE_S):
            await self.store.put(response_id, data, owner)

    def _written(self, response_id: str, write: _Write) -> None:
        """Forget a write that has ended. Log and count its failure."""
        self._tasks.discard(write.task)
        self._pending_bytes -= len(write.data)
        if self._writes.get(response_id) is write:
            del self._writes[response_id]
        error: BaseException | None
        if write.task.cancelled():
            error = DeadlineExceeded("the frontend exited before the write ended")
        else:
            error = write.task.exception()
            if isinstance(error, TimeoutError):
                error = DeadlineExceeded(f"the store took more than {_WRITE_S:g} s")
        if error is None:
            return
        code = InternalError.code
        traceback_of: BaseException | None = error
        if isinstance(error, DynamoError):
            code = error.code
            traceback_of = None  # the message says enough
        log.warning("%s was not stored (%s): %s", response_id, code, error, exc_info=traceback_of)
        self.on_write_failed(code)

    async def load(self, response_id: str, owner: str, field: str | None = None) -> LoadedResponse:
        """Return a stored response with its size. Arguments and errors as for `get`."""
        data = await self._read(response_id, field)
        stored = decode(data, StoredResponse)
        if stored.owner != owner:
            raise self._missing(response_id, field)
        return LoadedResponse(stored, len(data))

    async def _read(self, response_id: str, field: str | None) -> bytes:
        """Return a serialized response of any owner."""
        write = self._writes.get(response_id)
        if write is not None:
            return write.data
        if is_response_id(response_id):
            pauses_s = [0.0]
            if self.shared and frontend_id_of(response_id) != self._frontend_id:
                # Another frontend may still be writing a response that its client has received.
                pauses_s += _PAUSES_S
            for pause_s in pauses_s:
                if pause_s:
                    await asyncio.sleep(pause_s)
                data = await self.store.get(response_id)
                if data is not None:
                    return data
        raise self._missing(response_id, field)

    async def get(self, response_id: str, owner: str, field: str | None = None) -> StoredResponse:
        """Return a stored response.

        Args:
            response_id: id of the response.
            owner: name of the API key of the client that asks; "": there are no keys.
            field: the request's field that contains the id, for the error.

        Raises:
            ResponseNotFound: the response is not stored, or belongs to another key.
            Disconnected, Unreachable: the store cannot be reached.
        """
        return (await self.load(response_id, owner, field)).stored

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a stored response. Arguments and errors as for `get`."""
        await self.get(response_id, owner)
        write = self._writes.get(response_id)
        if write is not None:
            await asyncio.wait({write.task})  # a write that ends later would restore it
        # If that write has failed, nothing is stored: this raises ResponseNotFound.
        await self.get(response_id, owner)
        await self.store.delete(response_id)

    def _missing(self, response_id: str, field: str | None) -> ResponseNotFound:
        """Return the error for a response that is not stored, with reasons and what to do."""
        is_own = frontend_id_of(response_id) == self._frontend_id
        if not is_response_id(response_id):
            reason = "it is not a response id of this server"
        elif not (self.shared or is_own):
            reason = (
                "another frontend created it, or this one before a restart, and each has its own"
                " store; start the frontends with --response-store jetstream to share responses"
            )
        else:
            reason = "it was deleted, created with store=false, evicted, or "
            reason += "did not finish" if is_own else "is still in progress at another frontend"
            reason += "; send the whole conversation as input"
        return ResponseNotFound(f"response {response_id!r} not found: {reason}", field=field)


class _ReadResponse(NamedTuple):
    """All items of a response's conversation."""

    items: list[dict[str, Any]]
    by_id: dict[str, dict[str, Any]]  # the first item of each id: clients may repeat ids


class References:
    """The stored responses to which one request refers.

    Each response is read once, however often the request refers to it. The total size of the
    responses is limited, because a short reference may stand for a long response.
    """

    def __init__(self, store: ResponseStore, owner: str) -> None:
        """Read nothing yet. `owner`: name of the request's API key; "": there are no keys."""
        self._store = store
        self._owner = owner
        self._read: dict[str, _ReadResponse] = {}  # responses that were read, by id
        self._bytes_left = MAX_REFERRED_BYTES

    async def conversation(self, response_id: str, field: str) -> list[dict[str, Any]]:
        """Return all items up to and including this response.

        Raises:
            InvalidRequest: the referenced responses are too large. Other errors are those of
                `ResponseStore.get`.
        """
        if response_id not in self._read:
            loaded = await self._store.load(response_id, self._owner, field)
            self._bytes_left -= loaded.num_bytes
            if self._bytes_left < 0:
                raise InvalidRequest(
                    f"the referenced responses have more than {MAX_REFERRED_BYTES} bytes together;"
                    " send the items themselves",
                    field=field,
                )
            items = loaded.stored.conversation
            by_id = {item["id"]: item for item in reversed(items)}
            self._read[response_id] = _ReadResponse(items, by_id)
        return self._read[response_id].items

    async def item(self, item_id: str, field: str) -> dict[str, Any]:
        """Return an item of a stored response's input or output. Raises as `conversation`."""
        match = _ITEM.fullmatch(item_id)
        if match is None:
            raise InvalidRequest(
                f"{field} is {item_id!r}, which is not an item id of this server", field=field
            )
        response_id = PREFIX + match.group(1)
        await self.conversation(response_id, field)
        item = self._read[response_id].by_id.get(item_id)
        if item is None:
            raise ResponseNotFound(
                f"{response_id} has no item {item_id!r}; send the item itself", field=field
            )
        return item
