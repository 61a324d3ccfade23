"""Every worker is stopped and replaced while streams run: no request may notice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.kit.cluster import PLAIN, START_TIMEOUT_S, Cluster, Process, events, gauges, until
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(240)

CHAT = "/v1/chat/completions"
STREAMS = 16
ARGS: dict[str, Any] = {"step_s": 0.02, "kv_cache_blocks": 1024}
BODY: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 60,
    "stream": True,
}

Make = Callable[..., Cluster]


class Load:
    """Concurrent streams. When one has ended, the next one starts.

    `faults`: all that was not a whole, right answer.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.url = cluster.frontend.url()
        self.right = self._ask()
        self.answered = 0
        self.faults: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> str:
        text = ""
        reason = None
        with httpx.stream(
            "POST", self.url + CHAT, json=BODY, timeout=START_TIMEOUT_S, **PLAIN
        ) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {answer.read().decode()}"
            for event in events(answer.iter_lines()):
                if "error" in event:
                    return f"{event['error']}"
                text += event["choices"][0]["delta"].get("content") or ""
                reason = event["choices"][0]["finish_reason"] or reason
        return f"{reason}: {text}"

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                said = self._ask()
            except (httpx.HTTPError, AssertionError) as exc:
                said = repr(exc)
            self.answered += 1
            if said != self.right:
                self.faults.append(said)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(START_TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.long
def test_restarting_every_worker_fails_no_request(make_cluster: Make) -> None:
    cluster = make_cluster()
    workers = [
        (role, cluster.mock(role, "mock", **ARGS))
        for role in ("prefill", "prefill", "decode", "decode")
    ]
    cluster.until_ready("mock")
    load = Load(cluster)
    assert load.right.startswith("length: ")
    replaced = []
    try:
        for role, worker in workers:
            time.sleep(0.3)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0
            replaced.append(cluster.mock(role, "mock", **ARGS))
            replaced[-1].instance()
        time.sleep(0.5)
    finally:
        load.stop()
    assert load.faults == []
    assert load.answered > STREAMS
    for worker in replaced:
        until(lambda worker=worker: is_idle(worker), SOON_S)


def is_idle(worker: Process) -> bool:
    now = gauges(worker)
    return not any(
        now[name] for name in ("running", "waiting", "kv_blocks_used", "pending_kv_transfers")
    )
