"""Records in etcd that no worker wrote: a frontend stays up, shows them, and asks only the workers that are there."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc.aio
import msgspec
import pytest
from etcd3aio.kv import KVService

from dynamo_trtllm import codec
from dynamo_trtllm.discovery.keys import endpoint_of, instance_key, namespace_prefix
from dynamo_trtllm.messages import Instance, ModelCard
from tests.e2e.cluster import Cluster, until
from tests.instances import make_instance
from tests.waiting import SOON_S

pytestmark = pytest.mark.timeout(180)

GOOD: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


class Intruder:
    """Writes what it likes under the keys of one namespace."""

    def __init__(self, etcd: str, namespace: str) -> None:
        self._etcd = etcd
        self.namespace = namespace
        self._written: list[bytes] = []

    def put(self, key: bytes, record: bytes) -> None:
        self._written.append(key)
        asyncio.run(self._call(partial(KVService.put, key=key, value=record)))

    def get(self, instance_id: str) -> tuple[bytes, Instance]:
        """The key and the record of a live instance."""
        prefix = namespace_prefix(self.namespace).encode()
        reply = asyncio.run(self._call(partial(KVService.get, key=prefix, range_end=prefix[:-1] + b"0")))
        (kv,) = [kv for kv in reply.kvs if kv.key.endswith(f"/{instance_id}".encode())]
        return kv.key, codec.decode(kv.value, Instance)

    def delete_all(self) -> None:
        while self._written:
            asyncio.run(self._call(partial(KVService.delete, key=self._written.pop())))

    async def _call(self, call: Any) -> Any:
        async with grpc.aio.insecure_channel(self._etcd) as channel:
            return await call(KVService(channel), timeout=SOON_S)


@pytest.fixture
def intruder(etcd_server: str) -> Iterator[Intruder]:
    intruder = Intruder(etcd_server, f"poisoned-{secrets.token_hex(4)}")
    yield intruder
    intruder.delete_all()


@pytest.fixture
def cluster(etcd_server: str, nats_server: str, intruder: Intruder) -> Iterator[Cluster]:
    """Its frontend starts with records in etcd that would have ended it at each start."""
    prefix = namespace_prefix(intruder.namespace).encode()
    intruder.put(prefix + b"\xff\xfe", b"")
    card = ModelCard(name="odd", context_length=8, vocab_size=0, eos_token_ids=(), renderer="harmony")
    odd = msgspec.structs.replace(make_instance(0xC, namespace=intruder.namespace), card=card)
    intruder.put(instance_key(endpoint_of(odd), odd.id).encode(), codec.encode(odd))
    cluster = Cluster(etcd_server, nats_server, intruder.namespace, ("--canary-interval-s", "0.1"))
    try:
        cluster.mock("prefill", "mock")
        yield cluster
    finally:
        cluster.stop()


def rejected(cluster: Cluster) -> dict[str, str]:
    with cluster.client() as client:
        rows = client.get("/health").json()["rejected_records"]
    return {row["key"]: row["reason"] for row in rows}


def test_frontend_when_etcd_holds_poisoned_records_then_it_stays_up_shows_them_and_serves(
    cluster: Cluster, intruder: Intruder
) -> None:
    worker = cluster.mock("decode", "mock").instance()
    cluster.until_ready("mock")
    prefix = namespace_prefix(intruder.namespace)
    assert rejected(cluster) == {
        rf"{prefix}\udcff\udcfe": "the key is not of the form v1/instances/NAMESPACE/COMPONENT/ENDPOINT/ID",
        f"{prefix}tensorrt_llm/generate/c": "card.vocab_size is 0; it must be from 1 to 16777216",
    }

    real_key, real = intruder.get(worker)
    ghost_key = f"{prefix}tensorrt_llm/generate/aaaa"
    thief = msgspec.structs.replace(real, component="zzz", subject="intruder.generate-1")
    thief_key = instance_key(endpoint_of(thief), thief.id)
    deep_key = f"{prefix}tensorrt_llm/generate/d"
    intruder.put(ghost_key.encode(), codec.encode(real))
    intruder.put(thief_key.encode(), codec.encode(thief))
    intruder.put(deep_key.encode(), b"\x81\xa1x" + b"\x91" * 100_000)
    until(lambda: {ghost_key, thief_key, deep_key} <= rejected(cluster).keys(), SOON_S)
    reasons = rejected(cluster)
    assert reasons[ghost_key] == f"id is aaaa in the key and {worker} in the record"
    assert reasons[thief_key].startswith("subject is 'intruder.generate-1'; instance ")
    assert real_key.decode() not in reasons

    with cluster.client() as client:
        for _ in range(4):  # to whichever decode worker there is
            answer = client.post("/v1/chat/completions", json=GOOD)
            assert answer.status_code == 200, answer.text
        shown = [f"{each['instance_id']:x}" for each in client.get("/health").json()["instances"]]
    assert len(shown) == 2
    assert worker in shown

    intruder.delete_all()
    until(lambda: not rejected(cluster), SOON_S)
    with cluster.client() as client:
        assert client.post("/v1/chat/completions", json=GOOD).status_code == 200
        assert len(client.get("/health").json()["instances"]) == 2
    assert not cluster.frontend.is_over
