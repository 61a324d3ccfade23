"""Traffic shapes: those of the Dynamo gpt-oss-120b guides, one for a laptop, and others from YAML
files.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

import msgspec

from ..arguments import LONGEST_S

MAX_REQUESTS = 10_000_000  # of a point; the results of all are kept in memory


class Level(msgspec.Struct, frozen=True, order=True):
    """How hard one point presses: a number of concurrent requests, or a rate of requests."""

    concurrency: int = 0  # requests that are always active; 0: `request_rate` says how many
    request_rate: float = 0.0  # requests per second, at random times, however fast answers come

    @property
    def value(self) -> float:
        """Return the number that is not 0."""
        return self.concurrency or self.request_rate

    def __str__(self) -> str:
        if self.concurrency:
            return f"concurrency {self.concurrency}"
        return f"{self.request_rate:g} requests/s"


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traffic shape.

    Every request streams, ignores end tokens and has exactly `osl` output tokens. There is one
    point for each concurrency, or one for each rate of requests, in this order.
    """

    name: str
    isl: int  # tokens of the prompt, before the chat template
    osl: int
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()  # requests per second
    requests: int = 0  # per point; 0: ten times the concurrency, or one minute at the rate
    # requests per point before the measured ones; 0: as many as the concurrency, or one second
    warmup: int = 0
    # number of different prompts with aiperf; the built-in client never repeats one
    dataset: int = 8000
    seed: int = 100
    gpus: int | None = None  # GPUs of the guide's deployment, for figures per GPU
    extra: dict[str, Any] = {}  # added to every body

    def __post_init__(self) -> None:
        if min(self.isl, self.osl, *(self.concurrency or (1,))) < 1:
            raise ValueError(f"shape {self.name}: isl, osl and every concurrency must be 1 or more")
        if not all(0 < rate < math.inf for rate in self.request_rate):
            raise ValueError(f"shape {self.name}: every request_rate must be above 0")
        if bool(self.concurrency) == bool(self.request_rate):
            raise ValueError(
                f"shape {self.name} needs one or more values of either concurrency or request_rate"
            )
        for level in self.levels:
            self._check_size(level)

    def _check_size(self, level: Level) -> None:
        """Raise ValueError if a point would not end within a day, or exceed the memory."""
        # A minute of a rate near the largest float is infinite.
        if level.request_rate > MAX_REQUESTS or self.requests_at(level) > MAX_REQUESTS:
            raise ValueError(
                f"shape {self.name}: {level} has more than {MAX_REQUESTS} requests; choose a"
                " smaller --num-prompts, --concurrency or --request-rate"
            )
        if level.request_rate and self.requests_at(level) / level.request_rate > LONGEST_S:
            raise ValueError(
                f"shape {self.name}: {self.requests_at(level)} requests at {level} take more than"
                " a day; choose a higher --request-rate or a smaller --num-prompts"
            )

    @property
    def levels(self) -> list[Level]:
        """Return the load of each point."""
        return [
            *(Level(concurrency=number) for number in self.concurrency),
            *(Level(request_rate=rate) for rate in self.request_rate),
        ]

    @property
    def level_name(self) -> str:
        """Return what the levels are numbers of."""
        return "concurrency" if self.concurrency else "request_rate"

    def requests_at(self, level: Level) -> int:
        """Return the number of measured requests."""
        return self.requests or 10 * level.concurrency or math.ceil(_RATE_S * level.request_rate)

    def warmup_at(self, level: Level) -> int:
        """Return the number of requests before the measured ones, at most as many as those."""
        wanted = self.warmup or level.concurrency or math.ceil(level.request_rate)
        return min(wanted, self.requests_at(level))

    def check_fits(self, model: str, longest: int | None) -> None:
        """Raise ValueError if prompt and answer exceed the context length `longest`.

        None: unknown.
        """
        if longest is not None and self.isl + self.osl > longest:
            raise ValueError(
                f"shape {self.name} has {self.isl} + {self.osl} tokens, model {model} takes"
                f" {longest} at most; choose a smaller --isl or --osl, another --shape, such as"
                " laptop, or serve a model with a longer context"
            )


_RATE_S = 60  # seconds of requests at a rate
_NVEXT = {"nvext": {"ignore_eos": True}}

# The parameters of the benchmark commands in the five guides. `gpus` counts the GPUs that the
# deployments really have: the guide for Kubernetes computes 1,536 streams from six GPUs, but its
# deployment has five.
GUIDES = {
    shape.name: shape
    for shape in (
        # guides 000 and 001
        Shape(
            name="prompts-32k",
            isl=32000,
            osl=256,
            concurrency=(256,),
            requests=6144,
            warmup=1000,
            gpus=8,
            extra=_NVEXT,
        ),
        # guide 002
        Shape(
            name="answers-2k",
            isl=1000,
            osl=2000,
            concurrency=(2048,),
            requests=6144,
            warmup=1000,
            gpus=8,
            extra=_NVEXT,
        ),
        # guide 003, aggregated
        Shape(
            name="answers-1k",
            isl=128,
            osl=1000,
            concurrency=(3600,),
            requests=36000,
            dataset=12800,
            gpus=4,
        ),
        # guide 003, prefill and decode on separate GPUs
        Shape(
            name="prompts-8k",
            isl=8192,
            osl=1024,
            concurrency=(1536,),
            requests=15360,
            dataset=12800,
            gpus=5,
        ),
    )
}


# The second concurrency shows the effect of batching. Both take less than a minute on two cores.
LAPTOP = Shape(name="laptop", isl=128, osl=32, concurrency=(1, 4), requests=16, warmup=2)
SHAPES = {LAPTOP.name: LAPTOP} | GUIDES


def find_shape(name: str) -> Shape:
    """Return the shape with this name, or from this YAML file.

    Raise ValueError if there is none.
    """
    if name in SHAPES:
        return SHAPES[name]
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, SHAPES, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(f"no shape {name!r}. {hint}Pass {', '.join(SHAPES)}, or a YAML file.")
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Shape)
    except (msgspec.DecodeError, OSError, ValueError) as exc:
        raise ValueError(f"{path} has no valid shape: {exc}") from exc
