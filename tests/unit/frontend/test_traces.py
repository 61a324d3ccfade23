"""Traces of requests, as a collector of OpenTelemetry receives them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from dynamo_trtllm.frontend.requests.traces import (
    EndedRequest,
    ExportLimits,
    TraceExporter,
    phase_intervals,
)
from dynamo_trtllm.protocol.messages import PhaseTimings, Role
from dynamo_trtllm.protocol.phases import Span
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import asgi

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class Collector:
    """A collector that keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["Content-Type"]) == (
                    "/v1/traces",
                    "application/json",
                )
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                """Write no log."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[dict[str, Any]]:
        """Return all spans, each with the name of its service."""
        return [
            span | {"service": resource["resource"]["attributes"][0]["value"]["stringValue"]}
            for message in self.received
            for resource in message["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


async def flush(exporter: TraceExporter) -> None:
    """Let the exporter send its queue, as at the end of a process."""
    task = asyncio.create_task(exporter.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def exporting(collector_url: str, ratio: float = 1.0) -> tuple[FakeFrontend, TraceExporter]:
    served = front(chunk("ok"), stop(), otlp_endpoint=collector_url, trace_sample_ratio=ratio)
    assert served.built.traces is not None
    return served, served.built.traces


async def chat(served: FakeFrontend, headers: dict[str, str], model: str = MODEL) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(asgi(served.app)), base_url="http://test"
    ) as client:
        return await client.post(
            "/v1/chat/completions", json=CHAT | {"model": model}, headers=headers
        )


def ended(traceparent: str | None) -> EndedRequest:
    spans = [
        Span("tokenize", 10.0),
        Span("prefill", 11.0, Role.PREFILL),
        Span("decode", 12.0, Role.DECODE),
        Span("respond", 14.0),
    ]
    prefill = PhaseTimings(queue_s=0.25, prefill_s=0.5, more={"queue.slots": 0.25})
    decode = PhaseTimings(decode_queue_s=0.5)
    return EndedRequest("POST /v1/completions", traceparent, spans, 14.5, prefill, decode, {}, "")


def test_intervals_of_workers_are_adjacent() -> None:
    assert list(phase_intervals(ended(None))) == [
        ("frontend", "tokenize", 10.0, 11.0),
        ("prefill", "send", 11.0, 11.25),
        ("prefill", "queue", 11.25, 11.5),
        ("prefill", "prefill", 11.5, 12.0),
        ("decode", "decode_wait", 12.0, 12.5),
        ("decode", "decode", 12.5, 14.0),
        ("frontend", "respond", 14.0, 14.5),
    ]


async def test_trace_continues_the_clients(collector: Collector) -> None:
    served, exporter = exporting(collector.url, ratio=0.0)
    begun_ns = time.time_ns()
    response = await chat(served, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert response.status_code == 200
    await flush(exporter)
    root, *phases = sorted(collector.spans(), key=lambda span: span["kind"], reverse=True)
    assert (root["traceId"], root["parentSpanId"], root["name"]) == (
        TRACE,
        PARENT,
        "POST /v1/chat/completions",
    )
    assert root["service"] == "dynamo_trtllm.frontend"
    assert "status" not in root
    attributes = {attribute["key"]: attribute["value"] for attribute in root["attributes"]}
    assert attributes["gen_ai.request.model"] == {"stringValue": MODEL}
    assert attributes["http.response.status_code"] == {"intValue": "200"}
    assert attributes["gen_ai.response.id"] == {"stringValue": response.json()["id"]}
    assert {(span["traceId"], span["parentSpanId"]) for span in phases} == {(TRACE, root["spanId"])}
    assert {"receive", "tokenize", "select", "respond"} <= {span["name"] for span in phases}
    assert len({span["spanId"] for span in phases}) == len(phases)
    begin = int(root["startTimeUnixNano"])
    end = int(root["endTimeUnixNano"])
    assert begin == pytest.approx(begun_ns, abs=60e9)
    took = sum(int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) for span in phases)
    assert took == pytest.approx(end - begin, abs=10_000)


@pytest.mark.parametrize(
    ("header", "exports", "passed"),
    [
        (f"00-{TRACE}-{PARENT}-01", True, f"00-{TRACE}-{PARENT}-01"),
        (f"00-{TRACE}-{PARENT}-01", False, f"00-{TRACE}-{PARENT}-01"),
        (f"00-{'0' * 32}-{PARENT}-01", True, None),  # not valid
        ("x" * 1000, True, None),
    ],
)
async def test_traceparent_reaches_workers_without_export(
    collector: Collector, header: str, exports: bool, passed: str | None
) -> None:
    served = exporting(collector.url)[0] if exports else front(chunk("ok"), stop())
    assert (await chat(served, {"traceparent": header})).status_code == 200
    (request,) = served.router.requests
    assert request.traceparent == passed


async def test_trace_of_failed_request_has_error_status(collector: Collector) -> None:
    served, exporter = exporting(f"{collector.url}/")
    await chat(served, {}, model="other")
    await flush(exporter)
    (root,) = [span for span in collector.spans() if not span["parentSpanId"]]
    assert root["status"] == {"code": 2, "message": "model_not_found"}


@pytest.mark.parametrize(
    ("traceparent", "ratio", "count"),
    [
        (f"00-{TRACE}-{PARENT}-00", 1.0, 0),
        (f"00-{TRACE}-{PARENT}-01", 0.0, 1),
        (None, 0.0, 0),
        (None, 1.0, 1),
        (f"00-{'0' * 32}-{PARENT}-01", 0.0, 0),
        (f"ff-{TRACE}-{PARENT}-01", 0.0, 0),
        (f"00-{TRACE}-{PARENT}-01-more", 0.0, 0),
        (f"01-{TRACE}-{PARENT}-01-more", 0.0, 1),
        ("garbage", 1.0, 1),
    ],
)
async def test_trace_when_it_is_sampled_then_it_is_sent(
    collector: Collector, traceparent: str | None, ratio: float, count: int
) -> None:
    exporter = TraceExporter(collector.url, "dynamo", ratio)
    exporter.add(ended(traceparent))
    await flush(exporter)
    assert len([span for span in collector.spans() if span["kind"] == 2]) == count


async def test_trace_without_collector_keeps_a_short_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served, exporter = exporting(f"http://127.0.0.1:{free_ports()}")
    exporter.limits = ExportLimits(max_queued=3)
    for _ in range(5):
        assert (await chat(served, {})).status_code == 200
    await flush(exporter)
    (warning,) = [line for line in caplog.messages if "traces" in line]
    assert warning.endswith("; 5 traces were dropped")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(asgi(served.app)), base_url="http://test"
    ) as client:
        metrics = (await client.get("/metrics")).text
    assert "\ndynamo_trtllm_dropped_traces_total 5.0\n" in metrics


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """Yield the URL of a collector that gives each POST one answer, in pieces; the last one again
    and again.
    """
    left = list(answers)
    handlers = set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        whole = OK if head.startswith(b"GET") else left.pop(0) if len(left) > 1 else left[0]
        for begin in range(0, len(whole), 20):
            writer.write(whole[begin : begin + 20])
            await asyncio.sleep(0.005)
            if writer.is_closing():
                break
        writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.create_task(answer(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"
        await asyncio.gather(*handlers)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
MOVED = b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nX: " + b"x" * 5000 + b"\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"), [(LONG, "did not take all traces"), (MOVED, "HTTP status 302")]
)
async def test_trace_with_bad_collector_counts_dropped_ones(
    answer: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with answering(answer) as url:
        limits = ExportLimits(max_sent=1, timeout_s=0.5)
        exporter = TraceExporter(url, "dynamo", limits=limits)
        for _ in range(3):
            exporter.add(ended(None))
        await flush(exporter)
    warnings = [line for line in caplog.messages if "traces" in line]
    assert all(reason in line for line in warnings)
    assert sum(int(line.rpartition("; ")[2].split()[0]) for line in warnings) == 3


async def test_trace_warning_after_recovery_says_why_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = b"HTTP/1.1 503 Busy\r\n\r\n"
    done = asyncio.Event()
    async with answering(busy, busy, OK) as url:
        exporter = TraceExporter(url, "dynamo", limits=ExportLimits(every_s=0.0))
        send = exporter._send_all

        async def sent() -> None:
            await send()
            done.set()

        monkeypatch.setattr(exporter, "_send_all", sent)
        task = asyncio.create_task(exporter.run())
        for _ in range(3):
            done.clear()
            exporter.add(ended(None))
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    warnings = [line for line in caplog.messages if "traces" in line]
    assert [line.partition(": ")[2] for line in warnings] == 2 * [
        "it answers with HTTP status 503; 1 trace was dropped"
    ]
