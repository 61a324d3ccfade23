"""Load on any OpenAI-compatible server: many streamed chats at once, raw records and figures.

python -m benchmarks.client --url http://localhost:8000 --concurrency 32 --requests 320 --isl 128 --osl 256

Closed loop: --concurrency requests are always under way. Open loop: --rate sends that many a second (Poisson) whatever
the answers do; latency counts from the planned time, so that a server that stalls can't hide it. --processes parts the
load among client processes, for when one is not enough: the output says when it was not.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec
import orjson
import uvloop

from benchmarks.figures import Figures, ProcessMeter, cost, figures, table
from benchmarks.stream import Record, StreamConnection

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. Seconds and tokens."""

    url: str
    model: str
    concurrency: int = 1
    rate: float = 0.0  # requests per second; 0: closed loop
    requests: int = 16
    seconds: float = 120.0  # no new request after this
    isl: int = 128  # words of the prompt, near enough its tokens
    osl: int = 64  # max_tokens
    timeout_s: float = 120.0
    fresh_connections: bool = False
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # put into every body
    seed: int = 0  # 0: prompts that no earlier run sent, because servers cache
    keep_text: bool = False
    ramp_s: float = 0.0  # closed loop: over which the lanes start, so that they do not keep step
    prompts: tuple[str, ...] = ()  # taken in turn, by the record's index, instead of random words


