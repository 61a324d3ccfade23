"""Requests that end each worker which runs them, by several stand-in causes, and how many workers
they end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request

import orjson

from ..credentials import direct_opener
from .context import FaultContext
from .deployment import Deployment, NotReady
from .stand_in.sitecustomize import KV_READ, LAST_STEP, TRIGGER

MAX_DEATHS = 2
_CODE = "query_of_death"
_STATUS = 422
_NUM_TOKENS = 100
# of a request: the third one is rejected even if innocent requests were charged with it before
_MAX_REPEATS = 3
RESTARTED_S = 300.0  # the torch engine loads for minutes on a busy machine
_READY = re.compile(r"^launch\s*\| (\S+) is ready after")
_ENDED = re.compile(r"^launch\s*\| (\S+) (?:was killed|exited)")


class Case(NamedTuple):
    """How a request ends its workers: the parts of the trigger of `stand_in`."""

    cause: str
    phase: str
    point: str


CASES = (
    Case("segmentation-fault", "prefill", "0"),
    Case("abort", "decode", "0"),
    Case("out-of-memory", "decode", "4"),
    Case("exit", "decode", "1"),
    Case("system-exit", "decode", "0"),
    Case("engine-failed", "decode", "4"),
    Case("segmentation-fault", "prefill", KV_READ),
)
LATE_CASES = (
    Case("abort", "decode", "20"),
    Case("exit", "any", LAST_STEP),
)


class Answer(NamedTuple):
    """The end of a deadly request. `is_rejected`: no worker ran it."""

    status: int
    code: str
    is_rejected: bool


async def apply(cases: Sequence[Case], context: FaultContext) -> None:
    """Send each deadly request again and again, until it is rejected.

    Raises:
        NotReady: one of them ended another number of workers than two, did not end with its named
            error, or is still not rejected.
    """
    for number, case in enumerate(cases):
        expected = len(deaths(context.deployment.lines))
        for _ in range(_MAX_REPEATS):
            answer = await asyncio.to_thread(_send, context, case, number)
            if (answer.status, answer.code) != (_STATUS, _CODE):
                raise NotReady(
                    f"a deadly request ({case}) ended with {answer}, not with {_STATUS} {_CODE}"
                )
            if answer.is_rejected:
                break
            expected += MAX_DEATHS
            await _wait_for_deaths(context.deployment, expected)
            await asyncio.to_thread(context.deployment.wait_ready, RESTARTED_S)
        else:
            raise NotReady(
                f"a deadly request ({case}) ran {_MAX_REPEATS} times and is still not rejected"
            )
        ended = deaths(context.deployment.lines)
        if len(ended) != expected:
            raise NotReady(
                f"{len(ended)} workers ended and not {expected} after a deadly request ({case}):"
                f" {'; '.join(ended)}"
            )


async def _wait_for_deaths(deployment: Deployment, count: int) -> None:
    """Wait a bounded time until so many processes have ended: a worker whose engine failed drains
    first.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(RESTARTED_S):
            while len(deaths(deployment.lines)) < count:  # noqa: ASYNC110  # counted in another thread
                await asyncio.sleep(0.1)


def deaths(lines: Sequence[str]) -> list[str]:
    """Return the lines of the launcher's log about processes that ended while they were ready.

    A process that ended while it started had run no request.
    """
    ready: set[str] = set()
    ended = []
    for line in list(lines):  # the log grows in another thread
        if match := _READY.match(line):
            ready.add(match[1])
        elif (match := _ENDED.match(line)) and match[1] in ready:
            ready.remove(match[1])
            ended.append(line)
    return ended


def _send(context: FaultContext, case: Case, number: int) -> Answer:
    """Send a request with the trigger of the stand-in."""
    body = {
        "model": context.deployment.options.model,
        "prompt": f"End your worker by {case.cause}, number {number}.",
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {
        "Content-Type": "application/json",
        "X-Session-ID": ":".join((TRIGGER, *case)),
    }
    request = Request(f"{context.deployment.url}/v1/completions", orjson.dumps(body), headers)
    try:
        with direct_opener().open(request, None, context.hung_s) as answer:
            return Answer(answer.status, "", is_rejected=False)
    except HTTPError as exc:
        with exc:
            error = orjson.loads(exc.read())["error"]
        return Answer(exc.code, error["code"], is_rejected="it is rejected" in error["message"])
