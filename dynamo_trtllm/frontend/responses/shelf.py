"""The responses that are kept: by id, with all the items that the model was shown, so that each stands alone.

That a response was deleted or has gone does not break the later ones of its conversation.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, InvalidRequest, ResponseNotFound
from dynamo_trtllm.frontend.responses.ids import MARK_CHARS, PREFIX, is_response_id, mark_of, response_of
from dynamo_trtllm.plane.store import Store, StoreLimits

_log = logging.getLogger(__name__)


def store_limits(config: FrontendConfig) -> StoreLimits:
    return StoreLimits(
        max_entries=config.response_store_entries,
        max_bytes=config.response_store_bytes,
        ttl_s=config.response_store_ttl_s,
    )


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One response with what it answers."""

    response: dict[str, Any]  # as it was answered
    items: list[dict[str, Any]]  # its input: those of the turns before it, then its own

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Everything said so far, its answer included."""
        return [*self.items, *self.response["output"]]


class Shelf:
    """Names and finds responses. `shared`: other frontends find them too."""

    def __init__(self, store: Store, *, shared: bool) -> None:
        self._store = store
        self._shared = shared
        self._mark = secrets.token_hex(MARK_CHARS // 2)
        self.id_prefix = PREFIX + self._mark

    async def keep(self, kept: Kept) -> None:
        """Readable once it returned. A store that is away costs the client a later look, not the answer."""
        response_id = kept.response["id"]
        try:
            await self._store.put(response_id, codec.encode(kept))
        except DynamoError as exc:
            _log.warning("%s is not stored (%s): %s", response_id, exc.code, exc.message)

    async def find(self, response_id: str, field: str | None = None) -> Kept:
        """Raises ResponseNotFound, with `field` for the request's field that names it; Disconnected, Unreachable."""
        data = await self._store.get(response_id) if is_response_id(response_id) else None
        if data is None:
            raise self.missing(response_id, field)
        return codec.decode(data, Kept)

    async def find_item(self, item_id: str, field: str) -> dict[str, Any]:
        """The item of a kept response's input or output. Raises as `find`."""
        response_id = response_of(item_id)
        if response_id is None:
            raise InvalidRequest(f"{field} is {item_id!r}, which is no name of an item of this server", field=field)
        for item in (await self.find(response_id, field)).conversation:
            if item["id"] == item_id:
                return item
        raise ResponseNotFound(f"{response_id} has no item {item_id!r}; send the item itself", field=field)

    async def drop(self, response_id: str) -> None:
        """Raises as `find`."""
        await self.find(response_id)
        await self._store.delete(response_id)

    def missing(self, response_id: str, field: str | None) -> ResponseNotFound:
        """Says why it may not be here and what to do."""
        if not is_response_id(response_id):
            why = "it is no id of a response of this server"
        elif not self._shared and mark_of(response_id) != self._mark:
            why = (
                "it was made by another frontend, or by this one before a restart, and each keeps its own; start the "
                "frontends with --response-store jetstream to share them"
            )
        elif mark_of(response_id) != self._mark:
            why = (
                "it was deleted, made with store=false, has given way to newer ones, or is still being made, which "
                "only its own frontend can show or cancel"
            )
        else:
            why = (
                "it was deleted, made with store=false, not finished, or has given way to newer ones; send the whole "
                "conversation as input"
            )
        return ResponseNotFound(f"response {response_id!r} is not stored here: {why}", field=field)
