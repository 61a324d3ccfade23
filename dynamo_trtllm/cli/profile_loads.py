"""Send the loads from which a worker learns how long its steps take (`dynamo-trtllm profile`)."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec

from dynamo_trtllm.support import http_client

_CYCLES: Final = 2
_OUTPUT_TOKENS: Final = (16, 128)  # the least and the most of a request
_IDS: Final = range(1000, 30_000)  # ordinary tokens of every vocabulary
_SEED: Final = 1
_NUM_ALONE: Final = 9  # requests that run alone, of which the median counts
_PART_ALONE: Final = 0.25  # the length of their prompts, as part of a full step
_TIMEOUT_S: Final = 120.0
_MAX_BODY_BYTES: Final = 1 << 20


class LoadFailed(Exception):
    """A request of a load failed. The message says how, and what to do."""


class _Level(NamedTuple):
    """So many requests at any time, with prompts of these lengths as parts of a full step."""

    concurrency: int
    parts: Sequence[float]


# A worker keeps the newest samples of each kind of step. The kinds that few requests see come last,
# because large batches see them, too, when they begin.
_LEVELS: Final = (
    _Level(256, (1 / 64, 1 / 32)),
    _Level(64, (1 / 64, 1 / 8, 1 / 2, 1.0)),
    _Level(16, (1 / 64, 1 / 8, 1 / 2, 1.0)),
    _Level(4, (1 / 64, 1 / 8, 1 / 2, 1.0)),
    _Level(1, (1 / 64, 1 / 16, 1 / 4, 1.0)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Requests that ran one at a time, with one output token each."""

    prompt_tokens: int
    seconds: float  # the median of their times


class ProfileLoads:
    """The loads of one profile. Prompts are random token ids, and answers are not streamed.

    Args:
        url: address of the frontend.
        model: name of the model, or of its folder.
        step_tokens: the most prompt tokens of a step.
        headers: sent with each request.
        tls: decides which https:// servers are trusted. See `http_client.connect`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        step_tokens: int,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._url = url
        self._model = model
        self._step_tokens = step_tokens
        self._headers = headers
        self._tls = tls
        self._random = random.Random(_SEED)

    async def run(self, seconds: float) -> None:
        """Send all loads.

        Args:
            seconds: how long they take together.

        Raises:
            LoadFailed: a request failed.
        """
        await self._find_model()
        level_s = seconds / (_CYCLES * len(_LEVELS))
        for _ in range(_CYCLES):
            for level in _LEVELS:
                await self._run_level(level, level_s)

    async def alone(self) -> Alone:
        """Return how long requests take that run alone.

        Raises:
            LoadFailed: a request failed.
        """
        prompt_tokens = max(1, int(_PART_ALONE * self._step_tokens))
        found_s: list[float] = []
        for _ in range(_NUM_ALONE):
            begun_s = time.monotonic()
            await self._ask(prompt_tokens, 1)
            found_s.append(time.monotonic() - begun_s)
        return Alone(prompt_tokens=prompt_tokens, seconds=median(found_s))

    async def _run_level(self, level: _Level, seconds: float) -> None:
        """Keep requests running for some seconds, and cancel those that run at the end."""
        lengths = [max(1, int(part * self._step_tokens)) for part in level.parts]

        async def send_all() -> None:
            while True:
                await self._ask(self._random.choice(lengths), self._random.randint(*_OUTPUT_TOKENS))

        lanes = [asyncio.create_task(send_all()) for _ in range(level.concurrency)]
        try:
            done, _ = await asyncio.wait(
                lanes, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        for lane in done:
            lane.result()

    async def _find_model(self) -> None:
        """Take the only model of the frontend, unless it has one with the given name.

        Raises:
            LoadFailed: it has several models, or none.
        """
        content = await self._send("GET", "/v1/models", b"")
        try:
            names = [str(model["id"]) for model in msgspec.json.decode(content)["data"]]
        except (msgspec.DecodeError, LookupError, TypeError) as exc:
            raise LoadFailed(
                f"{self._url}/v1/models has no list of models; pass the address of a frontend"
            ) from exc
        if self._model in names:
            return
        if len(names) != 1:
            raise LoadFailed(
                f"{self._url} serves {', '.join(names) or 'no model'}, not {self._model}; pass one"
                " of its models"
            )
        self._model = names[0]

    async def _ask(self, prompt_tokens: int, output_tokens: int) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": self._random.choices(_IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        await self._send("POST", "/v1/completions", msgspec.json.encode(body))

    async def _send(self, method: str, path: str, content: bytes) -> bytes:
        """Send a request, and return the body of the response."""
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, body = await http_client.request(
                    f"{self._url}{path}",
                    method,
                    content,
                    headers,
                    max_bytes=_MAX_BODY_BYTES,
                    tls=self._tls,
                )
        except (OSError, ValueError) as exc:  # TimeoutError is an OSError
            raise LoadFailed(
                f"{self._url} does not answer ({exc or 'no answer in time'}); pass the address of a"
                " frontend"
            ) from exc
        if status != 200:
            text = body[:300].decode(errors="replace")
            raise LoadFailed(f"{self._url}{path} answers {status}: {text}")
        return body
