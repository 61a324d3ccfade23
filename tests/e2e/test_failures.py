"""What a client sees when something dies or leaves: an answer or a named error within a bound, and
nothing kept.

Mock engines: their scheduling and KV transfer are real, only the computing is not.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

from tests.kit.cluster import PLAIN, START_TIMEOUT_S, Cluster, Process, events, gauges, until
from tests.kit.servers import TestServer
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
STEP_S = 0.02
HOLD_S = 5.0  # for a role that has no worker any more
# the plane pings the peers of running streams every 5 s and waits as long
LOST_WITHIN_S = 10.0 + SOON_S
GOOD: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
}
LONG = GOOD | {"stream": True, "max_tokens": 1000}  # 20 s of steps
SHORT = LONG | {"max_tokens": 60}

# The frontend waits less for a peer that is silent and for a role that has no worker.
QUICK = ("--stall-timeout-s", "2", "--hold-for-roles-s", "2")

Make = Callable[..., Cluster]


class Pair(NamedTuple):
    cluster: Cluster
    prefill: Process
    decode: Process

    def until_idle(self, timeout_s: float = SOON_S) -> None:
        for worker in (self.prefill, self.decode):
            until(partial(is_idle, worker), timeout_s)


def is_idle(worker: Process) -> bool:
    now = gauges(worker)
    return not any(
        now[name] for name in ("running", "waiting", "kv_blocks_used", "pending_kv_transfers")
    )


def start_pair(cluster: Cluster, **engine_args: Any) -> Pair:
    args = {"step_s": STEP_S} | engine_args
    pair = Pair(
        cluster, cluster.mock("prefill", "mock", **args), cluster.mock("decode", "mock", **args)
    )
    cluster.until_ready("mock")
    return pair


@pytest.fixture(scope="module")
def lasting(etcd_server: str, nats_server: str) -> Iterator[Pair]:
    """For tests in which no worker ends, and its own frontend stays."""
    without_probes = ("--probe-interval-s", "0")  # they too would be in a slow worker's step
    cluster = Cluster(etcd_server, nats_server, "clients-leave", without_probes)
    try:
        yield start_pair(cluster)
    finally:
        cluster.stop()


class Running(NamedTuple):
    """A stream that has begun."""

    answer: httpx.Response
    events: Iterator[Any]


@contextmanager
def running(
    cluster: Cluster, body: dict[str, Any] = LONG, frontend: Process | None = None
) -> Iterator[Running]:
    """Entered when the first text has come. `frontend`: another one than the cluster's own."""
    with (
        cluster.client(frontend=frontend) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        assert answer.status_code == 200
        stream = events(answer.iter_lines())
        while not next(stream)["choices"][0]["delta"].get("content"):
            pass
        yield Running(answer, stream)


def check_good(cluster: Cluster) -> None:
    with cluster.client() as client:
        answer = client.post(CHAT, json=GOOD)
    assert answer.status_code == 200, answer.text


def check_ends_with_error(stream: Running, codes: set[str], within_s: float) -> None:
    """The last event is an error with one of these codes, then `[DONE]`."""
    begun = time.monotonic()
    *_, last = stream.events
    assert time.monotonic() - begun < within_s
    assert last["error"]["code"] in codes, last
    assert last["error"]["message"]


# --- clients leave --------------------------------------------------------------------------------


# tests/integration/test_cancellation.py covers it without processes, and a test of the demo model
# (test_client_when_it_leaves_midway_then_the_workers_are_idle) with them
@pytest.mark.long
def test_client_leaving_midstream_frees_kv_on_both_sides(lasting: Pair) -> None:
    with running(lasting.cluster):
        assert gauges(lasting.decode)["kv_blocks_used"] > 0
    lasting.until_idle()
    check_good(lasting.cluster)


@pytest.mark.long  # tests/integration/test_cancellation.py covers it without processes
@pytest.mark.parametrize("stream", [False, True])
def test_client_leaving_before_first_token_frees_kv(
    etcd_server: str, nats_server: str, lasting: Pair, stream: bool
) -> None:
    """A prefill step takes 30 s: the request is in it when the client leaves."""
    name = f"slow-{stream}"
    slow = lasting.cluster.mock("prefill", name, step_s=30.0)
    decode = lasting.cluster.mock("decode", name)
    lasting.cluster.until_ready(name)
    patience = httpx.Timeout(START_TIMEOUT_S, read=1.0)
    with lasting.cluster.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=GOOD | {"model": name, "stream": stream}, timeout=patience)
    Pair(lasting.cluster, slow, decode).until_idle()
    check_good(lasting.cluster)
    for worker in (slow, decode):
        worker.send(signal.SIGKILL)


