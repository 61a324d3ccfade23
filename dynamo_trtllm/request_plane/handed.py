"""The tickets that a worker has sent and no caller has released, with their callers, so that it can free them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_trtllm.messages import KvTransferParams


class StreamKey(NamedTuple):
    """A stream of a caller."""

    inbox: str
    stream: int


class Handed:
    """By the stream whose terminal chunk carried them, oldest first. All of one worker live equally long."""

    def __init__(self) -> None:
        self._tickets: dict[StreamKey, KvTransferParams] = {}
        self._frames: dict[StreamKey, int] = {}
        self._keys: dict[str, StreamKey] = {}  # by ticket id

    def put(self, key: StreamKey, ticket: KvTransferParams, frames: int) -> None:
        """Keep the ticket of a stream that ended after so many frames."""
        self._tickets[key] = ticket
        self._frames[key] = frames
        self._keys[ticket.ticket_id] = key

    def pop(self, key: StreamKey) -> KvTransferParams | None:
        """The ticket of this stream, which is no longer known then."""
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            del self._keys[ticket.ticket_id], self._frames[key]
        return ticket

    def key_of(self, ticket_id: str) -> StreamKey | None:
        return self._keys.get(ticket_id)

    def of(self, inbox: str) -> list[StreamKey]:
        return [key for key in self._tickets if key.inbox == inbox]

    def frames(self, key: StreamKey) -> int:
        """Return how many frames the stream had."""
        return self._frames[key]

    def expired(self, now: float) -> list[StreamKey]:
        """`now` in seconds since the epoch."""
        found = []
        for key, ticket in self._tickets.items():
            if ticket.expires_at > now:
                break
            found.append(key)
        return found

    def keys(self) -> list[StreamKey]:
        return list(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)
