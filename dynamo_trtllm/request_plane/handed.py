"""Store the KV transfer parameters that a worker has sent, with their callers, until they are released or expire."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_trtllm.messages import KvTransferParams


class StreamKey(NamedTuple):
    """Identity of a stream: the caller's inbox and the stream's number in it."""

    inbox: str
    stream: int


class Handed:
    """KV transfers by the stream whose terminal chunk had their parameters, oldest first.

    All have the same lifetime, so the oldest expires first.
    """

    def __init__(self) -> None:
        self._transfers: dict[StreamKey, KvTransferParams] = {}
        self._frames: dict[StreamKey, int] = {}
        self._keys: dict[str, StreamKey] = {}  # by transfer id

    def put(self, key: StreamKey, kv_params: KvTransferParams, frames: int) -> None:
        """Store the KV transfer parameters of a stream that ended after `frames` frames."""
        self._transfers[key] = kv_params
        self._frames[key] = frames
        self._keys[kv_params.transfer_id] = key

    def pop(self, key: StreamKey) -> KvTransferParams | None:
        """Remove a stream and return its KV transfer parameters; None if there are none."""
        kv_params = self._transfers.pop(key, None)
        if kv_params is not None:
            del self._keys[kv_params.transfer_id], self._frames[key]
        return kv_params

    def key_of(self, transfer_id: str) -> StreamKey | None:
        """Return the stream of a transfer id."""
        return self._keys.get(transfer_id)

    def of(self, inbox: str) -> list[StreamKey]:
        """Return the streams of one caller."""
        return [key for key in self._transfers if key.inbox == inbox]

    def frames(self, key: StreamKey) -> int:
        """Return the number of frames of a stream."""
        return self._frames[key]

    def expired(self, now: float) -> list[StreamKey]:
        """Return the streams whose KV has expired at `now`, in seconds since the epoch."""
        expired = []
        for key, kv_params in self._transfers.items():
            if kv_params.expires_at > now:
                break
            expired.append(key)
        return expired

    def keys(self) -> list[StreamKey]:
        """Return all streams."""
        return list(self._transfers)

    def __len__(self) -> int:
        return len(self._transfers)