@pytest.mark.long  # tests/integration/test_kv_collection.py cancels 12 at once, without processes
def test_kv_when_16_clients_leave_at_once_then_all_of_it_is_free(lasting: Pair) -> None:
    leave = threading.Barrier(17)

    def client() -> None:
        with running(lasting.cluster):
            leave.wait(START_TIMEOUT_S)

    threads = [threading.Thread(target=client) for _ in range(16)]
    for thread in threads:
        thread.start()
    leave.wait(START_TIMEOUT_S)
    for thread in threads:
        thread.join(START_TIMEOUT_S)
    lasting.until_idle()
    check_good(lasting.cluster)


# --- processes die --------------------------------------------------------------------------------


@pytest.mark.long  # the chaos fault kill-decode covers it in less time
def test_killed_decode_worker_ends_its_stream_with_an_error(make_cluster: Make) -> None:
    pair = start_pair(make_cluster(flags=QUICK))
    with running(pair.cluster) as stream:
        pair.decode.send(signal.SIGKILL)
        with pair.cluster.client() as client:
            refused = client.post(CHAT, json=GOOD)
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] in ("unreachable", "no_instances")
            assert refused.headers["Retry-After"]
        check_ends_with_error(stream, {"unreachable", "disconnected", "incomplete"}, LOST_WITHIN_S)
    until(lambda: is_idle(pair.prefill), SOON_S)
    pair.cluster.until_status("mock", 503)
    pair.cluster.mock("decode", "mock").instance()
    pair.cluster.until_status("mock", 200)
    check_good(pair.cluster)


@pytest.mark.long
def test_killed_prefill_worker_spares_running_streams(make_cluster: Make) -> None:
    pair = start_pair(make_cluster())
    with running(pair.cluster, SHORT) as stream:
        pair.prefill.send(signal.SIGKILL)
        *_, last = stream.events
    assert last["choices"][0]["finish_reason"] == "length"
    with pair.cluster.client() as client:
        refused = client.post(CHAT, json=GOOD)
    assert refused.status_code == 503, refused.text
    pair.cluster.until_status("mock", 503)
    until(lambda: is_idle(pair.decode), SOON_S)
    pair.cluster.mock("prefill", "mock").instance()
    pair.cluster.until_status("mock", 200)
    check_good(pair.cluster)


@pytest.mark.long  # the chaos fault kill-prefill covers it in less time
def test_killed_prefill_worker_gives_a_named_error(make_cluster: Make) -> None:
    cluster = make_cluster(flags=QUICK)
    prefill = cluster.mock("prefill", "mock", step_s=5.0)
    decode = cluster.mock("decode", "mock")
    cluster.until_ready("mock")
    answers: list[httpx.Response] = []

    def ask() -> None:
        with cluster.client() as client:
            answers.append(client.post(CHAT, json=GOOD))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: gauges(prefill)["running"] == 1, SOON_S)
    prefill.send(signal.SIGKILL)
    asking.join(LOST_WITHIN_S + HOLD_S)
    assert answers, "no answer in time"
    assert answers[0].status_code in (502, 503), answers[0].text
    assert answers[0].json()["error"]["code"] in ("unreachable", "disconnected", "incomplete")
    assert is_idle(decode)


# --- processes are asked to stop ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_sigterm_finishes_streams_first(make_cluster: Make, role: str) -> None:
    pair = start_pair(make_cluster())
    worker = pair.prefill if role == "prefill" else pair.decode
    with running(pair.cluster, SHORT) as stream:
        worker.send(signal.SIGTERM)
        *_, last = stream.events
    assert last["choices"][0]["finish_reason"] == "length"
    assert worker.wait() == 0
    with pair.cluster.client() as client:
        assert client.post(CHAT, json=GOOD).status_code == 503


