"""The command against a real etcd and JetStream: what it shows, removes, refuses, and with which
status it ends.
"""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from dynamo_trtllm.cli import clear_namespace
from dynamo_trtllm.cluster.discovery.discovery_interface import Added
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore, Lease, key_text
from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key, namespace_prefix
from dynamo_trtllm.cluster.discovery.share_records import planner_key
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.frontend.responses_api import jetstream
from dynamo_trtllm.frontend.responses_api.jetstream import JetStreamStore, bucket_state
from dynamo_trtllm.frontend.responses_api.key_value_store import StoreLimits
from dynamo_trtllm.protocol.messages import encode
from tests.kit.instances import make_instance
from tests.kit.waiting import SOON_S

NO_LEASE = Lease(id=0, ttl_s=0)
LIMITS = StoreLimits(max_entries=10, max_bytes=1 << 20, max_value_bytes=1 << 20, ttl_s=60.0)


@dataclass(frozen=True, slots=True)
class Deployment:
    etcd: str
    nats: str
    namespace: str
    store: EtcdStore

    async def leave(self, number: int, lease: Lease = NO_LEASE) -> str:
        """A record without a process that renews it."""
        instance = make_instance(number, namespace=self.namespace)
        key = instance_key(endpoint_of(instance), number)
        await self.store.put(key, encode(instance), lease)
        return key

    async def keys(self) -> list[str]:
        return sorted((await self.store.read_all(namespace_prefix(self.namespace))).records)

    async def run(self, *flags: str, nats: str | None = None) -> int:
        argv = [
            "--etcd-endpoints",
            self.etcd,
            "--nats-server",
            nats or self.nats,
            "--namespace",
            self.namespace,
        ]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(clear_namespace.main, [*argv, *flags])
        assert isinstance(ended.value.code, int)
        return ended.value.code


@pytest.fixture
async def deployment(etcd_server: str, nats_server: str) -> AsyncIterator[Deployment]:
    store = EtcdStore(ConnectionConfig(etcd_endpoints=etcd_server))
    yield Deployment(etcd_server, nats_server, f"clear-{secrets.token_hex(4)}", store)
    await store.aclose()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_clear_when_nothing_is_there_then_it_says_so(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await deployment.run() == 0
    assert capsys.readouterr().out == f"namespace {deployment.namespace} is clear\n"


async def test_clear_removes_only_stale_records_of_its_namespace(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    key = await deployment.leave(7)
    longer = Deployment(
        deployment.etcd, deployment.nats, f"{deployment.namespace}-2", deployment.store
    )
    other = await longer.leave(8)
    kept = await JetStreamStore.connect(deployment.nats, deployment.namespace, LIMITS)
    await kept.put("resp_1", b"answer")
    await kept.aclose()
    assert await deployment.run("--yes") == 0
    first, instance, bucket, last = capsys.readouterr().out.splitlines()
    assert first == f"namespace {deployment.namespace} has"
    assert instance == f"  etcd       {key} (no lease)"
    assert bucket.startswith(
        f"  JetStream  dynamo_trtllm_responses_{deployment.namespace} (1 messages, "
    )
    assert last == "Removed."
    assert await deployment.keys() == []
    assert await longer.keys() == [other]
    assert await bucket_state(deployment.nats, deployment.namespace) is None


async def test_clear_shows_escaped_key_that_is_no_utf8(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    key = key_text(namespace_prefix(deployment.namespace).encode() + b"\xff\x1b[2J")
    await deployment.store.put(key, b"", NO_LEASE)
    assert await deployment.keys() == [key]
    assert await deployment.run("--yes") == 0
    assert (
        f"  etcd       v1/instances/{deployment.namespace}/\\udcff\\x1b[2J ("
        in capsys.readouterr().out
    )
    assert await deployment.keys() == []


async def test_clear_of_live_instance_needs_force(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = await deployment.leave(1)
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=deployment.etcd), lease_ttl_s=3)
    try:
        await discovery.register(make_instance(2, namespace=deployment.namespace))
        live = next(key for key in await deployment.keys() if key != stale)
        assert await deployment.run("--yes") == 1
        said = capsys.readouterr().out
        assert f"  etcd       {live} (live, " in said
        assert "Nothing removed: 1 instance is live" in said
        assert await deployment.keys() == [stale, live]
        assert await deployment.run("--yes", "--force") == 0
        watch = discovery.watch(deployment.namespace)
        async with (
            asyncio.timeout(2 * SOON_S),
            aclosing(watch),
        ):  # it does run, and its next renewal finds the lease gone
            async for event in watch:
                if isinstance(event, Added):
                    break
        assert await deployment.keys() == [live]
    finally:
        await discovery.aclose()


async def test_clear_names_the_live_planner(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = await deployment.store.grant(60)
    await deployment.store.put(planner_key(deployment.namespace), b"a planner", lease)
    assert await deployment.run("--yes") == 1
    assert "Nothing removed: the planner is live" in capsys.readouterr().out
    await deployment.leave(3, lease)
    assert await deployment.run("--yes") == 1
    assert "Nothing removed: 1 instance and the planner are live" in capsys.readouterr().out


async def test_clear_of_killed_worker_is_permanent(deployment: Deployment) -> None:
    lease = await deployment.store.grant(60)
    await deployment.leave(3, lease)
    await deployment.leave(4, lease)
    assert await deployment.run("--yes") == 1
    assert await deployment.run("--yes", "--force") == 0
    assert await deployment.keys() == []


@pytest.mark.parametrize(
    ("answer", "status", "left"),
    [("y\n", 0, 0), ("YES\n", 0, 0), ("n\n", 1, 1), ("\n", 1, 1), ("", 1, 1)],
)
async def test_clear_on_a_terminal_removes_only_after_yes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, left: int
) -> None:
    await deployment.leave(4)
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert await deployment.run() == status
    assert len(await deployment.keys()) == left


async def test_clear_without_confirmation_exits_with_2(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await deployment.leave(5)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert await deployment.run() == 2
    assert capsys.readouterr().err.endswith(
        "confirmation needs a terminal, and stdin is none; pass --yes\n"
    )
    assert len(await deployment.keys()) == 1


async def test_clear_without_nats_exits_with_1(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jetstream, "CONNECT_TIMEOUT_S", 0.2)
    await deployment.leave(6)
    assert await deployment.run("--yes", nats="nats://127.0.0.1:1") == 1
    assert (
        "can't be used (TimeoutError); check --nats-server and that NATS runs"
        in capsys.readouterr().err
    )
    assert len(await deployment.keys()) == 1
