"""The load client for `/v1/completions` with token ids as prompts, without chat templates and
tokenizers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ..load_client import Client, Load
from ..stream import RequestRecord, StreamConnection
from ..summary import LoadSummary, summarize
from .plan import MODEL_NAME

Prompt = Sequence[int]
_IDS = range(1000, 190_000)  # ordinary tokens of o200k
_PATH = "/v1/completions"
SAMPLED = {"temperature": 1.0}  # dummy weights repeat a token when greedy; sampled, they yield many
# For gaps between tokens: of the tokens that dummy weights yield, 0.8 % are parts of UTF-8
# characters. Without ids, they come with the next token, and the longest gap of most requests seems
# twice as long.
SAMPLED_WITH_IDS = {**SAMPLED, "return_token_ids": True}
GREEDY = {"temperature": 0}


def prompts(count: int, length: int, seed: int) -> list[Prompt]:
    """Return different prompts of exactly `length` tokens."""
    return [_prompt(random.Random(f"{seed}-{number}"), length) for number in range(count)]


def prompts_between(count: int, shortest: int, longest: int, seed: int) -> list[Prompt]:
    """Return different prompts whose lengths grow from `shortest` to `longest` by equal factors."""
    step = (longest / shortest) ** (1 / max(1, count - 1))
    return [_prompt(random.Random(f"{seed}-{n}"), round(shortest * step**n)) for n in range(count)]


def _prompt(source: random.Random, length: int) -> Prompt:
    return source.choices(_IDS, k=length)


class _Connection(StreamConnection):
    def _take_choices(self, event: dict[str, object], record: RequestRecord) -> None:
        match event:
            case {"choices": [{"text": str(text), "finish_reason": finish}]}:
                record.finish = str(finish) if finish else record.finish
                if self._keep_text:
                    record.text = (record.text or "") + text


class TokensClient(Client):
    """A load client that uses the prompts in turn."""

    def __init__(
        self,
        load: Load,
        given: Sequence[Prompt],
        on_record: Callable[[RequestRecord], None] = lambda _: None,
    ) -> None:
        super().__init__(load, on_record, connection=_Connection)
        self._given = given
        self._path = _PATH

    def _request(self, index: int) -> bytes:
        load = self._load
        body: dict[str, Any] = {
            "model": load.model,
            "prompt": self._given[(index - 1) % len(self._given)],
            "max_tokens": load.osls[index - 1] if load.osls else load.osl,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        content = orjson.dumps(body | load.extra)
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type:"
            " application/json\r\nAccept: text/event-stream\r\nx-dynamo-stats:"
            f" 1\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


async def send(
    url: str,
    given: Sequence[Prompt],
    *,
    osl: int,
    concurrency: int,
    extra: dict[str, Any],
    **more: Any,
) -> list[RequestRecord]:
    """Send each prompt once. Return the records in the order in which the requests ended.

    Args:
        url: address of the server.
        given: prompts as token ids.
        osl: tokens per answer.
        concurrency: concurrent requests.
        extra: fields added to every body.
        more: further fields of Load.
    """
    client = _client(url, given, osl=osl, concurrency=concurrency, extra=extra, **more)
    try:
        records = await client.run()
    finally:
        client.aclose()
    await asyncio.sleep(0)  # lets the connections close
    return records


async def measure(
    url: str,
    given: Sequence[Prompt],
    *,
    osl: int,
    concurrency: int,
    extra: dict[str, Any],
    **more: Any,
) -> tuple[LoadSummary, list[RequestRecord]]:
    """Send each prompt once. Return the summary and the records. See `send` for the arguments."""
    begun_s = time.perf_counter()
    records = await send(url, given, osl=osl, concurrency=concurrency, extra=extra, **more)
    return summarize(records, wall_s=time.perf_counter() - begun_s, osl=osl, processes={}), records


def _client(
    url: str,
    given: Sequence[Prompt],
    *,
    osl: int,
    concurrency: int,
    extra: dict[str, Any],
    **more: Any,
) -> TokensClient:
    fields: dict[str, Any] = {"requests": len(given), "seconds": 600.0, "timeout_s": 120.0} | more
    return TokensClient(
        Load(url=url, model=MODEL_NAME, osl=osl, concurrency=concurrency, extra=extra, **fields),
        given,
    )


def texts(records: Sequence[RequestRecord]) -> dict[int, str | None]:
    """Return the answers by request number. None stands for an error."""
    return {record.index: record.text if record.is_ok else None for record in records}
