"""The console's page and its data: keys, paths, readers, and what samples say."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.keys_file import add_key, remove_key
from dynamo_trtllm.frontend.console import feed
from dynamo_trtllm.frontend.console.snapshot import MAX_LISTED
from dynamo_trtllm.protocol.frontend_samples import FrontendSample, RequestRow, WorkerProgress
from dynamo_trtllm.protocol.messages import LoadReport, Role
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.instances import elastic_instance, make_instance
from tests.kit.memory_http import MemoryClient
from tests.kit.waiting import SOON_S
from tests.unit.frontend.responses_client import ask, check_error

KEY = "sk-key-of-the-settings"
PAGE = Path("dynamo_trtllm/frontend/console/page")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Console(MemoryClient):
    """A client of the event stream."""

    def __init__(self, served: FakeFrontend, key: str = "") -> None:
        super().__init__(served.app)
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self.send(f"GET /console/events HTTP/1.1\r\nHost: x\r\n{authorization}\r\n".encode())

    def events(self) -> list[tuple[str, Any]]:
        found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", self.received)
        return [(name.decode(), orjson.loads(data)) for name, data in found]

    async def event(self, name: str) -> Any:
        """Wait for the first event of this name. Return its data."""
        async with asyncio.timeout(SOON_S):
            while True:
                found = [data for kind, data in self.events() if kind == name]
                if found:
                    return found[0]
                await asyncio.sleep(0.001)


def feed_of(served: FakeFrontend) -> feed.ConsoleFeed:
    assert served.built.console is not None
    return served.built.console


@asynccontextmanager
async def running(served: FakeFrontend) -> AsyncIterator[feed.ConsoleFeed]:
    """Run the feed of a frontend, with short seconds."""
    console = feed_of(served)
    console._sample_s = 0.01
    task = asyncio.create_task(console.run())
    yield console
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.001)


# --- the page -------------------------------------------------------------------------------------


async def test_page_is_html_that_runs_only_its_own_files() -> None:
    response = await ask(front(), "GET", "/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "connect-src 'self';" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]* src=)|<style| on\w+=| style=", response.text)


def named_files() -> set[str]:
    """Return the files that the page and its scripts load."""
    page = (PAGE / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="(console/files/[^"]+)"', page))
    for script in PAGE.glob("*.js"):
        imports = re.findall(r'from "\./([^"]+)"', script.read_text())
        named |= {f"console/files/{name}" for name in imports}
    return named


async def test_page_loads_only_files_that_are_served() -> None:
    served = front()
    assert len(named_files()) > 5
    for name in named_files():
        response = await ask(served, "GET", f"/{name}")
        assert response.status_code == 200
        assert response.headers["x-content-type-options"] == "nosniff"


def test_page_has_no_absolute_address_so_prefixes_work() -> None:
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not re.search(r"""(?:src|href|fetch\()\s*=?\s*["'`](?:/|https?:)""", text), path


def test_page_never_inserts_text_as_markup() -> None:
    for path in PAGE.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write", path.read_text()
        )


async def test_no_console_serves_neither_page_nor_data() -> None:
    served = front(console=False, api_key=(KEY,))
    assert served.built.console is None
    for path in ("/", "/console/files/console.js", "/console/events"):
        assert (await ask(served, "GET", path)).status_code == 401
        assert (await ask(served, "GET", path, headers=bearer())).status_code == 404


# --- API keys -------------------------------------------------------------------------------------


async def test_page_needs_no_key_and_its_data_need_one() -> None:
    served = front(api_key=(KEY,))
    assert (await ask(served, "GET", "/")).status_code == 200
    assert (await ask(served, "GET", "/console/files/console.css")).status_code == 200
    for path in ("/console/events", "/console/requests/0123456789abcdef"):
        check_error(await ask(served, "GET", path), 401, "invalid_api_key")


@pytest.mark.parametrize(("scope", "is_allowed"), [("status", True), ("all", True), ("api", False)])
async def test_console_needs_a_key_for_the_status(
    tmp_path: Path, scope: Any, is_allowed: bool
) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="alice", sha256=digest_of(KEY).hex(), scope=scope))
    console = Console(front(api_keys_file=path), KEY)
    if is_allowed:
        assert (await console.event("hello"))["namespace"] == "dynamo"
    else:
        await console.until_answered()
        assert console.received.startswith(b"HTTP/1.1 403 ")
    console.leave()


