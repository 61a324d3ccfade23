"""The measured loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load."""

    name: str
    pace_s: float  # step time of the engines; 0: engines without delay
    streams: int
    requests: int
    isl: int = 128
    osl: int = 256
    fresh: bool = False  # open a connection for every request
    idle_s: float = 0.0  # above 0: measure open streams without tokens for this long
    pairs: int = 1  # number of prefill and decode workers
    clients: int = 1  # client processes

    def shared(self, sides: int) -> Point:
        """Return the part of this load that each of some sides gets, so that they all have it."""
        return replace(
            self,
            streams=max(1, self.streams // sides),
            requests=max(1, self.requests // sides),
        )


STEP_S = 0.0057  # step time of Dynamo's mock engine at its default speed
# step time of the decode engine for idle streams, which get the first token only
IDLE_STEP_S = 60.0

POINTS = (
    Point(name="paced-1", pace_s=STEP_S, streams=1, requests=6),
    Point(name="paced-32", pace_s=STEP_S, streams=32, requests=128),
    Point(name="paced-128", pace_s=STEP_S, streams=128, requests=384),
    Point(name="paced-256", pace_s=STEP_S, streams=256, requests=768),
    Point(name="burst-1", pace_s=0.0, streams=1, requests=64),
    Point(name="burst-32", pace_s=0.0, streams=32, requests=1024),
    Point(name="burst-256", pace_s=0.0, streams=256, requests=1536),
    Point(name="burst-1024", pace_s=0.0, streams=1024, requests=2048),
    Point(name="long-32", pace_s=0.0, streams=32, requests=384, isl=8192, osl=64),
    Point(name="start-32", pace_s=0.0, streams=32, requests=3000, osl=2),
    Point(name="churn-32", pace_s=0.0, streams=32, requests=1500, osl=8, fresh=True),
    Point(name="crowd-1024", pace_s=0.002, streams=1024, requests=4096, pairs=4),
    Point(name="scale-2048", pace_s=0.002, streams=2048, requests=8192, pairs=8, clients=8),
    Point(name="slow-1024", pace_s=0.040, streams=1024, requests=2048),
    Point(name="slow-3600", pace_s=0.058, streams=3600, requests=3600, clients=4),
    Point(name="idle-1000", pace_s=IDLE_STEP_S, streams=1000, requests=1000, osl=8, idle_s=10.0),
)
COMPARED = (
    "paced-1",
    "paced-32",
    "paced-128",
    "paced-256",
    "burst-1",
    "burst-32",
    "burst-256",
    "long-32",
)
_QUICK = ("paced-32", "paced-128", "burst-1", "burst-32", "long-32")
_QUICK_SHARE = 0.34


def select(names: Iterable[str], *, quick: bool) -> list[Point]:
    """Return the points with these names, or all.

    With `quick`, fewer points and requests. Raise KeyError.
    """
    by_name = {point.name: point for point in POINTS}
    chosen = [by_name[name] for name in names] or [
        p for p in POINTS if not quick or p.name in _QUICK
    ]
    if not quick:
        return chosen
    return [replace(p, requests=max(p.streams, int(p.requests * _QUICK_SHARE))) for p in chosen]


class Engines(NamedTuple):
    """Step time and number of the worker pairs of a point."""

    pace_s: float
    pairs: int = 1


def by_engines(points: Iterable[Point]) -> Iterator[tuple[Engines, list[Point]]]:
    """Yield the points grouped by engines, so that each group needs one start."""
    groups: dict[Engines, list[Point]] = {}
    for point in points:
        groups.setdefault(Engines(point.pace_s, point.pairs), []).append(point)
    yield from groups.items()
