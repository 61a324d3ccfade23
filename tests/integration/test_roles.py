"""The users of NATS and etcd: each role may do what it needs, and nothing else. Real servers.

The tables of this file say what each role may do, apart from `cluster.roles`: a permission that is
wider or narrower there fails a test here.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.blocking import wait_for
from dynamo_trtllm.cli.remote_recordings import with_other_machines
from dynamo_trtllm.cli.status import NothingRuns, collect
from dynamo_trtllm.cluster.discovery import etcd_api as api
from dynamo_trtllm.cluster.discovery.discovery_interface import Added, Synced
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_connection import EtcdConnection
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore, prefix_end
from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key
from dynamo_trtllm.cluster.etcd_users import set_permissions
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane, NatsTransport
from dynamo_trtllm.cluster.request_plane.nats_connection import (
    NatsAccess,
    NatsClient,
    close_client,
    connect_client,
)
from dynamo_trtllm.cluster.roles import bucket_of, cluster_users, nats_configuration
from dynamo_trtllm.config.commands import ExplainConfig, StatusConfig
from dynamo_trtllm.config.config_base import ClusterRole, ConnectionConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.frontend.responses_api.jetstream import (
    JetStreamStore,
    bucket_state,
    delete_bucket,
)
from dynamo_trtllm.frontend.responses_api.key_value_store import StoreLimits
from dynamo_trtllm.launch.server_users import PasswordFolder, set_up_etcd
from dynamo_trtllm.observability.recordings import Recordings
from dynamo_trtllm.protocol.errors import (
    ConfigError,
    DynamoError,
    NoListener,
    Unreachable,
    UserRejected,
)
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, GetFile, token_ids
from tests.kit.instance_events import instance_events
from tests.kit.instances import make_instance
from tests.kit.request_planes import LIMITS, ScriptedService, make_request
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

OWN = "prefill-1"  # component with one worker
OWN_USER = f"worker-{OWN}"
USERS = cluster_users(["dynamo"], own_components=[OWN])
BUCKET = bucket_of("dynamo")

REQUEST = "dynamo_backend.generate-1"
PREFILL = "dynamo_prefill.generate-2"
OWN_REQUEST = f"dynamo_{OWN}.generate-3"
CONTROL = f"{REQUEST}.control"
TO_FRONTEND = "_INBOX_frontend.x"
TO_WORKER = "_INBOX_worker.x.1"
TO_OWN = f"_INBOX_worker.{OWN}.x.1"
TO_PLANNER = "_INBOX_planner.x"
TO_TOOL = "_INBOX_tool.x"
USAGE = "dynamo.frontend_usage"
SAMPLES = "dynamo.frontend_samples"
TIMELINE = "dynamo.timelines.x"
RESPONSE = f"$KV.{BUCKET}.resp_1"
STREAM = f"$JS.API.STREAM.%s.KV_{BUCKET}"
STREAMS = {
    STREAM % "INFO",
    STREAM % "CREATE",
    STREAM % "MSG.GET",
    f"$JS.API.DIRECT.GET.KV_{BUCKET}.x",
}
SUBJECTS = {
    REQUEST,
    PREFILL,
    OWN_REQUEST,
    CONTROL,
    TO_FRONTEND,
    TO_WORKER,
    TO_OWN,
    TO_PLANNER,
    TO_TOOL,
    RESPONSE,
    *STREAMS,
    STREAM % "DELETE",
    STREAM % "PURGE",
    STREAM % "UPDATE",
    "dynamo.load",
    "dynamo.kv_events",
    "dynamo.recordings",
    USAGE,
    SAMPLES,
    TIMELINE,
    "$JS.API.STREAM.CREATE.all",
    "other_backend.generate-1",
    "other.load",
    "other.recordings",
    "_INBOX.x",
    "anything",
    "$SYS.REQ.SERVER.PING",
}
WIDE = {">", "*.>", "dynamo_backend.>", "_INBOX_frontend.>", "_INBOX_worker.>", f"$KV.{BUCKET}.>"}
LOADS = {"dynamo.load", "dynamo.kv_events"}
TO_ALL_WORKERS = {REQUEST, PREFILL, OWN_REQUEST, CONTROL}
MAY_PUBLISH = {
    "frontend": {
        *TO_ALL_WORKERS,
        TO_WORKER,
        TO_OWN,
        TO_TOOL,
        USAGE,
        SAMPLES,
        TIMELINE,
        "dynamo.recordings",
        RESPONSE,
        *STREAMS,
    },
    "worker": {TO_FRONTEND, TO_WORKER, TO_OWN, TO_TOOL, TIMELINE, *LOADS},
    OWN_USER: {TO_FRONTEND, TO_OWN, TO_TOOL, TIMELINE, *LOADS},
    "planner": {TO_PLANNER},
    "tool": {TO_TOOL, "dynamo.recordings", STREAM % "INFO", STREAM % "DELETE"},
}
MAY_SUBSCRIBE = {
    "frontend": {
        TO_FRONTEND,
        "_INBOX_frontend.>",
        *LOADS,
        USAGE,
        SAMPLES,
        TIMELINE,
        "dynamo.recordings",
    },
    "worker": {
        REQUEST,
        PREFILL,
        CONTROL,
        "dynamo_backend.>",
        TO_WORKER,
        TO_OWN,
        "_INBOX_worker.>",
        "dynamo.recordings",
    },
    OWN_USER: {OWN_REQUEST, TO_OWN, "dynamo.recordings"},
    "planner": {TO_PLANNER, "dynamo.load", USAGE},
    "tool": {TO_TOOL},
}

BACKEND_KEY = "v1/instances/dynamo/backend/generate/1"
OWN_KEY = f"v1/instances/dynamo/{OWN}/generate/1"
OTHER_KEY = "v1/instances/other/backend/generate/1"
OF_PLANNER = {"v1/instances/dynamo/shares", "v1/instances/dynamo/planner"}
IN_NAMESPACE = {BACKEND_KEY, OWN_KEY, "v1/instances/dynamo/other/generate/1", *OF_PLANNER}
KEYS = {*IN_NAMESPACE, OTHER_KEY, "v1/instances/other/shares", "v1/x", "anything"}
MAY_READ = {
    "frontend": IN_NAMESPACE,
    "worker": IN_NAMESPACE,
    OWN_USER: IN_NAMESPACE,
    "planner": IN_NAMESPACE,
    "tool": {*IN_NAMESPACE, OTHER_KEY, "v1/instances/other/shares"},
}
MAY_WRITE = {
    "frontend": set[str](),
    "worker": {BACKEND_KEY},
    OWN_USER: {OWN_KEY},
    "planner": OF_PLANNER,
    "tool": IN_NAMESPACE,
}
END = "end.of.test"
LIMIT = StoreLimits(max_entries=10, max_bytes=1 << 20, max_value_bytes=1 << 16, ttl_s=60.0)


class Servers:
    """One etcd and one nats-server with the users of the roles."""

    def __init__(self, folder: Path) -> None:
        self.users = PasswordFolder(folder, USERS, has_root=True)
        self.files = self.users.credentials_files
        self.config = folder / "nats-users.conf"
        self.write_users()
        self.nats = TestServer("nats", folder / "nats", self.config)
        self.etcd = TestServer("etcd", folder / "etcd")
        config = ConnectionConfig(etcd_endpoints=self.etcd.address)
        wait_for(set_up_etcd(config, USERS, self.users.passwords))

    def write_users(self) -> None:
        self.config.write_text(self.users.nats_configuration())

    def file(self, user: str) -> Path:
        return Path(str(self.files).replace("{role}", user))

    def settings(self) -> dict[str, Any]:
        return {
            "etcd_endpoints": self.etcd.address,
            "etcd_credentials_file": self.files,
            "nats_server": self.nats.address,
            "nats_credentials_file": self.files,
        }

    def stop(self) -> None:
        self.nats.stop()
        self.etcd.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("roles"))
    yield made
    made.stop()


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[Servers]:
    """Servers whose users a test may change."""
    made = Servers(tmp_path)
    yield made
    made.stop()


async def denied(servers: Servers, user: str) -> tuple[set[str], set[str]]:
    """Return to which subjects a user may not publish, and to which it may not subscribe."""
    reasons: list[str] = []
    has_ended = asyncio.Event()

    async def note(error: Exception) -> None:
        reasons.append(str(error))
        if END in reasons[-1]:
            has_ended.set()

    client = NatsClient(NatsAccess(credentials_file=servers.file(user)))
    await connect_client(client, servers.nats.address, SOON_S, error_cb=note)
    try:
        for subject in sorted(SUBJECTS):
            await client.publish(subject, b"")
        for subject in sorted(SUBJECTS | WIDE):
            await client.subscribe(subject)
        await client.subscribe(END)  # denied as well, after all others
        async with asyncio.timeout(SOON_S):
            await has_ended.wait()
    finally:
        await close_client(client)
    lines = "\n".join(reasons).lower()  # as nats-py reports them
    return (
        {name for name in SUBJECTS if f'publish to "{name.lower()}"' in lines},
        {name for name in SUBJECTS | WIDE if f'subscription to "{name.lower()}"' in lines},
    )


@pytest.mark.parametrize("user", MAY_PUBLISH)
async def test_user_of_nats_may_do_what_its_role_needs(servers: Servers, user: str) -> None:
    not_published, not_subscribed = await denied(servers, user)
    assert SUBJECTS - not_published == MAY_PUBLISH[user]
    assert (SUBJECTS | WIDE) - not_subscribed == MAY_SUBSCRIBE[user]


@pytest.mark.parametrize("user", MAY_READ)
async def test_user_of_etcd_may_use_its_keys_alone(servers: Servers, user: str) -> None:
    config = ConnectionConfig(
        etcd_endpoints=servers.etcd.address, etcd_credentials_file=servers.file(user)
    )
    readable = set()
    writable = set()
    async with aclosing(EtcdConnection(config)) as connection:
        for key in KEYS:
            if await allowed(connection, "range", api.RangeRequest(key=key.encode())):
                readable.add(key)
            put = api.PutRequest(key=key.encode(), value=b"x")
            delete = api.DeleteRangeRequest(key=key.encode())
            may_put = await allowed(connection, "put", put)
            assert may_put == await allowed(connection, "delete_range", delete)
            if may_put:
                writable.add(key)
        everything = api.RangeRequest(key=b"v1/", range_end=prefix_end("v1/"))
        assert not await allowed(connection, "range", everything)
        assert not await allowed(connection, "user_add", api.AuthUserAddRequest(name="mine"))
    assert readable == MAY_READ[user]
    assert writable == MAY_WRITE[user]


async def allowed(connection: EtcdConnection, call: str, request: Any) -> bool:
    try:
        await connection.call(call, request)
    except Unreachable as exc:
        return is_no_rejection(exc)
    return True


def is_no_rejection(error: Unreachable) -> bool:
    return not isinstance(error, UserRejected)


async def test_frontend_uses_workers_with_their_roles(servers: Servers) -> None:
    worker_config = WorkerConfig(model_path="m", **servers.settings())
    frontend_config = FrontendConfig(**servers.settings())

    async def script(request: Any) -> AsyncIterator[Any]:
        yield Chunk(token_ids=token_ids([7]))
        yield Chunk(token_ids=token_ids([8]), finish_reason=FinishReason.STOP)

    async with plane(worker_config) as worker, plane(frontend_config) as frontend:
        await worker.serve(REQUEST, ScriptedService(script))
        events: asyncio.Queue[Any] = asyncio.Queue()
        frontend.client.generate(REQUEST, make_request(), events.put_nowait)
        async with asyncio.timeout(SOON_S):
            assert list((await events.get()).token_ids) == [7]
            assert list((await events.get()).token_ids) == [8]
        assert await frontend.client.control(REQUEST, GetFile("f", 0))
    discovery = EtcdDiscovery(worker_config)
    watcher = EtcdDiscovery(frontend_config)
    instance = make_instance(1)
    try:
        await discovery.register(instance)
        async with aclosing(instance_events(watcher, instance.namespace)) as seen:
            assert await anext(seen) == Added(instance)
            assert await anext(seen) == Synced()
    finally:
        await discovery.aclose()
        await watcher.aclose()


@asynccontextmanager
async def plane(config: ConnectionConfig) -> AsyncIterator[NatsPlane]:
    access = NatsAccess.of(config)
    made = await NatsPlane.connect(config.nats_server, LIMITS, access=access)
    try:
        yield made
    finally:
        await made.aclose()


@pytest.mark.parametrize("user", ["worker", OWN_USER, "tool"])
async def test_control_verbs_are_for_frontends_alone(servers: Servers, user: str) -> None:
    service = ScriptedService(lambda _request: pytest.fail("no request comes"))
    access = NatsAccess(
        inbox_prefix="_INBOX_tool" if user == "tool" else f"_INBOX_worker.{OWN}",
        credentials_file=servers.file(user),
    )
    async with plane(WorkerConfig(model_path="m", **servers.settings())) as worker:
        await worker.serve(REQUEST, service)
        stranger = await NatsPlane.connect(servers.nats.address, LIMITS, access=access)
        try:
            with pytest.raises(DynamoError):
                await stranger.client.control(REQUEST, GetFile("f", 0), timeout_s=0.3)
        finally:
            await stranger.aclose()
    assert service.verbs == []


@pytest.mark.parametrize(("user", "prefix"), [("worker", "_INBOX_worker"), ("tool", "_INBOX_tool")])
async def test_process_that_waits_for_answers_reaches_itself(
    servers: Servers, user: str, prefix: str
) -> None:
    access = NatsAccess(inbox_prefix=prefix, credentials_file=servers.file(user))
    transport = NatsTransport(servers.nats.address, access=access)
    await transport.connect(5.0)
    try:
        await transport.until_subscribed(5.0)
    finally:
        await transport.aclose()


async def test_worker_with_another_component_does_not_start(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    access = NatsAccess(
        inbox_prefix=f"_INBOX_worker.{OWN}", credentials_file=servers.file(OWN_USER)
    )
    worker = await NatsPlane.connect(servers.nats.address, LIMITS, access=access)
    try:
        with pytest.raises(Unreachable, match=f'subscription to "{REQUEST}'):
            await worker.serve(REQUEST, ScriptedService(lambda _request: pytest.fail("no")))
    finally:
        await worker.aclose()
    assert "denies this process something" in caplog.text


async def test_responses_are_stored_by_frontends_and_removed_by_tools(servers: Servers) -> None:
    access = NatsAccess.of(FrontendConfig(**servers.settings()))
    store = await JetStreamStore.connect(servers.nats.address, "dynamo", LIMIT, access)
    await store.put("resp_1", b"value")
    assert await store.get("resp_1") == b"value"
    await store.delete("resp_1")
    assert await store.get("resp_1") is None
    await store.aclose()
    tool = NatsAccess.of(ConnectionConfig(**servers.settings()))
    assert await bucket_state(servers.nats.address, "dynamo", tool) is not None
    await delete_bucket(servers.nats.address, "dynamo", tool)
    assert await bucket_state(servers.nats.address, "dynamo", tool) is None


@pytest.mark.parametrize("line", [None, "worker:guessed", "stranger:x"])
async def test_nats_rejects_a_stranger_and_says_why(
    servers: Servers, tmp_path: Path, line: str | None
) -> None:
    access = NatsAccess()
    if line is not None:
        path = tmp_path / "credentials"
        path.touch(mode=0o600)
        path.write_text(line)
        access = NatsAccess(credentials_file=path)
    with pytest.raises(Unreachable, match=r"rejects this process, .*\(.*uthorization"):
        await NatsPlane.connect(servers.nats.address, access=access, connect_timeout_s=0.5)


@pytest.mark.parametrize("line", [None, "worker:guessed", "stranger:x"])
async def test_etcd_rejects_a_stranger_and_says_why(
    servers: Servers, tmp_path: Path, line: str | None
) -> None:
    path = tmp_path / "credentials"
    path.touch(mode=0o600)
    path.write_text(line or "")
    config = ConnectionConfig(
        etcd_endpoints=servers.etcd.address, etcd_credentials_file=path if line else None
    )
    put = api.PutRequest(key=BACKEND_KEY.encode(), value=b"x")
    async with aclosing(EtcdStore(config)) as store:
        with pytest.raises(Unreachable, match="rejects this process, "):
            await store.read_all("v1/")
        with pytest.raises(Unreachable, match="rejects this process, "):
            await store.delete(BACKEND_KEY)
        with pytest.raises(Unreachable, match="rejects this process, "):
            await store.connection.call("put", put)


async def test_status_names_the_user_that_etcd_rejects(servers: Servers, tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.touch(mode=0o600)
    path.write_text("worker:guessed")
    words = ["--etcd-endpoints", servers.etcd.address, "--etcd-credentials-file", str(path)]
    config = load(StatusConfig, prog="status", argv=words, environ={})
    with pytest.raises(NothingRuns, match=r"etcd at .* rejects this process, user 'worker' of"):
        await collect(config)


def test_explain_names_the_user_that_may_not_ask(servers: Servers) -> None:
    words = ["--etcd-endpoints", servers.etcd.address, "--nats-server", servers.nats.address]
    words += ["--etcd-credentials-file", str(servers.files)]
    words += ["--nats-credentials-file", str(servers.file("worker"))]
    config = load(ExplainConfig, prog="explain", argv=words, environ={})
    (problem,) = with_other_machines(config, None, Recordings([])).problems
    assert "rejects a subscription of this process, user 'worker' of" in problem
    assert "use the credentials of its role" in problem


async def test_etcd_ends_the_watch_of_a_stranger(servers: Servers) -> None:
    config = ConnectionConfig(etcd_endpoints=servers.etcd.address)
    async with aclosing(EtcdStore(config)) as store:
        changes = [batch async for batch in store.changes("v1/", 1)]
    assert changes == []


async def test_plane_connects_again_with_a_changed_password(own_servers: Servers) -> None:
    config = FrontendConfig(**own_servers.settings())
    async with plane(config) as frontend:
        lost = asyncio.Event()
        frontend._transport.on_disconnect(lambda _error: lost.set())
        change_password(own_servers, ClusterRole.FRONTEND)
        own_servers.nats.reload()
        async with asyncio.timeout(SOON_S):
            await lost.wait()
        # It waits until the client is connected again, and then finds that no worker listens.
        with pytest.raises(NoListener):
            await frontend.client.control(REQUEST, GetFile("f", 0), timeout_s=SOON_S)


async def test_rejection_while_running_is_named_and_logged_once(
    own_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    config = FrontendConfig(**own_servers.settings())
    async with plane(config) as frontend:
        reject_frontend(own_servers)
        async with asyncio.timeout(SOON_S):
            while frontend.rejection() is None:  # noqa: ASYNC110 - the client reconnects by itself
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # several attempts to connect
        reason = frontend.unavailable_reason() or ""
        assert "rejects this process, user 'frontend' of" in reason
        assert frontend.rejection() == reason
        assert caplog.text.count("rejects this process") == 1
        assert caplog.text.count("still using the former credentials") == 1
        own_servers.file(ClusterRole.FRONTEND).write_text("frontend:another\n")
        async with asyncio.timeout(SOON_S):
            while frontend.unavailable_reason() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert frontend.rejection() is None


async def test_rejected_client_tries_less_often_and_leaks_nothing(own_servers: Servers) -> None:
    config = FrontendConfig(**own_servers.settings())
    waits = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with plane(config) as frontend:
            client = frontend._transport._client
            reject_frontend(own_servers)
            async with asyncio.timeout(SOON_S):
                while len(waits) < 4:
                    await asyncio.sleep(0.01)
                    wait_s = client.options["reconnect_time_wait"]
                    if wait_s not in waits:
                        waits.append(wait_s)
        del client, frontend
        gc.collect()
    assert waits == [0.1, 0.2, 0.4, 0.8]
    assert [warning for warning in caught if warning.category is ResourceWarning] == []


def reject_frontend(servers: Servers) -> None:
    """Change the password of frontends in NATS alone, while their file is being written."""
    servers.users.passwords[ClusterRole.FRONTEND] = "another"
    servers.write_users()
    servers.file(ClusterRole.FRONTEND).write_text("half a line")
    servers.nats.reload()


def change_password(servers: Servers, user: str) -> None:
    servers.users.passwords[user] = "another"
    servers.file(user).write_text(f"{user}:another\n")
    servers.write_users()


async def test_registration_outlives_a_changed_password_of_etcd(own_servers: Servers) -> None:
    settings = own_servers.settings()
    worker = EtcdDiscovery(WorkerConfig(model_path="m", **settings), lease_ttl_s=1)
    tool = EtcdStore(ConnectionConfig(**settings))
    as_root = ConnectionConfig(**settings | {"etcd_credentials_file": own_servers.file("root")})
    instance = make_instance(1)
    key = instance_key(endpoint_of(instance), instance.id)
    try:
        await worker.register(instance)
        change_password(own_servers, ClusterRole.WORKER)
        await set_up_etcd(as_root, USERS, own_servers.users.passwords)
        own_servers.etcd.restart()  # it forgets all tokens
        await asyncio.sleep(2.5)  # longer than the lease
        assert list((await tool.read_all("v1/instances/dynamo/")).records) == [key]
    finally:
        await worker.aclose()
        await tool.aclose()


async def test_etcd_without_its_data_does_not_lock_out_a_user(own_servers: Servers) -> None:
    """The user's token names a change that this etcd has not reached, and etcd waits for it."""
    tool = EtcdStore(ConnectionConfig(**own_servers.settings()))
    async with aclosing(tool):
        await tool.read_all("v1/instances/dynamo/")
        own_servers.etcd.stop()
        own_servers.etcd.lose_data()
        own_servers.etcd.start()
        for _ in range(2):  # connects again, and finds that the token is no longer valid
            with suppress(Unreachable):
                await tool.read_all("v1/instances/dynamo/")
        assert not (await tool.read_all("v1/instances/dynamo/")).records


