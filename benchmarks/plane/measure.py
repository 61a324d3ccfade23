"""Measures a point with a load client for each side, and the CPU time of all other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

import orjson
import psutil

from dynamo_trtllm.support.subprocesses import spawn

from .. import client
from ..summary import LoadSummary
from . import idle
from .points import Point
from .stack import MODEL, NotReady, Stack

_MAX_WARMUP = 256
_TIMEOUT_S = 300.0


class Run(TypedDict):
    """One measurement of one side."""

    point: str
    side: str
    repetition: int
    load_average: float  # of the minute before
    others_cores: float  # CPU cores used by processes other than this side and its client
    events_per_text_token: float  # without the framing tokens of an answer
    figures: LoadSummary


def run(point: Point, stacks: Sequence[Stack], repetition: int) -> list[Run]:
    """Measure a point on some sides at the same time.

    Args:
        point: the load of each side.
        stacks: the sides.
        repetition: number of the measurement.

    Raises:
        NotReady: a client failed.
    """
    load_average = os.getloadavg()[0]
    begun_s = time.monotonic()
    busy_s = busy_seconds()
    figures = _figures(point, stacks)
    wall_s = time.monotonic() - begun_s
    busy_s = busy_seconds() - busy_s
    known_s = sum(_known_seconds(of_side, wall_s) for of_side in figures)
    return [
        {
            "point": point.name,
            "side": stack.name,
            "repetition": repetition,
            "load_average": load_average,
            "others_cores": max(0.0, busy_s - known_s) / wall_s,
            "events_per_text_token": of_side["events_per_token"]
            * point.osl
            / (point.osl - stack.framing_tokens),
            "figures": of_side,
        }
        for stack, of_side in zip(stacks, figures, strict=True)
    ]


def _known_seconds(figures: LoadSummary, wall_s: float) -> float:
    """Return the CPU time of a side and its client during a measurement of `wall_s`."""
    known_s = sum(spent["cpu_s"] for spent in figures["processes"].values())
    # wall_s includes the warm-up and the figures do not; assumes the same CPU use per second
    return known_s * wall_s / figures["wall_s"]


def arguments(point: Point, url: str, pids: Mapping[str, int]) -> Sequence[str]:
    """Return the arguments for the load client, or for the client of idle streams."""
    if point.idle_s:
        words = [idle.__name__, "--streams", str(point.streams), "--seconds", str(point.idle_s)]
    else:
        words = [
            client.__name__,
            "--json",
            "--concurrency",
            str(point.streams),
            "--requests",
            str(point.requests),
        ]
        words += ["--warmup", str(max(4, min(point.streams, _MAX_WARMUP))), "--timeout-s", "200"]
        words += ["--isl", str(point.isl), "--osl", str(point.osl)]
        words += ["--processes", str(point.clients)]
        words += ["--fresh-connections"] if point.fresh else []
    words += ["--url", url, "--model", MODEL]
    return [
        "-m",
        *words,
        *(word for name, pid in pids.items() for word in ("--pid", f"{name}={pid}")),
    ]


def _figures(point: Point, stacks: Sequence[Stack]) -> list[LoadSummary]:
    """Start the client of each side, and return what they measured."""
    clients: list[subprocess.Popen[bytes]] = []
    try:
        for stack in stacks:
            argv = [sys.executable, *arguments(point, stack.url, stack.pids)]
            pipe = subprocess.PIPE
            clients.append(spawn(argv, env=stack.client_env, stdout=pipe, stderr=pipe))
        return [
            _summary(point, stack, client) for stack, client in zip(stacks, clients, strict=True)
        ]
    finally:
        for client in clients:
            client.kill()
            client.wait()


def _summary(point: Point, stack: Stack, client: subprocess.Popen[bytes]) -> LoadSummary:
    """Wait for the end of a client, and return its output."""
    try:
        output, errors = client.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as exc:
        raise NotReady(f"{stack.name}, {point.name}: not measured within {_TIMEOUT_S:g} s") from exc
    if not output:
        raise NotReady(
            f"{stack.name}, {point.name}: the client failed\n{errors.decode(errors='replace')}"
        )
    found: LoadSummary = orjson.loads(output)
    return found


def busy_seconds() -> float:
    """Return the CPU time of all processes of this machine since its start."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