@pytest.mark.long  # the chaos fault term-frontend covers it in less time
def test_frontend_sigterm_finishes_streams_first(lasting: Pair) -> None:
    frontend = Process("dynamo_trtllm.frontend", ["--http-port", "0"], lasting.cluster.env)
    try:
        frontend.wait_for("model mock is ready")
        with running(lasting.cluster, SHORT, frontend) as stream:
            frontend.send(signal.SIGTERM)
            *_, last = stream.events
        assert last["choices"][0]["finish_reason"] == "length"
        assert frontend.wait() == 0
    finally:
        frontend.stop()
    lasting.until_idle()
    check_good(lasting.cluster)


# --- NATS -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_streams_survive_a_nats_restart(
    make_cluster: Make, own_nats: Callable[[], TestServer]
) -> None:
    nats = own_nats()
    pair = start_pair(make_cluster(nats=nats.address))
    with running(pair.cluster, LONG | {"max_tokens": 200}) as stream:
        nats.restart()
        *_, last = stream.events
    assert last["choices"][0]["finish_reason"] == "length"
    pair.until_idle(LOST_WITHIN_S)
    check_good(pair.cluster)


# tests/integration/test_control_plane.py and the chaos fault kill-nats cover it in less time
@pytest.mark.long
def test_streams_when_nats_stays_away_then_end_with_named_error(
    make_cluster: Make, own_nats: Callable[[], TestServer]
) -> None:
    nats = own_nats()
    pair = start_pair(make_cluster(nats=nats.address, flags=QUICK))
    with running(pair.cluster) as stream:
        nats.stop()
        with pair.cluster.client() as client:
            refused = client.post(CHAT, json=GOOD)
        check_ends_with_error(
            stream, {"disconnected", "unreachable", "incomplete"}, LOST_WITHIN_S + HOLD_S
        )
    assert refused.status_code == 503, refused.text
    assert refused.headers["Retry-After"]
    nats.start()

    def is_served() -> bool:
        with pair.cluster.client() as client:
            return client.post(CHAT, json=GOOD).status_code == 200

    until(is_served, 2 * SOON_S)
    pair.until_idle(LOST_WITHIN_S)


# --- etcd -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_requests_are_served_while_etcd_is_away(
    make_cluster: Make, own_etcd: Callable[[], TestServer]
) -> None:
    etcd = own_etcd()
    pair = start_pair(make_cluster(etcd=etcd.address))
    before = {pair.prefill.instance(), pair.decode.instance()}
    etcd.stop()
    begun = time.monotonic()
    while time.monotonic() - begun < 4.0:
        check_good(pair.cluster)
    etcd.start()
    time.sleep(2.0)  # they register again within a third of their lease, and a pause between tries
    check_good(pair.cluster)
    with pair.cluster.client() as client:
        health = client.get("/health").json()
    assert sorted(f"{instance['instance_id']:x}" for instance in health["instances"]) == sorted(
        before
    )
    for process in (pair.cluster.frontend, pair.prefill, pair.decode):
        assert not process.is_over


def retries(cluster: Cluster) -> float:
    """Calls that were retried on another worker: each waited in vain first."""
    text = httpx.get(f"{cluster.frontend.url()}/metrics", **PLAIN).text
    return sum(
        map(float, re.findall(r"^dynamo_trtllm_retries_total\{.*\} (\S+)$", text, re.MULTILINE))
    )


# --- a worker that is frozen ----------------------------------------------------------------------


@pytest.mark.long
def test_frozen_worker_delays_only_the_first_request(make_cluster: Make) -> None:
    pair = start_pair(make_cluster())
    other = pair.cluster.mock("decode", "mock", step_s=STEP_S)
    other.instance()
    for _ in range(4):
        check_good(pair.cluster)
    pair.decode.send(signal.SIGSTOP)
    try:
        for _ in range(6):
            check_good(pair.cluster)
        assert retries(pair.cluster) <= 1
    finally:
        pair.decode.send(signal.SIGCONT)
