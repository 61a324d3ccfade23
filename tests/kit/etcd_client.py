"""Reads and writes keys of etcd as another program would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx

from dynamo_trtllm.cluster.discovery import etcd_api
from dynamo_trtllm.cluster.discovery.etcd_api import EtcdCalls
from tests.kit.waiting import SOON_S


class EtcdClient:
    """A client of one etcd server. Each call has its own connection."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def get(self, key: bytes, range_end: bytes = b"") -> Any:
        """Return the answer to a RangeRequest: that of one key without `range_end`."""
        request = etcd_api.RangeRequest(key=key, range_end=range_end)
        async with self._connected() as etcd:
            return await etcd.range(request, timeout=SOON_S)

    async def get_all(self) -> Any:
        return await self.get(b"\0", range_end=b"\0")

    async def put(self, key: bytes | str, value: bytes) -> None:
        request = etcd_api.PutRequest(key=_encoded(key), value=value)
        async with self._connected() as etcd:
            await etcd.put(request, timeout=SOON_S)

    async def delete(self, key: bytes | str) -> None:
        request = etcd_api.DeleteRangeRequest(key=_encoded(key))
        async with self._connected() as etcd:
            await etcd.delete_range(request, timeout=SOON_S)

    async def compact(self) -> None:
        """Remove all revisions before the newest one."""
        revision = (await self.get(b"\0")).header.revision
        async with httpx.AsyncClient() as client:
            url = f"http://{self._address}/v3/kv/compaction"
            answer = await client.post(url, json={"revision": str(revision), "physical": True})
            answer.raise_for_status()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[EtcdCalls]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            yield EtcdCalls(channel)


def _encoded(key: bytes | str) -> bytes:
    return key.encode() if isinstance(key, str) else key
