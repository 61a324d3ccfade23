"""The load client on `/v1/completions` with prompts of token ids, so that no server's rendering is measured."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import orjson

from benchmarks.client import Client, Load
from benchmarks.figures import Figures, figures
from benchmarks.gpu.plan import MODEL_NAME
from benchmarks.stream import Record, StreamConnection

Prompt = Sequence[int]
_IDS = range(1000, 190_000)  # ordinary tokens of o200k
_PATH = "/v1/completions"
SAMPLED = {"temperature": 1.0}  # dummy weights repeat a token when greedy; sampled, they yield many
GREEDY = {"temperature": 0}


def prompts(count: int, length: int, seed: int) -> list[Prompt]:
    """Different ones, of exactly `length` tokens."""
    return [_prompt(random.Random(f"{seed}-{number}"), length) for number in range(count)]


def prompts_between(count: int, shortest: int, longest: int, seed: int) -> list[Prompt]:
    """Different ones, from the shortest to the longest by equal factors."""
    step = (longest / shortest) ** (1 / max(1, count - 1))
    return [_prompt(random.Random(f"{seed}-{n}"), round(shortest * step**n)) for n in range(count)]


def _prompt(source: random.Random, length: int) -> Prompt:
    return source.choices(_IDS, k=length)


class _Connection(StreamConnection):
    def _take_choices(self, event: dict[str, object], record: Record) -> None:
        match event:
            case {"choices": [{"text": str(text), "finish_reason": finish}]}:
                record.finish = str(finish) if finish else record.finish
                if self._keep_text:
                    record.text = (record.text or "") + text


class TokensClient(Client):
    """Takes the prompts in turn."""

    def __init__(self, load: Load, given: Sequence[Prompt]) -> None:
        super().__init__(load, connection=_Connection)
        self._given = given
        self._path = _PATH

    def _request(self, index: int) -> bytes:
        load = self._load
        body: dict[str, Any] = {
            "model": load.model,
            "prompt": self._given[(index - 1) % len(self._given)],
            "max_tokens": load.osl,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        content = orjson.dumps(body | load.extra)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def send(
    url: str, given: Sequence[Prompt], *, osl: int, concurrency: int, extra: dict[str, Any], **more: Any
) -> list[Record]:
    """Each prompt once, in the order in which the answers ended. `more`: fields of Load."""
    client = _client(url, given, osl=osl, concurrency=concurrency, extra=extra, **more)
    try:
        records = await client.run()
    finally:
        client.aclose()
    await asyncio.sleep(0)  # its connections end in the loop's next turn, which may be the last
    return records


async def measure(
    url: str, given: Sequence[Prompt], *, osl: int, concurrency: int, extra: dict[str, Any], **more: Any
) -> tuple[Figures, list[Record]]:
    """The figures of `send`."""
    begun_s = time.perf_counter()
    records = await send(url, given, osl=osl, concurrency=concurrency, extra=extra, **more)
    return figures(records, wall_s=time.perf_counter() - begun_s, osl=osl, processes={}), records


def _client(
    url: str, given: Sequence[Prompt], *, osl: int, concurrency: int, extra: dict[str, Any], **more: Any
) -> TokensClient:
    fields: dict[str, Any] = {"requests": len(given), "seconds": 600.0, "timeout_s": 120.0} | more
    return TokensClient(Load(url=url, model=MODEL_NAME, osl=osl, concurrency=concurrency, extra=extra, **fields), given)


def texts(records: Sequence[Record]) -> dict[int, str | None]:
    """What was answered, by the request's number; None for an error."""
    return {record.index: record.text if record.is_ok else None for record in records}
