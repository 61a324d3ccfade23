"""Send many streamed chat requests to an OpenAI-compatible server, and measure them."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from .credentials import sent_api_key, tls_context
from .stream import RequestRecord, StreamConnection
from .summary import LoadSummary, ProcessMeter, cost, summarize

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one"
    " had by word but not what all were we when your can said there use an each which she do how"
    " their if will up other about out many"
).split()
_BLOCK_WORDS = 64
_NUM_BLOCKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send."""

    url: str
    model: str
    concurrency: int = 1
    rate: float = 0.0  # requests per second; 0: closed loop
    requests: int = 16
    seconds: float = 120.0  # no new request after this
    isl: int = 128  # words of the prompt, about as many as its tokens
    osl: int = 64  # max_tokens
    timeout_s: float = 120.0
    fresh_connections: bool = False
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # added to every body
    seed: int = 0  # of the prompts; 0: new prompts in each run, because servers cache prefixes
    keep_text: bool = False
    ramp_s: float = 0.0  # closed loop: seconds over which the lanes start
    prompts: tuple[str, ...] = ()  # used in turn instead of random words
    arrivals_s: tuple[float, ...] = ()  # open loop: when to send each request, instead of at `rate`
    osls: tuple[int, ...] = ()  # max_tokens of each request, instead of `osl`
    api_key: str = field(default_factory=sent_api_key, repr=False)  # "": none is sent


def _blocks(source: random.Random) -> list[str]:
    """Return texts from which prompts are composed."""
    return [" ".join(source.choices(WORDS, k=_BLOCK_WORDS)) for _ in range(_NUM_BLOCKS)]


def arrival_times(load: Load) -> Iterator[float]:
    """Yield the times at which a load with a seed sends its requests, in seconds after its begin.

    It is exact if prompts are not random: these come from the same source.
    """
    source = random.Random(load.seed)
    _blocks(source)
    at_s = 0.0
    while True:
        at_s += source.expovariate(load.rate)
        yield at_s


