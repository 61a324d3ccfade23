"""Several frontend processes on one port, as a user starts them: `--workers 2`."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from tests.kit.cluster import PLAIN, Cluster, Process, events, until

MODEL = "workers"
NAMES = ("frontend-1", "frontend-2")
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
# 100 s at 5 ms a step: it does not end by itself
LONG = BODY | {"max_tokens": 20_000, "stream": True}
# a connection may come to the process that is just being started again, and waits there
WITHIN_S = 30.0
MOST = 64  # connections, each of which has an even chance to come to either process


@pytest.fixture
def cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    made = Cluster(etcd_server, nats_server, f"workers-{secrets.token_hex(4)}", ["--workers", "2"])
    try:
        made.mock("prefill_and_decode", MODEL)
        for name in NAMES:
            made.frontend.wait_for(rf"{name} .*model {MODEL} is ready")
        yield made
    finally:
        made.stop()


def members(frontend: Process) -> list[psutil.Process]:
    """The processes that serve."""
    children = psutil.Process(frontend.pid).children()
    return [
        child for child in children if not any("output_relay" in word for word in child.cmdline())
    ]


def total(url: str) -> float:
    """Finished requests, as whichever process answers tells."""
    text = httpx.get(f"{url}/metrics", timeout=WITHIN_S, **PLAIN).text
    return sum(
        float(value)
        for value in re.findall(r"^dynamo_trtllm_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


def served_by(frontend: Process) -> set[str]:
    """The names of those that have finished a request."""
    found = (
        re.search(r"(frontend-\d) .*request_reports: request", line) for line in frontend.lines
    )
    return {match[1] for match in found if match}


def owner(response: httpx.Response, frontend: Process) -> int:
    """The process at the other end of this answer's connection."""
    local = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    return next(
        member.pid
        for member in members(frontend)
        if any(
            connection.raddr and connection.raddr.port == local
            for connection in member.net_connections("tcp")
        )
    )


@pytest.mark.timeout(180)  # two starts of a frontend, on a machine that may be busy
def test_killed_worker_breaks_only_its_streams(cluster: Cluster) -> None:
    frontend = cluster.frontend
    url = cluster.frontend.url()
    ready = f"{url}/ready"
    until(lambda: httpx.get(ready, timeout=WITHIN_S, **PLAIN).status_code == 200, WITHIN_S)
    # of either
    assert {httpx.get(ready, timeout=WITHIN_S, **PLAIN).status_code for _ in range(6)} == {200}
    asked = 0
    while served_by(frontend) != set(NAMES):
        assert asked < MOST
        assert (
            httpx.post(
                f"{url}/v1/chat/completions", json=BODY, timeout=WITHIN_S, **PLAIN
            ).status_code
            == 200
        )
        asked += 1
    # a request is counted when its client has all of it
    until(lambda: total(url) == asked, WITHIN_S)
    assert {total(url) for _ in range(6)} == {asked}  # whichever answers tells of both

    with ExitStack() as stack:
        streams: dict[int, list[httpx.Response]] = {}
        while len(streams) < 2:
            client = stack.enter_context(httpx.Client(timeout=WITHIN_S, **PLAIN))
            stream = client.stream("POST", f"{url}/v1/chat/completions", json=LONG)
            response = stack.enter_context(stream)
            streams.setdefault(owner(response, frontend), []).append(response)
            assert sum(map(len, streams.values())) < MOST
        victim, survivor = streams
        os.kill(victim, signal.SIGKILL)
        for response in streams[victim]:
            with pytest.raises(httpx.TransportError):
                list(events(response.iter_lines()))
        for response in streams[survivor]:
            assert len(list(itertools.islice(events(response.iter_lines()), 200))) == 200
    asked += len(streams[survivor])

    # what the dead one had reported stays, and never decreases
    until(lambda: total(url) == asked, WITHIN_S)
    until(lambda: sum(f"model {MODEL} is ready" in line for line in frontend.lines) == 3, WITHIN_S)
    assert {member.pid for member in members(frontend)} > {survivor}
    assert (
        httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=WITHIN_S, **PLAIN).status_code
        == 200
    )
    until(lambda: total(url) == asked + 1, WITHIN_S)

    left = members(frontend)
    frontend.send(signal.SIGTERM)
    assert frontend.wait() == 0
    assert not any(member.is_running() for member in left)


def test_workers_end_when_their_parent_is_killed(etcd_server: str, nats_server: str) -> None:
    cluster = Cluster(
        etcd_server, nats_server, f"workers-{secrets.token_hex(4)}", ["--workers", "2"]
    )
    frontend = cluster.frontend
    for name in NAMES:
        frontend.wait_for(rf"{name} .*listening on")
    left = members(frontend)
    assert len(left) == 2
    frontend.send(signal.SIGKILL)
    assert frontend.wait() == -signal.SIGKILL
    psutil.wait_procs(left, timeout=10)
    assert not any(member.is_running() for member in left)
