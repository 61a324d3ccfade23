"""Measure the CPU time of the output parsers per token, with one token per push.

python -m benchmarks.parser [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.chat_output_parser import ChatOutputParser
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.protocol.messages import TokenIds, token_ids

_WORDS = "The quick brown fox jumps over the lazy dog; naïve 日本語 text and 🧑‍🚀 follow. " * 40
_ARGUMENTS = '{"city": "Łódź", "days": [1, 2, 3], "note": "' + "rain and sun " * 100 + '"}'
_ANALYSIS = "<|channel|>analysis<|message|>"
_NEXT = "<|end|><|start|>assistant"
HARMONY = {
    "reasoning and answer": (
        f"{_ANALYSIS}{_WORDS}{_NEXT}<|channel|>final<|message|>{_WORDS}<|return|>"
    ),
    "one call": (
        "<|channel|>commentary to=functions.get_weather"
        f" <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"
    ),
    "headers only": f"{_ANALYSIS}a{_NEXT}" * 200,
}
_OBJECT = f'{{"name": "get_weather", "arguments": {_ARGUMENTS}}}'
# By name: the tool-call parser, and the text.
OTHERS = {
    "basic and hermes, text": ("hermes", f"<think>{_WORDS}</think>{_WORDS}"),
    "basic and hermes, one call": ("hermes", f"<tool_call>{_OBJECT}</tool_call>"),
    "basic and json, one call": ("json", _OBJECT),
}


def main() -> None:
    """Print a line per parser and text."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.parser",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="repetitions of which medians are shown (default: 7)"
    )
    rounds = parser.parse_args().rounds
    renderer = HarmonyRenderer()
    encoding = o200k_tokenizer.load_tokenizer().harmony
    for name, text in HARMONY.items():
        ids = encoding.encode(text, allowed_special="all")
        pushes = [token_ids([token_id]) for token_id in ids]
        _report(f"harmony, {name}", renderer.chat_parser, pushes, rounds)
    for name, (tool_call_parser, text) in OTHERS.items():
        pushes = [token_ids([token_id]) for token_id in renderer.encode(text)]
        make = functools.partial(_make_parser, renderer, tool_call_parser)
        _report(name, make, pushes, rounds)


def _make_parser(renderer: HarmonyRenderer, tool_call_parser: str) -> OutputParser:
    return ChatOutputParser(
        renderer.text_parser(),
        reasoning_parser="basic",
        tool_call_parser=tool_call_parser,
        forced_ids=token_ids(),
    )


def _report(
    name: str, make: Callable[[], OutputParser], pushes: Sequence[TokenIds], rounds: int
) -> None:
    totals = []
    slowest = []
    for _ in range(rounds):
        parser = make()
        times = []
        for ids in pushes:
            begun_s = time.perf_counter()
            parser.push(ids)
            times.append(time.perf_counter() - begun_s)
        parser.finish()
        totals.append(sum(times) / len(pushes))
        slowest.append(max(times))
    print(
        f"{name:<36} {len(pushes):>6} tokens  {statistics.median(totals) * 1e6:6.2f} us/token  "
        f"slowest push {statistics.median(slowest) * 1e6:6.0f} us"
    )


if __name__ == "__main__":
    main()
