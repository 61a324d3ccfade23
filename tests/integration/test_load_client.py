"""The load client against a server that answers what a test wants: what it counts and what it calls
an error.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from benchmarks import client_shards
from benchmarks.blocking import wait_for
from benchmarks.interrupts import Interrupts
from benchmarks.load_client import Client, Load
from benchmarks.stream import RequestRecord
from benchmarks.summary import summarize
from tests.kit.waiting import SOON_S

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = (
    b'"usage":{"completion_tokens":2,"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}'
)
WHOLE = [
    (
        b"data:"
        b' {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    ),
    b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],' + USAGE + b"}\n\n",
    b"data: [DONE]\n\n",
]
FAILED = [
    *WHOLE[:2],
    (
        b"data:"
        b' {"error":{"message":"gone","type":"server_error","param":null,"code":"disconnected"}}\n\n'
    ),
    WHOLE[-1],
]
REFUSAL = b'{"error":{"message":"full","type":"rate_limit_error","param":null,"code":"overloaded"}}'

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunked(*events: bytes, cut: bool = False) -> Answer:
    """Events one by one; `cut` ends the connection instead of the answer."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for event in events:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        if cut:
            writer.close()
        else:
            writer.write(b"0\r\n\r\n")

    return answer


async def refused(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(REFUSAL), REFUSAL))


async def silent(_: asyncio.StreamWriter) -> None:
    return


@asynccontextmanager
async def serving(answer: Answer, bodies: list[Any] | None = None) -> AsyncIterator[str]:
    """`bodies` takes what was sent."""
    bodies = [] if bodies is None else bodies

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def records_of(
    answer: Answer, *, requests: int = 1, bodies: list[Any] | None = None, **load: object
) -> list[RequestRecord]:
    async with serving(answer, bodies) as url:
        client = Client(
            Load(url=url, model="m", requests=requests, osl=2, **({"timeout_s": SOON_S} | load))
        )  # type: ignore[arg-type]
        try:
            return await client.run()
        finally:
            client.aclose()


async def test_token_without_text_counts_by_its_id() -> None:
    """A part of a UTF-8 character has no text, but is a token all the same."""
    events = [
        b'data: {"choices":[{"index":0,"text":"","token_ids":[7],"prompt_token_ids":[1]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"\xc3\xa9","token_ids":[8]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"","prompt_token_ids":[1]}]}\n\n',
        *WHOLE[3:],
    ]
    [record] = await records_of(chunked(*events))
    assert record.events == 2


async def test_run_counts_events_tokens_and_text() -> None:
    records = await records_of(chunked(*WHOLE), requests=6, concurrency=2, keep_text=True)
    assert [(r.error, r.events, r.output_tokens, r.text, r.finish) for r in records] == [
        ("", 2, 2, "ab", "length")
    ] * 6
    found = summarize(records, wall_s=2.0, osl=2, processes={})
    assert (
        found["ok"],
        found["tokens_per_s"],
        found["events_per_token"],
        found["wrong_length"],
    ) == (6, 6.0, 1.0, 0)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (9, 4)
    assert found["ttft_ms"]["p50"] > 0


async def test_run_when_open_loop_then_all_are_sent() -> None:
    assert [r.error for r in await records_of(chunked(*WHOLE), requests=5, rate=1000.0)] == [""] * 5


async def test_run_names_incomplete_answer_by_its_error() -> None:
    for answer, error in (
        (chunked(*WHOLE[:3], cut=True), "cut"),
        (chunked(*WHOLE[:3]), "no_end"),
        (chunked(*FAILED), "disconnected"),
        (refused, "overloaded"),
        (silent, "timeout"),
    ):
        (record,) = await records_of(answer, timeout_s=0.3 if answer is silent else SOON_S)
        assert record.error == error


async def test_run_when_the_port_is_closed_then_connect() -> None:
    client = Client(Load(url="http://127.0.0.1:1", model="m", requests=1))
    (record,) = await client.run()
    assert record.error == "connect"


async def test_run_sends_prompts_in_turn() -> None:
    bodies: list[Any] = []
    records = await records_of(chunked(*WHOLE), requests=5, bodies=bodies, prompts=("a", "b"))
    assert [body["messages"][0]["content"] for body in bodies] == ["a", "b", "a", "b", "a"]
    assert [record.index for record in records] == [1, 2, 3, 4, 5]


async def test_run_when_there_is_a_ramp_then_the_lanes_start_apart() -> None:
    async def late(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)  # so that the second request is the second lane's
        await chunked(*WHOLE)(writer)

    first, second = await records_of(late, requests=2, concurrency=2, ramp_s=0.2)
    assert second.planned_s - first.planned_s >= 0.09