async def test_stream_when_its_key_is_revoked_then_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="alice", sha256=digest_of(KEY).hex(), scope="status"))
    served = front(api_keys_file=path)
    async with running(served) as console_feed:
        console = Console(served, KEY)
        await console.event("snapshot")
        remove_key(path, "alice")
        await served.built.access.reload()
        error = await console.event("error")
        assert error["code"] == "invalid_api_key"
        await console.until_answered()
        assert console_feed.num_readers == 0


# --- the stream -----------------------------------------------------------------------------------


async def test_stream_shows_a_request_that_ended() -> None:
    served = front(chunk("a"), chunk("b"), stop())
    async with running(served):
        console = Console(served)
        hello = await console.event("hello")
        assert hello["snapshot"]["requests"] == []
        await ask(served, "POST", "/v1/chat/completions", json=CHAT)
        await until(lambda: bool(shown_requests(console)))
    row = shown_requests(console)[0]
    assert (row["code"], row["prefill"], row["decode"]) == ("ok", "ab", "cd")
    assert row["output_tokens"] == 3
    assert {phase for _, phase, _ in row["phases"]} >= {"tokenize", "decode"}
    console.leave()


def shown_requests(console: Console) -> list[dict[str, Any]]:
    return [row for _, data in console.events() for row in data.get("requests", [])]


async def test_hello_has_the_requests_that_ended_before() -> None:
    served = front(chunk("a"), stop())
    await ask(served, "POST", "/v1/chat/completions", json=CHAT)
    hello = await Console(served).event("hello")
    assert [row["code"] for row in hello["snapshot"]["requests"]] == ["ok"]
    assert hello["points"][0]["requests_per_s"] == 1


async def test_snapshot_is_computed_once_for_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    served = front()
    merged = feed_of(served)._merged
    made: list[bytes] = []
    snapshot = merged.snapshot

    def count() -> bytes:
        made.append(snapshot())
        return made[-1]

    monkeypatch.setattr(merged, "snapshot", count)
    consoles = [Console(served) for _ in range(3)]
    for console in consoles:
        await console.event("hello")
    async with running(served):
        for console in consoles:
            await console.event("snapshot")
    assert all(made[0] in console.received for console in consoles)
    for console in consoles:
        console.leave()


async def test_without_readers_nothing_is_sampled() -> None:
    served = front()
    async with running(served) as console_feed:
        console = Console(served)
        await console.event("snapshot")
        sampler = console_feed._sampler
        assert sampler._activity._is_sampling
        console.leave()
        await until(lambda: not sampler._activity._is_sampling)
        number = sampler._number
        await asyncio.sleep(0.1)
        assert sampler._number == number


async def test_too_many_readers_get_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_READERS", 2)
    served = front()
    consoles = [Console(served) for _ in range(2)]
    for console in consoles:
        await console.event("hello")
    check_error(await ask(served, "GET", "/console/events"), 429, "overloaded")
    consoles[0].leave()
    await consoles[0].until_answered()
    await Console(served).event("hello")


async def test_reader_that_does_not_read_is_dropped() -> None:
    served = front()
    async with running(served):
        slow = Console(served)
        await slow.event("hello")
        slow.connection.pause_writing()
        sent = len(slow.received)
        async with asyncio.timeout(SOON_S):
            await slow.until_answered()
    assert len(slow.received) == sent  # nothing waits in memory
    assert slow.transport.is_closing()


async def test_server_that_drains_ends_the_stream() -> None:
    served = front()
    console = Console(served)
    await console.event("hello")
    console.server.drain()
    async with asyncio.timeout(SOON_S):
        await console.until_answered()
    assert [name for name, _ in console.events()] == ["hello", "shutdown"]
    assert console.transport.is_closing()


# --- several processes ----------------------------------------------------------------------------


