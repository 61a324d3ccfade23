"""Any division of a sequence of tokens into steps gives the same events, for every parser and every
adapter.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import parser as benchmark
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.messages import FinishReason
from tests.kit.step_splits import (
    Case,
    OtherFormat,
    Result,
    chat,
    messages,
    responses,
    served_by,
    text,
)
from tests.unit.frontend.test_event_order import harmony
from tests.unit.frontend.tokenization.test_harmony_parser import STREAMS

LONGEST = 800  # characters of a recorded text
RECORDED = [*(recorded for recorded, _ in STREAMS.values()), *benchmark.HARMONY.values()]
RECORDED_OTHERS = [recorded[-LONGEST:] for _, recorded in benchmark.OTHERS.values()]
RECORDED_OTHERS += [recorded[:LONGEST] for _, recorded in benchmark.OTHERS.values()]
HEADERS = (
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>commentary to=functions.a <|constrain|>json<|message|>",
    " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>commentary to=python<|message|>",
    "<|channel|>analysis to=python code<|message|>",
    " to=browser.search<|channel|>analysis code<|message|>",
    "<|channel|>final no header",
)
BODIES = (
    "I will look. ",
    "STOP",
    "ST",
    "OP",
    '{"x": 1}',
    "é𒀀🧑‍🚀",
    "\n\n",
    " to=a",
    "<think>",
    "",
)
ENDS = (
    "<|end|><|start|>assistant",
    "<|call|><|start|>assistant",
    "<|start|>assistant",
    "<|end|>",
    "",
)
OBJECT = '{"name": "f", "arguments": {"x": [1, "}"]}}'
PIECES = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<",
        "</thi",
        "<tool_",
        " ",
        "\n",
        "word",
    ),
    *(
        "é𒀀",
        "STOP",
        "ST",
        "OP",
        "{",
        "}",
        '"',
        ",",
        "[",
        "]",
        '{"name": "f"',
        ', "arguments": ',
        OBJECT,
    ),
    *(f"<tool_call>\n{OBJECT}\n</tool_call>", "<think>Hm. </think>", f"[{OBJECT}, {OBJECT}]"),
)
STOPS = ((), ("STOP",), ("STOP", "look", "}]"), ("\n\n", "OP"))
REASONING = ("none", "basic", "deepseek_r1")
CALLS = ("none", "hermes", "json")
Adapter = Callable[[ServedModel, Case, Sequence[int]], Result]
ADAPTERS: Sequence[Adapter] = (chat, responses, messages, text)
STEPS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@functools.cache
def served(reasoning: str, calls: str) -> ServedModel:
    """Return a model.

    `gpt_oss` and `harmony` are parsers of Harmony, all others are of chat templates.
    """
    if calls == "harmony":
        return served_by(HarmonyRenderer())
    if reasoning == "gpt_oss":
        return served_by(HarmonyRenderer(reasoning_parser="none", tool_call_parser="none"))
    return served_by(OtherFormat(reasoning=reasoning, calls=calls))


HARMONY = [("gpt_oss", "harmony"), ("gpt_oss", "none")]
OTHERS = [(reasoning, calls) for reasoning in REASONING for calls in CALLS]


@functools.cache
def ids_of(written: str) -> tuple[int, ...]:
    return tuple(harmony().encode(written, allowed_special="all"))


def check_same(model: ServedModel, case: Case, steps: Sequence[int]) -> None:
    for adapter in ADAPTERS:
        assert adapter(model, case, steps) == adapter(model, case, [1])


def cases(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        ids=texts.map(ids_of),
        stop=st.sampled_from(STOPS),
        has_logprobs=st.booleans(),
        has_token_ids=st.booleans(),
        is_one_call=st.booleans(),
        hides_reasoning=st.booleans(),
        finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    )


def message(choose: Callable[[Sequence[str]], str]) -> str:
    return choose(HEADERS) + choose(BODIES) + choose(BODIES) + choose(ENDS)


MESSAGES = st.tuples(*map(st.sampled_from, (HEADERS, BODIES, BODIES, ENDS))).map("".join)
TURNS = st.lists(MESSAGES, max_size=6).map("".join)
SHORT = st.sampled_from([tokens for tokens in RECORDED if len(tokens) < LONGEST])
WRITTEN = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@pytest.mark.parametrize(("reasoning", "calls"), HARMONY)
@settings(max_examples=20)
@given(case=cases(TURNS | SHORT), steps=STEPS)
def test_harmony_results_are_independent_of_step_size(
    reasoning: str, calls: str, case: Case, steps: list[int]
) -> None:
    check_same(served(reasoning, calls), case, steps)


@pytest.mark.parametrize(("reasoning", "calls"), OTHERS)
@settings(max_examples=8)
@given(case=cases(WRITTEN), steps=STEPS)
def test_chat_template_results_are_independent_of_step_size(
    reasoning: str, calls: str, case: Case, steps: list[int]
) -> None:
    check_same(served(reasoning, calls), case, steps)


# --- 10,000 splits --------------------------------------------------------------------------------

SPLITS = 50  # of each sequence
SEQUENCES = 200


def sequences() -> list[tuple[tuple[str, str], str]]:
    """Return recorded and generated texts, each with the parsers that read it."""
    draw = random.Random(4)
    recorded = [(HARMONY[0], tokens[:LONGEST]) for tokens in RECORDED]
    recorded += [(parsers, tokens) for parsers in OTHERS for tokens in RECORDED_OTHERS]
    generated: list[tuple[tuple[str, str], str]] = []
    while len(recorded) + len(generated) < SEQUENCES:
        if len(generated) % 2:
            turn = "".join(message(draw.choice) for _ in range(draw.randint(1, 8)))
            generated.append((draw.choice(HARMONY), turn))
        else:
            generated.append(
                (draw.choice(OTHERS), "".join(draw.choices(PIECES, k=draw.randint(1, 24))))
            )
    return recorded + generated


def random_case(ids: tuple[int, ...], draw: random.Random) -> Case:
    return Case(
        ids,
        stop=draw.choice(STOPS),
        has_logprobs=draw.random() < 0.5,
        has_token_ids=draw.random() < 0.5,
        is_one_call=draw.random() < 0.3,
        hides_reasoning=draw.random() < 0.3,
        finish=draw.choice([FinishReason.STOP, FinishReason.LENGTH]),
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_splits_give_the_same_results() -> None:
    draw = random.Random(5)
    count = 0
    failed = []
    for parsers, written in sequences():
        ids = ids_of(written)
        model = served(*parsers)
        expected: dict[tuple[Case, int], Result] = {}
        options = [random_case(ids, draw) for _ in range(5)]
        for split in range(SPLITS):
            case = draw.choice(options)
            longest = draw.choice([2, 5, 20, 100, len(ids) + 1])
            steps = [draw.randint(1, longest) for _ in range(8)] if split else [len(ids) + 1]
            for number, adapter in enumerate(ADAPTERS):
                if (case, number) not in expected:
                    expected[case, number] = adapter(model, case, [1])
                if adapter(model, case, steps) != expected[case, number]:
                    failed.append((parsers, written, case, steps, number))
            count += 1
    print(f"{count} splits of {len(sequences())} sequences, {len(failed)} that differ")
    assert count == SPLITS * SEQUENCES
    assert not failed
