"""A keep-alive HTTP/1.1 connection of the load client that records when server-sent events arrive.

Events are counted on the raw bytes to save CPU time. Events of one read get the same time.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from array import array
from typing import cast

import httptools
import msgspec
import orjson

_DATA = b"data: "
_DONE = b"[DONE]"
# A token that is only a part of a UTF-8 character has no text, but an id if the request wants ids.
_HAS_OUTPUT = re.compile(
    rb'"(?:content|reasoning_content|arguments|text)":"[^"]|"token_ids":\[\d'
).search


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Times are in seconds of a monotonic clock."""

    index: int
    planned_s: float  # when it should have been sent; latencies count from here
    sent_s: float = 0.0
    status: int = 0  # HTTP; 0: no answer
    # "", the code of the server's error, or connect, cut (the connection ended), timeout, no_end
    error: str = ""
    first_s: float | None = None  # first event with output
    last_s: float | None = None
    end_s: float = 0.0
    events: int = 0  # with output
    output_tokens: int = 0  # as the server counts them
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str | None = None  # content, with keep_text
    finish: str | None = None
    # ids of the prefill and the decode worker, if the request asks for `worker_id` in `nvext`; one
    # that ran the whole request is both
    workers: tuple[int, int] | None = None
    # seconds by phase and part, with `x-dynamo-stats`
    phase_s: dict[str, float] = msgspec.field(default_factory=dict)
    ttft_phase_s: dict[str, float] = msgspec.field(default_factory=dict)
    server_ttft_s: float = 0.0  # as the frontend measures it, with `x-dynamo-stats`
    # between reads with output
    gaps_s: array[float] = msgspec.field(default_factory=lambda: array("d"))

    @property
    def is_ok(self) -> bool:
        return not self.error


class StreamConnection(asyncio.Protocol):
    """One connection, for one request at a time. Created by `connect`."""

    def __init__(self, *, keep_text: bool) -> None:
        self._keep_text = keep_text
        self._transport: asyncio.Transport | None = None
        self._record: RequestRecord | None = None
        self._done: asyncio.Future[None] | None = None
        self.is_open = False

    @classmethod
    async def connect(
        cls, host: str, port: int, *, keep_text: bool, tls: ssl.SSLContext | None = None
    ) -> StreamConnection:
        """Connect to a server.

        Args:
            host: of the server.
            port: of the server.
            keep_text: keep the text of answers.
            tls: for an https:// server, decides whether it is trusted.

        Raises:
            OSError: no server listens, or it is not trusted.
        """
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: cls(keep_text=keep_text), host, port, ssl=tls
        )
        return connection

    async def exchange(self, request: bytes, record: RequestRecord, timeout_s: float) -> None:
        """Send one request and fill `record` until the response ends.

        Errors are stored in the record.
        """
        self._record = record
        self._rest = b""
        self._body = bytearray()
        self._ended = False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        if self._transport is None or not self.is_open:
            self._end("cut")
        else:
            record.sent_s = time.perf_counter()
            self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            record.end_s = time.perf_counter()
            record.error = "timeout"
        finally:
            self._record = self._done = None

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is no subclass
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end("cut")

    def data_received(self, data: bytes) -> None:
        if self._record is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("bad_http")
            self.close()

    # --- httptools --------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        assert self._record is not None
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        record = self._record
        if record is None:
            return
        if record.status != 200:
            self._body += body
            return
        now = time.perf_counter()
        *events, self._rest = (self._rest + body).split(b"\n\n")
        with_output = sum(
            self._take(event[len(_DATA) :], record) for event in events if event.startswith(_DATA)
        )
        if not with_output:
            return
        if record.last_s is None:
            record.first_s = now
        else:
            record.gaps_s.append(now - record.last_s)
        record.events += with_output
        record.last_s = now

    def on_message_complete(self) -> None:
        record = self._record
        if record is None:
            return
        if record.status != 200:
            self._end(_error_code(bytes(self._body)) or f"http_{record.status}")
        else:
            self._end("" if self._ended else "no_end")
        if not self._parser.should_keep_alive():
            self.close()

    # --- events -----------------------------------------------------------------------------------

    def _take(self, event: bytes, record: RequestRecord) -> bool:
        """Read one event. Return whether it has output."""
        if event == _DONE:
            self._ended = True
            return False
        if b'"usage":{' in event or b'"error":' in event:
            self._take_end(orjson.loads(event), record)
        if self._keep_text or b'"finish_reason":"' in event:
            self._take_choices(orjson.loads(event), record)
        return _HAS_OUTPUT(event) is not None

    def _take_end(self, event: dict[str, object], record: RequestRecord) -> None:
        match event:
            case {"error": {"code": code}}:
                record.error = str(code)
            case {
                "usage": {
                    "completion_tokens": int(completion),
                    "prompt_tokens": int(prompt),
                    **rest,
                }
            }:
                record.output_tokens = completion
                record.prompt_tokens = prompt
                match rest.get("prompt_tokens_details"):
                    case {"cached_tokens": int(cached)}:
                        record.cached_tokens = cached
        match event.get("dynamo_trtllm"):
            case {
                "phase_s": {**phases},
                "part_s": {**parts},
                "ttft_phase_s": {**ttft_phases},
                "ttft_s": float(ttft_s),
            }:
                record.phase_s = cast("dict[str, float]", phases | parts)
                record.ttft_phase_s = cast("dict[str, float]", ttft_phases)
                record.server_ttft_s = ttft_s

        match event.get("nvext"):
            case {
                "worker_id": {"prefill_worker_id": int(prefill), "decode_worker_id": int(decode)}
            }:
                record.workers = (prefill, decode)

    def _take_choices(self, event: dict[str, object], record: RequestRecord) -> None:
        match event:
            case {"choices": [{"delta": {**delta}, "finish_reason": finish}]}:
                record.finish = str(finish) if finish else record.finish
                if self._keep_text:
                    record.text = (record.text or "") + str(delta.get("content") or "")

    def _end(self, error: str) -> None:
        record = self._record
        if record is None or self._done is None or self._done.done():
            return
        record.error = record.error or error
        record.end_s = time.perf_counter()
        self._done.set_result(None)


def _error_code(body: bytes) -> str:
    try:
        match orjson.loads(body):
            case {"error": {"code": str(code)}}:
                return code
            # servers without error codes
            case {"error": {"code": int(code)}} | {"code": int(code)}:
                return f"http_{code}"
    except orjson.JSONDecodeError:
        pass
    return ""