class Client:
    """Runs one load."""

    def __init__(
        self,
        load: Load,
        on_record: Callable[[RequestRecord], None] = lambda _: None,
        connection: type[StreamConnection] = StreamConnection,
        on_open: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        """Prepare a load.

        Args:
            load: what to send.
            on_record: called with each record when its request has ended.
            connection: class of the connections.
            on_open: called with each record when its request is sent.
        """
        self._load = load
        self._on_record = on_record
        self._connection = connection
        self._on_open = on_open
        self._until_s = math.inf
        self.is_stopped = False
        self._random = random.Random(load.seed or time.time_ns())
        self._blocks = _blocks(self._random)
        at = urlsplit(load.url)
        self._host = at.hostname or "localhost"
        self._tls = tls_context(load.url)
        self._port = at.port or (80 if self._tls is None else 443)
        self._path = at.path.rstrip("/") + "/v1/chat/completions"
        self._key_line = f"Authorization: Bearer {load.api_key}\r\n" if load.api_key else ""
        self._idle: deque[StreamConnection] = deque()
        self.is_abandoned = False
        self._running: asyncio.Task[object] | None = None  # inside `run`
        self._sent = 0

    async def run(self, requests: int | None = None) -> list[RequestRecord]:
        """Send the requests. Return the records in the order in which the requests ended.

        `requests` overrides the number of requests of the load, for a warm-up.
        """
        records: list[RequestRecord] = []
        self._running = asyncio.current_task()
        try:
            await self._send_all(self._load.requests if requests is None else requests, records)
        except asyncio.CancelledError:
            if not self.is_abandoned or self._running is None:
                raise
            self._running.uncancel()
        finally:
            self._running = None
        return records

    async def _send_all(self, wanted: int, records: list[RequestRecord]) -> None:
        self._until_s = 0.0 if self.is_stopped else time.perf_counter() + self._load.seconds
        if self._load.rate > 0 or self._load.arrivals_s:
            await self._open_loop(wanted, records)
        else:
            left = iter(range(wanted))
            lanes = min(self._load.concurrency, wanted)
            async with asyncio.TaskGroup() as group:
                for lane in range(lanes):
                    group.create_task(self._lane(left, records, self._load.ramp_s * lane / lanes))

    def stop(self) -> None:
        """Send no more requests, also in a later run.

        `run` returns when the active requests have ended.
        """
        self.is_stopped = True
        self._until_s = 0.0

    def abandon(self) -> None:
        """Send no more requests, and give up the active ones, which leave no record."""
        self.stop()
        self.is_abandoned = True
        if self._running is not None:
            self._running.cancel()

    async def _lane(self, left: Iterator[int], records: list[RequestRecord], wait_s: float) -> None:
        """Send one request after the other, from the requests that all lanes share."""
        await asyncio.sleep(wait_s)
        for _ in left:
            now = time.perf_counter()
            if now > self._until_s:
                return
            await self._one(now, records)

    async def _open_loop(self, wanted: int, records: list[RequestRecord]) -> None:
        begun_s = at_s = time.perf_counter()
        arrivals_s = self._load.arrivals_s
        async with asyncio.TaskGroup() as group:
            for number in range(wanted):
                if arrivals_s:
                    at_s = begun_s + arrivals_s[number]
                else:
                    at_s += self._random.expovariate(self._load.rate)
                if at_s > self._until_s:
                    return
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                group.create_task(self._one(at_s, records))

    def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _one(self, planned_s: float, records: list[RequestRecord]) -> None:
        self._sent += 1
        record = RequestRecord(index=self._sent, planned_s=planned_s)
        self._on_open(record)
        connection = await self._connect(record)
        if connection is not None:
            try:
                await connection.exchange(self._request(record.index), record, self._load.timeout_s)
            except asyncio.CancelledError:
                connection.close()
                raise
            is_usable = connection.is_open and record.error != "timeout"
            if is_usable and not self._load.fresh_connections:
                self._idle.append(connection)
            else:
                connection.close()
        records.append(record)
        self._on_record(record)

    async def _connect(self, record: RequestRecord) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        try:
            return await self._connection.connect(
                self._host, self._port, keep_text=self._load.keep_text, tls=self._tls
            )
        except OSError:
            record.end_s = time.perf_counter()
            record.error = "connect"
            await asyncio.sleep(0.05)  # limits the rate of attempts
            return None

    def _prompt(self) -> str:
        """Return random words: first single ones, so that no two prompts begin alike, then blocks
        of words.

        8192 single words would take the client as much CPU time as the request takes the server.
        """
        blocks = max(0, self._load.isl // _BLOCK_WORDS - 1)
        words = self._random.choices(WORDS, k=self._load.isl - blocks * _BLOCK_WORDS)
        return " ".join(words + self._random.choices(self._blocks, k=blocks))

    def _request(self, index: int) -> bytes:
        load = self._load
        prompts = load.prompts
        prompt = prompts[(index - 1) % len(prompts)] if prompts else self._prompt()
        body: dict[str, Any] = {
            "model": load.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": load.osls[index - 1] if load.osls else load.osl,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        content = orjson.dumps(body | load.extra)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._key_line}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def measure_load(
    load: Load, *, warmup: int, pids: dict[str, int]
) -> tuple[LoadSummary, list[RequestRecord]]:
    """Run the load in this process, after a warm-up.

    Args:
        load: what to send.
        warmup: requests before the load, not measured.
        pids: processes whose CPU time is measured, by name.

    Returns:
        The summary and the records of all requests.
    """
    meter = ProcessMeter(pids)
    shard = await run_shard(load, warmup, meter.start)
    return summarize_shards([shard], meter, osl=load.osl), shard.records


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """The results of one client process.

    If `should_continue` stopped it, the records include its warm-up.
    """

    records: list[RequestRecord]
    is_stopped: bool = False
    is_abandoned: bool = False  # it was stopped before its end
    begun_s: float
    ended_s: float
    cpu_s: float


async def run_shard(
    load: Load,
    warmup: int,
    on_warm: Callable[[], object],
    should_continue: Callable[[RequestRecord], bool] = lambda _: True,
    *,
    stop_fd: int | None = None,
) -> ShardResult:
    """Run a warm-up and the load.

    Args:
        load: what to send.
        warmup: requests before the load.
        on_warm: called after the warm-up; may block.
        should_continue: called with each record when its request has ended; False stops the load.
        stop_fd: a descriptor; the load is abandoned when something can be read from it.
    """

    def on_record(record: RequestRecord) -> None:
        if not should_continue(record):
            client.stop()

    client = Client(load, on_record)
    if stop_fd is not None:

        def abandon() -> None:
            asyncio.get_running_loop().remove_reader(stop_fd)
            client.abandon()

        asyncio.get_running_loop().add_reader(stop_fd, abandon)
    try:
        warmed = await client.run(warmup) if warmup else []
        on_warm()
        begun_s = time.perf_counter()
        cpu_s = time.process_time()
        records = await client.run()
        ended_s = time.perf_counter()
        cpu_s = time.process_time() - cpu_s
        if client.is_stopped and not client.is_abandoned:
            records = warmed + records
        return ShardResult(
            records=records,
            is_stopped=client.is_stopped,
            is_abandoned=client.is_abandoned,
            begun_s=begun_s,
            ended_s=ended_s,
            cpu_s=cpu_s,
        )
    finally:
        client.aclose()


def summarize_shards(
    shards: Sequence[ShardResult], meter: ProcessMeter, *, osl: int
) -> LoadSummary:
    """Summarize all shards together, with the CPU time of the processes of `meter` since it was
    started.
    """
    records = [record for shard in shards for record in shard.records]
    wall_s = max(shard.ended_s for shard in shards) - min(shard.begun_s for shard in shards)
    good = [record for record in records if record.is_ok]
    tokens = sum(record.output_tokens for record in good)
    requests = len(good)
    costs = meter.costs(wall_s=wall_s, tokens=tokens, requests=requests)
    costs["client"] = cost(
        sum(shard.cpu_s for shard in shards), wall_s=wall_s, tokens=tokens, requests=requests
    )
    summary = summarize(records, wall_s=wall_s, osl=osl, processes=costs)
    summary["client_cores"] = max(shard.cpu_s / (shard.ended_s - shard.begun_s) for shard in shards)
    return summary
