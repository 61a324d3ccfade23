"""Send the loads from which a worker learns how long its steps take (`dynamo-trtllm profile`)."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from dynamo_trtllm.support import http_client

# Runs a request with a prompt of these token ids and with this number of output tokens.
Ask: TypeAlias = Callable[[Sequence[int], int], Awaitable[None]]

_IDS: Final = range(1000, 30_000)  # ordinary tokens of every vocabulary
_SEED: Final = 1
_NUM_ALONE: Final = 9  # requests that run alone; the median of their times counts
# The length of the prompts of requests that run alone, as a fraction of a full step. It is the
# shortest length of the loads, because the predicted time of a short step is off by little.
_PART_ALONE: Final = 1 / 64
_TIMEOUT_S: Final = 120.0
_MAX_BODY_BYTES: Final = 1 << 20


class LoadFailed(Exception):
    """A request of a load failed. The message says how, and what to do."""


class _Level(NamedTuple):
    """A load with the same number of requests at any time."""

    weight: float  # how long it takes, relative to the other levels
    concurrency: int
    parts: Sequence[float]  # lengths of the prompts, as fractions of a full step
    output_tokens: tuple[int, int]  # the least and the most output tokens of a request


_ALL_PARTS: Final = (1 / 64, 1 / 16, 1 / 4, 1.0)
_SHORT: Final = (16, 128)
_LONG: Final = (256, 256)
# Two kinds of levels separate what the time of a step depends on:
# With short answers, most steps compute prompts.
# With long answers to prompts of one length, requests begin together, so that most steps only
# decode. There are such levels with short and with long contexts.
# Engines round the size of a batch up to 1, 2, 4, 8, 16, 24 ... requests (CUDA graphs). The numbers
# of requests here are between these sizes, so that the fit is right on average.
# No prompt has 1,024 or 4,096 tokens in a step of 8,192. These are the sizes of the largest CUDA
# graphs, by default in vLLM and in this project, and the time of a step jumps there.
_LEVELS: Final = (
    _Level(12, 252, (1 / 64, 1 / 32), _SHORT),
    _Level(9, 124, (1 / 64,), _LONG),
    _Level(13, 60, (1 / 4,), _LONG),
    _Level(14, 60, _ALL_PARTS, _SHORT),
    _Level(16, 28, (1.0,), _LONG),
    _Level(10, 20, (1 / 64,), _LONG),
    _Level(12, 12, (1.0,), _LONG),
    _Level(12, 12, _ALL_PARTS, _SHORT),
    _Level(10, 6, (1 / 4, 1.0), _LONG),
    _Level(14, 3, _ALL_PARTS, _SHORT),
    _Level(8, 2, (1 / 64, 1.0), _LONG),
    _Level(20, 1, _ALL_PARTS, _SHORT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """Requests that ran one at a time, with one output token each."""

    prompt_tokens: int
    seconds: float  # the median of their times


class ProfileLoads:
    """The loads of one profile. Prompts are random token ids.

    Args:
        ask: runs a request.
        step_tokens: the most prompt tokens of a step.
        clock: returns seconds of a monotonic clock.
    """

    def __init__(
        self, ask: Ask, step_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._step_tokens = step_tokens
        self._clock = clock
        self._random = random.Random(_SEED)

    async def run(self, seconds: float) -> None:
        """Send all loads.

        Args:
            seconds: how long they take together.

        Raises:
            LoadFailed: a request failed.
        """
        total_weight = sum(level.weight for level in _LEVELS)
        for level in _LEVELS:
            await self._run_level(level, seconds * level.weight / total_weight)

    async def alone(self) -> Alone:
        """Return how long requests take that run alone.

        Raises:
            LoadFailed: a request failed.
        """
        prompt_tokens = max(1, int(_PART_ALONE * self._step_tokens))
        times_s: list[float] = []
        for _ in range(_NUM_ALONE):
            begun_s = self._clock()
            await self._ask(self._prompt(prompt_tokens), 1)
            times_s.append(self._clock() - begun_s)
        return Alone(prompt_tokens=prompt_tokens, seconds=median(times_s))

    async def _run_level(self, level: _Level, seconds: float) -> None:
        """Keep requests running for some seconds, and cancel those that run at the end."""
        lengths = [max(1, int(part * self._step_tokens)) for part in level.parts]

        async def send_one_after_another() -> None:
            while True:
                prompt = self._prompt(self._random.choice(lengths))
                await self._ask(prompt, self._random.randint(*level.output_tokens))

        senders = [asyncio.create_task(send_one_after_another()) for _ in range(level.concurrency)]
        try:
            done, _ = await asyncio.wait(
                senders, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)
        for sender in done:
            sender.result()  # a sender ends only with an error, which this raises

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(_IDS, k=num_tokens)


class FrontendRequests:
    """Requests to a frontend, whose answers are not streamed.

    Args:
        url: address of the frontend.
        headers: sent with each request.
        tls: decides which https:// servers are trusted. See `http_client.connect`.
    """

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._url = url
        self._headers = headers
        self._tls = tls
        self._model = ""

    async def use_model(self, name: str) -> str:
        """Send requests to the model of this name, or to the only model of the frontend.

        Return the name of the chosen model.

        Raises:
            LoadFailed: the frontend has several models and none of this name, or no model.
        """
        content = await self._send("GET", "/v1/models", b"")
        try:
            names = [str(model["id"]) for model in msgspec.json.decode(content)["data"]]
        except (msgspec.DecodeError, LookupError, TypeError) as exc:
            raise LoadFailed(
                f"{self._url}/v1/models has no list of models; pass the address of a frontend"
            ) from exc
        if name in names:
            self._model = name
        elif len(names) == 1:
            (self._model,) = names
        else:
            raise LoadFailed(
                f"{self._url} serves {', '.join(names) or 'no model'}, not {name}; pass one of its"
                " models"
            )
        return self._model

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> None:
        """Run a request until its end.

        Raises:
            LoadFailed: the request failed.
        """
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
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