async def test_stop_lets_running_requests_finish() -> None:
    async with serving(chunked(*WHOLE)) as url:
        client = Client(
            Load(url=url, model="m", requests=1_000_000, concurrency=2, osl=2),
            on_record=lambda record: client.stop() if record.index == 10 else None,
        )
        records = await asyncio.wait_for(client.run(), 3 * SOON_S)
        client.aclose()
    assert 10 <= len(records) <= 12
    assert all(record.is_ok for record in records)


async def test_run_when_cancelled_then_its_connections_are_closed() -> None:
    asked = asyncio.Event()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = Client(Load(url=url, model="m", requests=1))
        running = asyncio.create_task(client.run())
        await asyncio.wait_for(asked.wait(), SOON_S)
        running.cancel()
        await asyncio.wait([running])
        client.aclose()
        await asyncio.wait_for(ended.wait(), SOON_S)


async def test_measurement_ends_when_first_requests_all_fail() -> None:
    bodies: list[Any] = []

    async def invalid(writer: asyncio.StreamWriter) -> None:
        body = REFUSAL.replace(b"overloaded", b"invalid")
        writer.write(
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )

    async with serving(invalid, bodies) as url:
        load = Load(url=url, model="m", requests=500, concurrency=4)
        with pytest.raises(
            client_shards.AllRequestsFailed,
            match=r"the first 8 requests all failed.*\(invalid \d+ times\)",
        ):
            await asyncio.to_thread(
                client_shards.measure_shards, load, processes=2, warmup=2, pids={}
            )
    assert client_shards.MAX_FAILURES <= len(bodies) < client_shards.MAX_FAILURES + load.concurrency


async def test_measurement_continues_when_server_is_busy() -> None:
    async with serving(refused) as url:
        load = Load(url=url, model="m", requests=20, concurrency=4)
        found, records = await asyncio.to_thread(
            client_shards.measure_shards, load, processes=2, warmup=2, pids={}
        )
    assert (len(records), found["ok"]) == (20, 0)


async def test_measured_when_it_runs_then_its_progress_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_shards, "PROGRESS_S", 0.01)
    reports = []
    is_reported = threading.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(is_reported.wait, SOON_S)
        await chunked(*WHOLE)(writer)

    def on_progress(tally: client_shards.SharedCounters) -> None:
        reports.append((tally.ok, tally.failed))
        is_reported.set()

    async with serving(answer) as url:
        load = Load(url=url, model="m", requests=2, osl=2)
        await asyncio.to_thread(
            client_shards.measure_shards,
            load,
            processes=1,
            warmup=0,
            pids={},
            on_progress=on_progress,
        )
    assert reports[0] == (0, 0)
    assert all(ended in {(0, 0), (1, 0), (2, 0)} for ended in reports)


def test_measurement_interrupted_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_shards, "PROGRESS_S", 0.01)
    main_thread = threading.get_ident()
    answers = iter([chunked(*WHOLE)] * 4)
    is_sent = threading.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await next(answers, silent)(writer)

    def on_progress(tally: client_shards.SharedCounters) -> None:
        if tally.ok == 4 and not is_sent.is_set():
            is_sent.set()
            signal.pthread_kill(main_thread, signal.SIGINT)

    server = serving(answer)
    url = wait_for(server.__aenter__())
    try:
        load = Load(url=url, model="m", requests=50, concurrency=2, osl=2)
        with Interrupts() as interrupts, pytest.raises(client_shards.LoadInterrupted) as caught:
            client_shards.measure_shards(
                load,
                processes=2,
                warmup=0,
                pids={},
                on_progress=on_progress,
                interrupts=interrupts,
            )
    finally:
        wait_for(server.__aexit__(None, None, None))
    assert (caught.value.summary["ok"], caught.value.summary["errors"]) == (4, {})
    assert [record.index for record in caught.value.records] == [1, 2, 3, 4]


async def test_measurement_shares_load_among_processes() -> None:
    bodies: list[Any] = []
    async with serving(chunked(*WHOLE), bodies) as url:
        load = Load(url=url, model="m", requests=5, concurrency=2, osl=2)
        found, records = await asyncio.to_thread(
            client_shards.measure_shards, load, processes=2, warmup=2, pids={}
        )
    assert (found["ok"], found["errors"], len(bodies)) == (5, {}, 7)
    assert [record.index for record in records] == [1, 2, 3, 4, 5]
    assert 0 < found["client_cores"] <= 1.1
