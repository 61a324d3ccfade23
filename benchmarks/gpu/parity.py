"""Compares greedy answers of a disaggregated deployment with those of an aggregated deployment.

Sums in bf16 depend on the batch, and with dummy weights the best tokens are nearly equal. Under
load, answers of identical engines therefore differ. For this reason the aggregated deployment gets
every prompt twice and is compared with itself as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from . import tokens
from .result import Row
from .scenario import ScenarioResult, Sizes

Texts: TypeAlias = Mapping[int, str | None]  # by prompt; None: an error


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a deployment to the parity prompts."""

    alone: Texts = field(default_factory=dict)
    under_load: Texts = field(default_factory=dict)


class Reference(NamedTuple):
    """Two sets of answers of the aggregated deployment."""

    wanted: Answers
    again: Answers


def _prompts(sizes: Sizes) -> list[tokens.Prompt]:
    return tokens.prompts_between(sizes.parity_prompts, sizes.shortest, sizes.longest, sizes.seed)


async def answers(url: str, sizes: Sizes) -> Answers:
    """Send the prompts one at a time, then concurrently."""
    return Answers(await _texts(url, sizes, 1), await _texts(url, sizes, sizes.parity_concurrency))


async def reference(url: str, sizes: Sizes) -> Reference:
    """Send the prompts to the aggregated deployment twice."""
    return Reference(await answers(url, sizes), await answers(url, sizes))


async def _texts(url: str, sizes: Sizes, concurrency: int) -> Texts:
    options: dict[str, Any] = {
        "osl": sizes.parity_osl,
        "concurrency": concurrency,
        "keep_text": True,
    }
    return tokens.texts(await tokens.send(url, _prompts(sizes), extra=tokens.GREEDY, **options))


async def parity(url: str, reference: Reference, sizes: Sizes) -> ScenarioResult:
    """Compare the answers of the disaggregated deployment with the reference."""
    wanted, again = reference
    actual = await answers(url, sizes)
    lengths = [len(prompt) for prompt in _prompts(sizes)]
    return rows(reference, actual, sizes.parity_concurrency), {
        "alone": differences(actual.alone, wanted.alone, lengths),
        "aggregated alone": differences(again.alone, wanted.alone, lengths),
        "under load": differences(actual.under_load, wanted.under_load, lengths),
        "aggregated under load": differences(again.under_load, wanted.under_load, lengths),
        "different answers": _kinds(wanted.alone),
    }


def rows(reference: Reference, actual: Answers, concurrency: int) -> list[Row]:
    """Return the number of equal answers, and the share of text before the first difference."""
    wanted, again = reference
    itself = equal(again.under_load, wanted.under_load)
    return [
        Row(
            what="greedy answers, one at a time: disaggregated equals aggregated",
            value=(
                f"{_agreement(actual.alone, wanted.alone)} ({_kinds(wanted.alone)} different"
                " answers)"
            ),
            bar="all",
            met=equal(actual.alone, wanted.alone) == len(wanted.alone),
        ),
        Row(
            what="one at a time: aggregated equals itself",
            value=_agreement(again.alone, wanted.alone),
        ),
        Row(
            what=f"the same at {concurrency} at once: disaggregated equals aggregated",
            value=_agreement(actual.under_load, wanted.under_load),
            bar="not below aggregated against itself",
            met=equal(actual.under_load, wanted.under_load) >= itself,
        ),
        Row(
            what=f"at {concurrency} at once: aggregated equals itself",
            value=_agreement(again.under_load, wanted.under_load),
        ),
    ]


def equal(actual: Texts, wanted: Texts) -> int:
    """Return the number of equal answers. Errors are never equal."""
    return sum(text is not None and actual.get(number) == text for number, text in wanted.items())


def _kinds(actual: Texts) -> int:
    return len({text for text in actual.values() if text})


def _agreement(actual: Texts, wanted: Texts) -> str:
    same = statistics.fmean(
        common_prefix_share(actual.get(number), text) for number, text in wanted.items()
    )
    return (
        f"{equal(actual, wanted)} of {len(wanted)}; {same:.0%} of a text before the first"
        " difference"
    )


def common_prefix_share(one: str | None, other: str | None) -> float:
    """Return the length of the common prefix as a share of the longer text. 0 if one is an
    error.
    """
    if one is None or other is None:
        return 0.0
    longest = max(len(one), len(other))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same) / longest if longest else 1.0


def differences(actual: Texts, wanted: Texts, lengths: list[int]) -> list[dict[str, Any]]:
    """Return prompt length and common prefix of each pair of answers that differ."""
    return [
        {
            "prompt_tokens": lengths[(number - 1) % len(lengths)],
            "common": round(common_prefix_share(actual.get(number), text), 3),
        }
        for number, text in sorted(wanted.items())
        if text is None or actual.get(number) != text
    ]
