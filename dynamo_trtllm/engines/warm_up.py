"""Compile an engine's kernels before users need them: warm-up requests and passes, and folders of
compiled kernels.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    OutputFormat,
    Sampling,
    StructuredOutput,
    token_ids,
)
from dynamo_trtllm.protocol.streams import Generator, run_stream

log = logging.getLogger(__name__)

_DEADLINE_S = 600.0  # longest time for one request
_SLOWEST = 5  # the number of slowest steps that are logged
# vLLM 0.24.0 samples top-k and top-p with kernels of its own from this number of requests on.
_BATCH = 8
_WARM_UP_SAMPLING = Sampling(max_tokens=3, temperature=1.0, ignore_eos=True)
_JSON = StructuredOutput(alternatives=(OutputFormat(json_schema='{"type": "object"}'),))
# Kinds of requests that clients may send: the name for logs, the number of requests at once, and
# the fields of Sampling that differ from _WARM_UP_SAMPLING.
_VARIANTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("log-probabilities", 1, {"logprobs": 5}),
    ("log-probabilities of a batch", _BATCH, {"logprobs": 5}),
    ("structured output", 1, {"guided": _JSON, "ignore_eos": False}),
    ("a seed", 1, {"seed": 1}),
    ("top-k of a seeded batch", _BATCH, {"top_k": 20, "seed": 1}),
    ("top-p of a seeded batch", _BATCH, {"top_p": 0.9, "seed": 1}),
    ("top-k and top-p of a batch", _BATCH, {"top_k": 20, "top_p": 0.9}),
    ("penalties", 1, {"frequency_penalty": 0.5, "presence_penalty": 0.5}),
)


def cache_folders(root: Path) -> dict[str, str]:
    """Return environment variables with which Triton and FlashInfer store compiled kernels below
    `root`.
    """
    return {
        "TRITON_CACHE_DIR": str(root / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(root / "flashinfer"),
    }


class WarmUpStep(NamedTuple):
    """One part of a warm-up."""

    name: str  # for logs
    run: Callable[[], Awaitable[object]]


class WarmUp:
    """The steps of one warm-up, within a time budget."""

    def __init__(self, budget_s: float) -> None:
        """Initialize a warm-up.

        Args:
            budget_s: no step begins after this time. A running step is not interrupted.
        """
        self._budget_s = budget_s
        self._done = 0
        self._total = 0

    def progress(self) -> str:
        """Describe the current step in a few words; "" when none runs."""
        return f"warming up {self._done + 1}/{self._total}" if self._done < self._total else ""

    async def run(self, steps: Sequence[WarmUpStep]) -> tuple[str, ...]:
        """Run the steps in their order.

        Log and return the names of the steps that did not run or failed.
        """
        began = time.monotonic()
        self._done = 0
        self._total = len(steps)
        failed: list[str] = []
        times: dict[str, float] = {}
        for step in steps:
            step_began = time.monotonic()
            if step_began - began >= self._budget_s:
                break
            try:
                await step.run()
            except DynamoError as exc:
                log.warning("warm-up with %s failed: %s", step.name, exc.message)
                failed.append(step.name)
            times[step.name] = time.monotonic() - step_began
            self._done += 1
        missing = tuple(step.name for step in steps[self._done :])
        self._done = self._total
        if missing:
            log.warning(
                "warm-up stopped after %g s; not reached: %s. The first requests of these kinds may"
                " wait until kernels are compiled; raise --warm-up-budget-s",
                self._budget_s,
                ", ".join(missing),
            )
        if steps:
            slowest = sorted(times, key=times.__getitem__, reverse=True)[:_SLOWEST]
            log.info(
                "warm-up: %d steps in %.1f s; the slowest: %s",
                len(times),
                time.monotonic() - began,
                ", ".join(f"{name} {times[name]:.1f} s" for name in slowest) or "none ran",
            )
        return (*failed, *missing)


def variants(
    engine: Generator, model: str, info: EngineInfo, cache_salt: str | None = None
) -> list[WarmUpStep]:
    """Return a step for each kind of request that the engine supports.

    Args:
        engine: the engine, which accepts requests.
        model: name of the model.
        info: properties of the engine.
        cache_salt: the cache salt of all requests.
    """
    at_once = info.limits.max_batch_size or 1
    steps = []
    for name, count, values in _VARIANTS:
        if not set(info.unsupported_features) & set(values):
            sampling = msgspec.structs.replace(_WARM_UP_SAMPLING, **values)
            run = partial(run_requests, engine, model, sampling, min(count, at_once), cache_salt)
            steps.append(WarmUpStep(name, run))
    return steps


async def run_first_request(
    engine: Generator, model: str, *, max_tokens: int, cache_salt: str | None = None
) -> None:
    """Run one greedy request without a KV transfer to its end. Raises its error."""
    await run_requests(
        engine,
        model,
        Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        1,
        cache_salt,
    )


async def run_requests(
    engine: Generator, model: str, sampling: Sampling, count: int, cache_salt: str | None = None
) -> None:
    """Run equal requests at once, without a KV transfer, to their end.

    If requests fail, the error of one of them is raised.

    Args:
        engine: the engine.
        model: name of the model.
        sampling: parameters of all requests.
        count: number of requests.
        cache_salt: the cache salt of all requests.
    """
    deadline = time.time() + _DEADLINE_S
    calls = (
        GenerateRequest(
            request_id=f"warm-up-{number}",
            model=model,
            token_ids=token_ids([0]),
            sampling=sampling,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        for number in range(count)
    )
    streams = (run_stream(partial(engine.generate, call), lambda _: True) for call in calls)
    ended = await asyncio.gather(*streams, return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error