def sample(**fields: Any) -> FrontendSample:
    about: dict[str, Any] = {
        "process": 7,
        "name": "frontend 7@host",
        "number": 2,
        "has_readers": False,
        "interval_s": 1.0,
        "inflight": 3,
        "queued": 0,
        "codes": {"ok": 2},
        "ttft_counts": (),
        "gap_counts": (),
        "workers": (),
        "requests": (),
    }
    return FrontendSample(**about | fields)


def snapshot_of(served: FakeFrontend, *samples: FrontendSample) -> dict[str, Any]:
    """Return the snapshot after these samples."""
    merged = feed_of(served)._merged
    for one in samples:
        merged.add(one)
    data: dict[str, Any] = orjson.loads(merged.snapshot().split(b"data: ")[1])
    return data


async def test_snapshot_adds_up_all_processes() -> None:
    samples = [sample(), sample(process=8, name="frontend 8@host", codes={"ok": 1, "deadline": 1})]
    shown = snapshot_of(front(), *samples)
    assert shown["point"]["requests_per_s"] == 4
    assert shown["point"]["failures_per_s"] == 1
    assert shown["point"]["inflight"] == 6
    assert [one["name"] for one in shown["frontends"]] == ["frontend 7@host", "frontend 8@host"]
    texts = [reason["text"] for reason in shown["reasons"]]
    assert "1 of 4 requests failed in the last minute: deadline (1)." in texts


async def test_snapshot_has_the_newest_load_of_a_worker() -> None:
    served = front()
    served.catalog.up = [make_instance(1), make_instance(2)]
    merged = feed_of(served)._merged
    for number, running in ((2, 5), (1, 9)):
        merged.add_load(LoadReport(1, number, running, 3, 40, 64, 128, 900))
    reported, silent = snapshot_of(served)["workers"]
    assert (reported["running"], reported["waiting"]) == (5, 3)
    assert (reported["kv_blocks_used"], reported["kv_blocks_total"]) == (64, 128)
    assert silent["running"] is None


async def test_snapshot_has_the_shares_of_elastic_workers() -> None:
    served = front()
    served.catalog.up = [make_instance(1), elastic_instance(2), elastic_instance(3)]
    for instance in served.catalog.up:
        served.catalog._view.add(instance)
    table = ShareTable(revision=1, workers={2: Shares(1.0, 0.25)}, since={2: 100.0})
    served.catalog._set_shares(table)
    fields = ("prefill_share", "decode_share", "shares_at")
    shown = {
        worker["id"]: [worker[name] for name in fields] for worker in snapshot_of(served)["workers"]
    }
    assert shown == {"1": [None, None, None], "2": [1.0, 0.25, 100.0], "3": [1.0, 1.0, None]}


async def test_snapshot_names_the_slow_decode_worker() -> None:
    served = front()
    served.catalog.up = [make_instance(number) for number in (1, 2, 3)]
    served.catalog.up.append(make_instance(4, role=Role.PREFILL))
    workers = tuple(
        WorkerProgress(number, 1, 100, 100 * step_s, 100, 0.0)
        for number, step_s in ((1, 0.01), (2, 0.01), (3, 0.03))
    )
    shown = snapshot_of(served, sample(workers=workers))
    ratios = {worker["id"]: worker["slow_ratio"] for worker in shown["workers"]}
    assert ratios == {"1": None, "2": None, "3": pytest.approx(3.0), "4": None}
    assert shown["status"] == "degraded"
    assert "Decode worker 3 is slow: 30.0 ms per token, 3.0 times the others of its role." in [
        reason["text"] for reason in shown["reasons"]
    ]


async def test_slow_worker_is_among_the_listed_ones_of_many() -> None:
    served = front()
    served.catalog.up = [make_instance(number) for number in range(1, MAX_LISTED + 3)]
    last = len(served.catalog.up)
    # All others wait for a token at this moment, as running streams do.
    workers = tuple(
        WorkerProgress(
            number, 1, 100, 3.0 if number == last else 1.0, 100, 0.0 if number == last else 0.1
        )
        for number in range(1, last + 1)
    )
    shown = snapshot_of(served, sample(workers=workers))
    assert len(shown["workers"]) == MAX_LISTED
    assert shown["workers"][0]["id"] == f"{last:x}"


