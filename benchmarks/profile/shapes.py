"""Traffic shapes: those of the Dynamo gpt-oss-120b guides, one for a laptop, and others from YAML
files.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traffic shape.

    Every request streams, ignores end tokens and has exactly `osl` output tokens.
    """

    name: str
    isl: int  # tokens of the prompt, before the chat template
    osl: int
    concurrency: tuple[int, ...]  # one point each, in this order
    requests: int = 0  # per point; 0: ten times the concurrency
    warmup: int = 0  # requests per point before the measured ones; 0: as many as the concurrency
    # number of different prompts with aiperf; the built-in client never repeats one
    dataset: int = 8000
    seed: int = 100
    gpus: int | None = None  # GPUs of the guide's deployment, for figures per GPU
    extra: dict[str, Any] = {}  # added to every body

    def __post_init__(self) -> None:
        if min(self.isl, self.osl, *(self.concurrency or (0,))) < 1:
            raise ValueError(f"shape {self.name}: isl, osl and every concurrency must be 1 or more")

    def requests_at(self, concurrency: int) -> int:
        """Return the number of measured requests."""
        return self.requests or 10 * concurrency

    def warmup_at(self, concurrency: int) -> int:
        """Return the number of requests before the measured ones, at most as many as those."""
        return min(self.warmup or concurrency, self.requests_at(concurrency))

    def check_fits(self, model: str, longest: int | None) -> None:
        """Raise ValueError if prompt and answer exceed the context length `longest`.

        None: unknown.
        """
        if longest is not None and self.isl + self.osl > longest:
            raise ValueError(
                f"shape {self.name} has {self.isl} + {self.osl} tokens, model {model} takes"
                f" {longest} at most; choose another --shape, such as laptop, or serve a model with"
                " a longer context"
            )


_NVEXT = {"nvext": {"ignore_eos": True}}

# The parameters of the benchmark commands in the five guides. `gpus` counts the GPUs that the
# deployments really have: the guide for Kubernetes computes 1,536 streams from six GPUs, but its
# deployment has five.
GUIDES = {
    shape.name: shape
    for shape in (
        Shape(
            name="guide-000",
            isl=32000,
            osl=256,
            concurrency=(256,),
            requests=6144,
            warmup=1000,
            gpus=8,
            extra=_NVEXT,
        ),
        Shape(
            name="guide-001",
            isl=32000,
            osl=256,
            concurrency=(256,),
            requests=6144,
            warmup=1000,
            gpus=8,
            extra=_NVEXT,
        ),
        Shape(
            name="guide-002",
            isl=1000,
            osl=2000,
            concurrency=(2048,),
            requests=6144,
            warmup=1000,
            gpus=8,
            extra=_NVEXT,
        ),
        Shape(
            name="guide-003-agg",
            isl=128,
            osl=1000,
            concurrency=(3600,),
            requests=36000,
            dataset=12800,
            gpus=4,
        ),
        Shape(
            name="guide-003-disagg",
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