class Client:
    """Runs one load. `on_open` sees each record as its request is sent, `on_record` as it ends; `connection` reads."""

    def __init__(
        self,
        load: Load,
        on_record: Callable[[Record], None] = lambda _: None,
        connection: type[StreamConnection] = StreamConnection,
        on_open: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._load = load
        self._on_record = on_record
        self._connection = connection
        self._on_open = on_open
        self._until_s = math.inf
        self.is_stopped = False
        self._random = random.Random(load.seed or time.time_ns())
        at = urlsplit(load.url)
        self._host, self._port = at.hostname or "localhost", at.port or 80
        self._path = at.path.rstrip("/") + "/v1/chat/completions"
        self._idle: deque[StreamConnection] = deque()
        self._sent = 0

    async def run(self, requests: int | None = None) -> list[Record]:
        """All records, in the order in which the requests ended. `requests` instead of the load's, for a warm-up."""
        wanted = self._load.requests if requests is None else requests
        records: list[Record] = []
        self._until_s = 0.0 if self.is_stopped else time.perf_counter() + self._load.seconds
        if self._load.rate > 0:
            await self._open_loop(wanted, records)
        else:
            left = iter(range(wanted))
            lanes = min(self._load.concurrency, wanted)
            async with asyncio.TaskGroup() as group:
                for lane in range(lanes):
                    group.create_task(self._lane(left, records, self._load.ramp_s * lane / lanes))
        return records

    def stop(self) -> None:
        """No new request from now on, in a later run neither; `run` ends with those under way."""
        self.is_stopped, self._until_s = True, 0.0

    async def _lane(self, left: Iterator[int], records: list[Record], wait_s: float) -> None:
        """One request after the other, out of those that all lanes share."""
        await asyncio.sleep(wait_s)
        for _ in left:
            now = time.perf_counter()
            if now > self._until_s:
                return
            await self._one(now, records)

    async def _open_loop(self, wanted: int, records: list[Record]) -> None:
        at_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(wanted):
                at_s += self._random.expovariate(self._load.rate)
                if at_s > self._until_s:
                    return
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                group.create_task(self._one(at_s, records))

    def aclose(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _one(self, planned_s: float, records: list[Record]) -> None:
        self._sent += 1
        record = Record(index=self._sent, planned_s=planned_s)
        self._on_open(record)
        connection = await self._connected(record)
        if connection is not None:
            try:
                await connection.exchange(self._request(record.index), record, self._load.timeout_s)
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.is_open and record.error != "timeout" and not self._load.fresh_connections:
                self._idle.append(connection)
            else:
                connection.close()
        records.append(record)
        self._on_record(record)

    async def _connected(self, record: Record) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        try:
            return await self._connection.connect(self._host, self._port, keep_text=self._load.keep_text)
        except OSError:
            record.error, record.end_s = "connect", time.perf_counter()
            await asyncio.sleep(0.05)  # a server that is away is not asked thousands of times
            return None

    def _request(self, index: int) -> bytes:
        load = self._load
        prompts = load.prompts
        prompt = prompts[(index - 1) % len(prompts)] if prompts else " ".join(self._random.choices(_WORDS, k=load.isl))
        body: dict[str, Any] = {
            "model": load.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": load.osl,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        content = orjson.dumps(body | load.extra)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def measured(load: Load, *, warmup: int, pids: dict[str, int]) -> tuple[Figures, list[Record]]:
    """Warm-up, then the load with the cost of the named processes."""
    meter = ProcessMeter(pids)
    share = await run_share(load, warmup, meter.start)
    return metered([share], meter, osl=load.osl), share.records


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one client process did. The records of one that was stopped are also those of its warm-up."""

    records: list[Record]
    is_stopped: bool = False
    begun_s: float
    ended_s: float
    cpu_s: float


async def run_share(
    load: Load,
    warmup: int,
    on_warm: Callable[[], object],
    goes_on: Callable[[Record], bool] = lambda _: True,
) -> Share:
    """Run warm-up and load. `on_warm` is called between them and may block; `goes_on` sees each record as it ends."""

    def on_record(record: Record) -> None:
        if not goes_on(record):
            client.stop()

    client = Client(load, on_record)
    try:
        warmed = await client.run(warmup) if warmup else []
        on_warm()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        records = await client.run()
        ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        if client.is_stopped:
            records = warmed + records
        return Share(records=records, is_stopped=client.is_stopped, begun_s=begun_s, ended_s=ended_s, cpu_s=cpu_s)
    finally:
        client.aclose()


def metered(shares: Sequence[Share], meter: ProcessMeter, *, osl: int) -> Figures:
    """The figures of all shares together, and what the processes of `meter` cost since it was started."""
    records = [record for share in shares for record in share.records]
    wall_s = max(share.ended_s for share in shares) - min(share.begun_s for share in shares)
    good = [record for record in records if record.is_ok]
    tokens, requests = sum(record.output_tokens for record in good), len(good)
    costs = meter.costs(wall_s=wall_s, tokens=tokens, requests=requests)
    costs["client"] = cost(sum(share.cpu_s for share in shares), wall_s=wall_s, tokens=tokens, requests=requests)
    found = figures(records, wall_s=wall_s, osl=osl, processes=costs)
    found["client_cores"] = max(share.cpu_s / (share.ended_s - share.begun_s) for share in shares)
    return found


def chosen_model(url: str, wanted: str | None) -> tuple[str, int | None]:
    """Return a served model's name and its longest prompt and answer together in tokens, None if the server is silent.

    `wanted` names the model; None takes the only one. Exits with a line if there is no such model, or no server.
    """
    try:
        with urlopen(url.rstrip("/") + "/v1/models", timeout=10) as answer:
            models = {str(each["id"]): each.get("max_model_len") for each in orjson.loads(answer.read())["data"]}
    except HTTPError as exc:
        if wanted is not None:
            return wanted, None
        raise SystemExit(f"{url} does not list its models ({exc}); name one with --model") from exc
    except OSError as exc:
        raise SystemExit(f"no server answers at {url} ({exc}); start a deployment or name --url") from exc
    names = ", ".join(models) or "none yet"
    if wanted is None and len(models) != 1:
        raise SystemExit(f"name a model with --model; served at {url}: {names}")
    if wanted is not None and wanted not in models:
        raise SystemExit(f"model {wanted!r} is not served at {url}; served: {names}")
    name = wanted or next(iter(models))
    return name, models[name]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.client", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://localhost:8000", help="address of the server (default: http://localhost:8000)")
    add("--model", help="default: the only one that is served")
    add("--concurrency", type=int, default=1, help="requests under way at once, closed loop (default: 1)")
    add("--rate", type=float, default=0.0, help="requests per second; above 0: open loop")
    add("--requests", type=int, default=16, help="requests that are sent and counted (default: 16)")
    add("--seconds", type=float, default=120.0, help="no new request after this (default: 120)")
    add("--warmup", type=int, default=0, help="requests sent first and not counted (default: 0)")
    add("--isl", type=int, default=128, help="words of the prompt, near enough its tokens (default: 128)")
    add("--osl", type=int, default=64, help="max_tokens (default: 64)")
    add("--timeout-s", type=float, default=120.0, help="longest wait for one answer (default: 120)")
    add("--fresh-connections", action="store_true", help="a new connection for every request")
    add("--no-ignore-eos", action="store_true", help="leave out ignore_eos, which not every server knows")
    add("--extra", type=orjson.loads, default={}, help="JSON object put into every body")
    add("--seed", type=int, default=0, help="of the prompts; 0: other ones every time")
    add("--processes", type=int, default=1, help="client processes that share the load (default: 1)")
    add(
        "--pid",
        action="append",
        default=[],
        metavar="NAME=PID",
        help="charge this process and its children; repeatable",
    )
    add("--records", type=Path, help="write one JSON line per request to this file")
    add("--json", action="store_true", help="figures as one JSON line")
    return parser.parse_args()


def main() -> None:
    """Exit status 1 when no request was answered."""
    from benchmarks import shares  # it needs this module

    args = _arguments()
    load = Load(
        url=args.url,
        model=chosen_model(args.url, args.model)[0],
        concurrency=args.concurrency,
        rate=args.rate,
        requests=args.requests,
        seconds=args.seconds,
        isl=args.isl,
        osl=args.osl,
        timeout_s=args.timeout_s,
        fresh_connections=args.fresh_connections,
        ignore_eos=not args.no_ignore_eos,
        extra=args.extra,
        seed=args.seed,
    )
    pids = {name: int(pid) for name, _, pid in (each.partition("=") for each in args.pid)}
    if args.processes > 1:
        try:
            found, records = shares.measured(load, processes=args.processes, warmup=args.warmup, pids=pids)
        except shares.NoAnswer as exc:
            raise SystemExit(f"benchmarks.client: {exc}") from exc
    else:
        found, records = uvloop.run(measured(load, warmup=args.warmup, pids=pids))
    if args.records:
        encode = msgspec.json.Encoder(enc_hook=list).encode
        args.records.write_bytes(b"".join(encode(record) + b"\n" for record in records))
    sys.stdout.write(orjson.dumps(found).decode() + "\n" if args.json else table(found))
    raise SystemExit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()
