"""Records in etcd that no worker wrote: a frontend stays up, shows them, and asks only the workers
that are there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key, namespace_prefix
from dynamo_trtllm.protocol.messages import Instance, ModelDeploymentCard, Role, decode, encode
from tests.kit.cluster import PLAIN
from tests.kit.etcd_client import EtcdClient
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S
from tests.kit.workers import RunningWorkers, config, start_frontend, start_pairs

GOOD: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
}


class Intruder:
    """A client of etcd that writes invalid records under the keys of one namespace."""

    def __init__(self, etcd: str, namespace: str) -> None:
        self._etcd = EtcdClient(etcd)
        self.namespace = namespace
        self._written: list[bytes] = []

    async def put(self, key: bytes, record: bytes) -> None:
        self._written.append(key)
        await self._etcd.put(key, record)

    async def get(self, instance_id: str) -> tuple[bytes, Instance]:
        """The key and the record of a live instance."""
        prefix = namespace_prefix(self.namespace).encode()
        reply = await self._etcd.get(prefix, range_end=prefix[:-1] + b"0")
        (kv,) = [kv for kv in reply.kvs if kv.key.endswith(f"/{instance_id}".encode())]
        return kv.key, decode(kv.value, Instance)

    async def delete_all(self) -> None:
        while self._written:
            await self._etcd.delete(self._written.pop())


async def rejected(client: httpx.AsyncClient) -> dict[str, str]:
    rows = (await client.get("/health")).json()["rejected_records"]
    return {row["key"]: row["reason"] for row in rows}


async def until_rejected(client: httpx.AsyncClient, keys: set[str]) -> dict[str, str]:
    async with asyncio.timeout(SOON_S):
        while not keys <= (rows := await rejected(client)).keys():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return rows


async def put_before_the_start(intruder: Intruder, namespace: str) -> str:
    """Write three wrong records. Return the key of the one whose card has another vocabulary."""
    await intruder.put(namespace_prefix(namespace).encode() + b"\xff\xfe", b"")
    card = ModelDeploymentCard(
        name="odd", context_length=8, vocab_size=0, eos_token_ids=(), renderer="harmony"
    )
    odd = msgspec.structs.replace(make_instance(0xC, namespace=namespace), card=card)
    await intruder.put(instance_key(endpoint_of(odd), odd.id).encode(), encode(odd))
    card = msgspec.structs.replace(card, name="tiny", vocab_size=7)
    oldest = msgspec.structs.replace(make_instance(0xB, namespace=namespace), card=card)
    oldest_key = instance_key(endpoint_of(oldest), oldest.id)
    await intruder.put(oldest_key.encode(), encode(oldest))
    return oldest_key


async def test_frontend_serves_despite_poisoned_records(
    etcd_server: str, nats_server: str, running_workers: RunningWorkers
) -> None:
    """Some are there before it starts, and would have ended it at each start."""
    chosen = config(etcd_server, nats_server)
    prefix = namespace_prefix(chosen.namespace)
    intruder = Intruder(etcd_server, chosen.namespace)
    oldest_key = await put_before_the_start(intruder, chosen.namespace)
    start_pairs(chosen, running_workers)
    serving, url = start_frontend(etcd_server, nats_server, chosen.namespace)
    async with (
        asyncio.timeout(4 * SOON_S),
        httpx.AsyncClient(base_url=url, timeout=None, **PLAIN) as client,
    ):
        while (await client.get("/v1/models/tiny/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        rows = await rejected(client)
        # It is the oldest record of its model, and costs only its own instance.
        assert rows.pop(oldest_key).startswith("card.vocab_size is 7, and ")
        assert rows == {
            rf"{prefix}\udcff\udcfe": (
                "the key is not of the form v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID"
            ),
            f"{prefix}tensorrt_llm/generate/c": (
                "the record can't be read: not a Instance: Expected `int` >= 1 - at"
                " `$.card.vocab_size`"
            ),
        }

        (worker,) = [
            running
            for running in running_workers.workers
            if running._config.disaggregation_mode is Role.DECODE
        ]
        number = f"{worker.instance_id:x}"
        real_key, real = await intruder.get(number)
        ghost_key = f"{prefix}tensorrt_llm/generate/aaaa"
        thief = msgspec.structs.replace(real, component="zzz", subject="intruder.generate-1")
        thief_key = instance_key(endpoint_of(thief), thief.id)
        deep_key = f"{prefix}tensorrt_llm/generate/d"
        await intruder.put(ghost_key.encode(), encode(real))
        await intruder.put(thief_key.encode(), encode(thief))
        await intruder.put(deep_key.encode(), b"\x81\xa1x" + b"\x91" * 100_000)
        reasons = await until_rejected(client, {ghost_key, thief_key, deep_key})
        assert reasons[ghost_key] == f"id is aaaa in the key and {number} in the record"
        assert reasons[thief_key].startswith("subject is 'intruder.generate-1'; instance ")
        assert real_key.decode() not in reasons

        for _ in range(4):  # to whichever decode worker there is
            answer = await client.post("/v1/chat/completions", json=GOOD)
            assert answer.status_code == 200, answer.text
        assert len((await client.get("/health")).json()["instances"]) == 2

        await intruder.delete_all()
        async with asyncio.timeout(SOON_S):
            while await rejected(client):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
