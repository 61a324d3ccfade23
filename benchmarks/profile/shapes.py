"""What load a benchmark sends: the guides' own shapes and one for a laptop by name, others from a YAML file.

Pure but for reading it.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traffic shape. Every request streams, ignores end tokens and makes exactly `osl` tokens."""

    name: str
    isl: int  # tokens of the prompt, before the chat template
    osl: int
    concurrency: tuple[int, ...]  # swept in this order
    requests: int = 0  # per point; 0: ten times the concurrency
    warmup: int = 0  # requests before the first point counts; 0: as many as the concurrency
    dataset: int = 8000  # different prompts that aiperf makes; the built-in client never repeats one
    seed: int = 100
    gpus: int | None = None  # that the guide's deployment has, for figures per GPU
    extra: dict[str, Any] = {}  # put into every body

    def __post_init__(self) -> None:
        if min(self.isl, self.osl, *(self.concurrency or (0,))) < 1:
            raise ValueError(f"shape {self.name}: isl, osl and every concurrency must be 1 or more")

    def requests_at(self, concurrency: int) -> int:
        return self.requests or 10 * concurrency

    def warmup_at(self, concurrency: int) -> int:
        """Return the requests before those that count, never more than those that do."""
        return min(self.warmup or concurrency, self.requests_at(concurrency))

    def check_fits(self, model: str, longest: int | None) -> None:
        """Raise ValueError if prompt and answer have more tokens than the model takes; None stands for not known."""
        if longest is not None and self.isl + self.osl > longest:
            raise ValueError(
                f"shape {self.name} has {self.isl} + {self.osl} tokens, model {model} takes {longest} at most; "
                "choose another --shape, such as laptop, or serve a model that takes more"
            )


_NVEXT = {"nvext": {"ignore_eos": True}}

# The parameters of the five guides' benchmark commands. GPUs are those that the deployments really have: the guide of
# the Kubernetes targets computes 1,536 streams from six GPUs where five serve.
GUIDES = {
    shape.name: shape
    for shape in (
        Shape(
            name="guide-000", isl=32000, osl=256, concurrency=(256,), requests=6144, warmup=1000, gpus=8, extra=_NVEXT
        ),
        Shape(
            name="guide-001", isl=32000, osl=256, concurrency=(256,), requests=6144, warmup=1000, gpus=8, extra=_NVEXT
        ),
        Shape(
            name="guide-002", isl=1000, osl=2000, concurrency=(2048,), requests=6144, warmup=1000, gpus=8, extra=_NVEXT
        ),
        Shape(name="guide-003-agg", isl=128, osl=1000, concurrency=(3600,), requests=36000, dataset=12800, gpus=4),
        Shape(name="guide-003-disagg", isl=8192, osl=1024, concurrency=(1536,), requests=15360, dataset=12800, gpus=5),
    )
}


# The second concurrency shows what batching gives; all of it ends within a minute on two cores.
LAPTOP = Shape(name="laptop", isl=128, osl=32, concurrency=(1, 4), requests=16, warmup=2)
SHAPES = {LAPTOP.name: LAPTOP} | GUIDES


def shape_of(word: str) -> Shape:
    """A shape by its name, or the one in a YAML file. Raises ValueError that says what to change."""
    if word in SHAPES:
        return SHAPES[word]
    path = Path(word)
    if not path.is_file():
        near = difflib.get_close_matches(word, SHAPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no shape {word!r}: {hint}there are {', '.join(SHAPES)}, or name a YAML file")
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Shape)
    except (msgspec.DecodeError, OSError, ValueError) as exc:
        raise ValueError(f"{path} is no shape: {exc}") from exc
