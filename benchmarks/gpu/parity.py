"""Do a prefill and a decode worker say what one worker says? Greedy answers beside those of an aggregated deployment.

Sums in bf16 depend on the other requests of a batch, and with dummy weights the best tokens are nearly equal. Under
load, answers of equal engines therefore differ. So the aggregated deployment gets every prompt twice, and is compared
with itself as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from benchmarks.gpu import tokens
from benchmarks.gpu.result import Row
from benchmarks.gpu.steps import Found, Sizes

Texts: TypeAlias = Mapping[int, str | None]  # by prompt; None: an error


@dataclass(frozen=True, slots=True)
class Answers:
    """What a deployment has said to the parity prompts."""

    alone: Texts = field(default_factory=dict)
    under_load: Texts = field(default_factory=dict)


class Reference(NamedTuple):
    """The aggregated deployment's, asked twice."""

    wanted: Answers
    again: Answers


def _given(sizes: Sizes) -> list[tokens.Prompt]:
    return tokens.prompts_between(sizes.parity_prompts, sizes.shortest, sizes.longest, sizes.seed)


async def answers(url: str, sizes: Sizes) -> Answers:
    """One at a time, then many at once."""
    return Answers(await _texts(url, sizes, 1), await _texts(url, sizes, sizes.parity_concurrency))


async def reference(url: str, sizes: Sizes) -> Reference:
    """Of the aggregated deployment."""
    return Reference(await answers(url, sizes), await answers(url, sizes))


async def _texts(url: str, sizes: Sizes, concurrency: int) -> Texts:
    asked: dict[str, Any] = {"osl": sizes.parity_osl, "concurrency": concurrency, "keep_text": True}
    return tokens.texts(await tokens.send(url, _given(sizes), extra=tokens.GREEDY, **asked))


async def parity(url: str, reference: Reference, sizes: Sizes) -> Found:
    """The disaggregated deployment's answers beside the aggregated one's."""
    wanted, again = reference
    found = await answers(url, sizes)
    lengths = [len(prompt) for prompt in _given(sizes)]
    return rows(reference, found, sizes.parity_concurrency), {
        "alone": parted(found.alone, wanted.alone, lengths),
        "aggregated alone": parted(again.alone, wanted.alone, lengths),
        "under load": parted(found.under_load, wanted.under_load, lengths),
        "aggregated under load": parted(again.under_load, wanted.under_load, lengths),
        "different answers": _kinds(wanted.alone),
    }


def rows(reference: Reference, found: Answers, concurrency: int) -> list[Row]:
    """Equal answers, and how much of one is the same before the first difference."""
    wanted, again = reference
    itself = equal(again.under_load, wanted.under_load)
    return [
        Row(
            what="greedy answers, one at a time: disaggregated equals aggregated",
            value=f"{_agreement(found.alone, wanted.alone)} ({_kinds(wanted.alone)} different answers)",
            bar="all",
            met=equal(found.alone, wanted.alone) == len(wanted.alone),
        ),
        Row(what="one at a time: aggregated equals itself", value=_agreement(again.alone, wanted.alone)),
        Row(
            what=f"the same at {concurrency} at once: disaggregated equals aggregated",
            value=_agreement(found.under_load, wanted.under_load),
            bar="not below aggregated against itself",
            met=equal(found.under_load, wanted.under_load) >= itself,
        ),
        Row(
            what=f"at {concurrency} at once: aggregated equals itself",
            value=_agreement(again.under_load, wanted.under_load),
        ),
    ]


def equal(found: Texts, wanted: Texts) -> int:
    """Answers that are the same; an error equals nothing."""
    return sum(text is not None and found.get(number) == text for number, text in wanted.items())


def _kinds(found: Texts) -> int:
    return len({text for text in found.values() if text})


def _agreement(found: Texts, wanted: Texts) -> str:
    same = statistics.fmean(common(found.get(number), text) for number, text in wanted.items())
    return f"{equal(found, wanted)} of {len(wanted)}; {same:.0%} of a text before the first difference"


def common(one: str | None, other: str | None) -> float:
    """The share of the longer text that both begin with; 0 where one is an error."""
    if one is None or other is None:
        return 0.0
    longest = max(len(one), len(other))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same) / longest if longest else 1.0


def parted(found: Texts, wanted: Texts, lengths: list[int]) -> list[dict[str, Any]]:
    """The answers that differ: of how long a prompt, and how much of them is the same."""
    return [
        {"prompt_tokens": lengths[(number - 1) % len(lengths)], "common": round(common(found.get(number), text), 3)}
        for number, text in sorted(wanted.items())
        if text is None or found.get(number) != text
    ]