async def test_setting_up_users_again_narrows_their_permissions(tmp_path: Path) -> None:
    etcd = TestServer("etcd", tmp_path / "etcd")
    config = ConnectionConfig(etcd_endpoints=etcd.address)
    async with aclosing(EtcdConnection(config)) as connection:
        for users in (cluster_users(["dynamo", "other"]), USERS):
            for user in users:
                await set_permissions(connection, user)
        reply = await connection.call("role_get", api.AuthRoleGetRequest(role="worker"))
    etcd.stop()
    assert {permission.key for permission in reply.perm} == {
        b"v1/instances/dynamo/",
        b"v1/instances/dynamo/prefill/",
        b"v1/instances/dynamo/tensorrt_llm/",
        b"v1/instances/dynamo/backend/",
    }


def test_two_passwords_for_nats_are_an_error(tmp_path: Path) -> None:
    config = ConnectionConfig(nats_server="nats://u:p@h:1", nats_credentials_file=tmp_path)
    with pytest.raises(ConfigError, match="leave one out"):
        NatsAccess.of(config)


def test_configuration_of_nats_quotes_names() -> None:
    text = nats_configuration(cluster_users(['a"\\é']), {"tool": 'x"y'})
    assert r'"a\"\\é_backend.>"' in text
    assert r'password: "x\"y"' in text
    assert '"CN=worker"' in text
