"""Requests that end each worker which runs them, by several stand-in causes, and how many workers they end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import orjson

from .context import FaultContext
from .deployment import Deployment, NotReady
from .stand_in.sitecustomize import TRIGGER

MOST_DEATHS = 2
_CODE = "query_of_death"
_STATUS = 422
_NUM_TOKENS = 100
_RESTARTED_S = 90.0  # the torch engine loads for tens of seconds on a busy machine
_ENDED = re.compile(r"^launch\s*\| \S+ (?:was killed|exited)")


class Case(NamedTuple):
    """A cause of `stand_in`, the phase of the call that it ends, and the tokens that this call returns before."""

    cause: str
    phase: str
    num_tokens: int


CASES = (
    Case("segmentation-fault", "prefill", 0),
    Case("abort", "decode", 0),
    Case("out-of-memory", "decode", 4),
    Case("exit", "decode", 1),
    Case("engine-failed", "decode", 4),
)


async def apply(cases: Sequence[Case], context: FaultContext) -> None:
    """Send a deadly request per case, and each one again.

    Raises:
        NotReady: one of them ended another number of workers than two, or did not end with its named error.
    """
    for number, case in enumerate(cases):
        before = _num_deaths(context.deployment)
        for is_repeated in (False, True):
            status, code = await asyncio.to_thread(_send, context, case, number)
            if (status, code) != (_STATUS, _CODE):
                raise NotReady(f"a deadly request ({case}) ended with {status} {code}, not with {_STATUS} {_CODE}")
            if not is_repeated:
                await _wait_for_deaths(context.deployment, before + MOST_DEATHS)
                await asyncio.to_thread(context.deployment.wait_ready, _RESTARTED_S)
        deaths = _num_deaths(context.deployment) - before
        if deaths != MOST_DEATHS:
            raise NotReady(f"a deadly request ({case}) ended {deaths} workers, not {MOST_DEATHS}")


async def _wait_for_deaths(deployment: Deployment, count: int) -> None:
    """Wait a bounded time until so many processes have ended: a worker whose engine failed drains first."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_RESTARTED_S):
            while _num_deaths(deployment) < count:  # noqa: ASYNC110  # counted in another thread
                await asyncio.sleep(0.1)


def _num_deaths(deployment: Deployment) -> int:
    """Return how many processes of the deployment have ended."""
    return sum(_ENDED.match(line) is not None for line in deployment.lines)


def _send(context: FaultContext, case: Case, number: int) -> tuple[int, str]:
    """Send a request with the trigger of the stand-in. Return its status and the code of its error."""
    body = {
        "model": context.deployment.options.model,
        "prompt": f"End your worker by {case.cause}, number {number}.",
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {
        "Content-Type": "application/json",
        "X-Session-ID": f"{TRIGGER}:{case.cause}:{case.phase}:{case.num_tokens}",
    }
    request = Request(f"{context.deployment.url}/v1/completions", orjson.dumps(body), headers)
    try:
        with urlopen(request, timeout=context.hung_s) as answer:
            return answer.status, ""
    except HTTPError as exc:
        with exc:
            return exc.code, orjson.loads(exc.read())["error"]["code"]