def prompt_of(worker: int, seconds: float) -> RequestRow:
    """Return a request whose prompt of 1,000 tokens was computed in this time."""
    return RequestRow(
        id="0123456789abcdef",
        model="tiny",
        endpoint="chat",
        code="ok",
        status=200,
        finish="stop",
        begun_at=time.time(),
        total_s=2.0,
        first_token_s=None,
        prefill="",
        decode=f"{worker:x}",
        prompt_tokens=1000,
        cached_tokens=0,
        output_tokens=0,
        retries=0,
        migrations=0,
        kv_bytes=0,
        kv_transfer_s=0.0,
        phases=(("aggregated", "prefill", seconds),),
    )


async def test_snapshot_shows_the_worse_ratio_of_aggregated_workers() -> None:
    served = front()
    served.catalog.up = [make_instance(number, role=Role.AGGREGATED) for number in range(1, 5)]
    times = {1: (0.01, 0.0001), 2: (0.01, 0.0001), 3: (0.01, 0.0005), 4: (0.04, 0.0003)}
    workers = []
    requests = []
    for number, (token_s, prompt_token_s) in times.items():
        workers.append(WorkerProgress(number, 1, 100, 100 * token_s, 100, 0.0))
        requests.append(prompt_of(number, 1000 * prompt_token_s))
    shown = snapshot_of(served, sample(workers=tuple(workers), requests=tuple(requests)))
    ratios = {worker["id"]: worker["slow_ratio"] for worker in shown["workers"]}
    assert ratios == {"1": None, "2": None, "3": pytest.approx(5.0), "4": pytest.approx(4.0)}
    texts = [reason["text"] for reason in shown["reasons"]]
    assert any("3 is slow: 500 ms per 1,000 prompt tokens, 5.0 times" in text for text in texts)
    assert any("4 is slow: 40.0 ms per token, 4.0 times" in text for text in texts)


async def test_snapshot_says_for_how_long_a_worker_has_been_slow() -> None:
    served = front()
    served.catalog.up = [make_instance(number) for number in (1, 2, 3)]
    merged = feed_of(served)._merged
    begun_s = time.monotonic()

    def reason_after(seconds: float, slow_step_s: float) -> str:
        workers = tuple(
            WorkerProgress(number, 1, 10_000, 10_000 * step_s, 100, 0.0)
            for number, step_s in ((1, 0.01), (2, 0.01), (3, slow_step_s))
        )
        merged._clock = lambda: begun_s + seconds
        shown = snapshot_of(served, sample(workers=workers))
        (text,) = [one["text"] for one in shown["reasons"] if "slow" in one["text"]] or [""]
        return str(text)

    assert reason_after(0.0, 0.03).startswith("Decode worker 3 is slow: ")
    assert reason_after(40.0, 0.03).startswith("Decode worker 3 has been slow for at least 40 s: ")
    assert reason_after(240.0, 0.03).startswith("Decode worker 3 has been slow for at least 4 min")
    for second in range(241, 300):
        if not reason_after(second, 0.01):
            break
    assert reason_after(300.0, 0.03).startswith("Decode worker 3 is slow: ")


async def test_snapshot_names_a_worker_that_sends_no_tokens() -> None:
    served = front()
    served.catalog.up = [make_instance(1)]
    shown = snapshot_of(served, sample(workers=(WorkerProgress(1, 2, 0, 0.0, 0, 9.0),)))
    assert shown["reasons"][0] == {
        "severity": "bad",
        "text": "Decode worker 1 has sent no token for 9 s to one of its 2 streams.",
    }


async def test_snapshot_when_not_ready_then_it_has_the_reason_in_words() -> None:
    served = front()
    served.catalog.lacks = f"model {MODEL} has no decode worker"
    shown = snapshot_of(served)
    assert shown["status"] == "not_ready"
    assert shown["reasons"][0]["text"] == f"Model {MODEL} has no decode worker."


async def test_process_that_sends_no_samples_is_named() -> None:
    served = front()
    merged = feed_of(served)._merged
    snapshot_of(served, sample())
    later = time.monotonic() + 8
    merged._clock = lambda: later
    shown = snapshot_of(served)
    assert shown["reasons"][0]["text"].startswith("frontend 7@host has not reported for 8 s")
    merged._clock = lambda: later + 60
    assert snapshot_of(served)["frontends"] == []
