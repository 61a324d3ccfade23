"""Steps of many tokens: the order of text and calls, and the phase of messages."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from dynamo_trtllm.tokenization import vocabulary
from dynamo_trtllm.tokenization.base import ServedModel
from dynamo_trtllm.tokenization.harmony import HarmonyRenderer
from tests.unit.frontend.split_helpers import Case, OtherFormat, chat, output, responses, served_by

NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look it up."
CALL = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x":1,"y":"aaaa bbbb"}'
STEPS = pytest.mark.parametrize("steps", [[1], [3], [16], [1000]], ids=str)

harmony = functools.cache(lambda: vocabulary.load_tokenizer().harmony)


def case(text: str, **options: Any) -> Case:
    return Case(tuple(harmony().encode(text, allowed_special="all")), **options)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_by(HarmonyRenderer())


@STEPS
def test_responses_when_text_follows_a_call_then_items_are_in_that_order(served: ServedModel, steps: list[int]) -> None:
    result = responses(served, case(f"{CALL}{NEXT}{FINAL}Done with it.<|return|>"), steps)
    assert output(result) == [
        ("function_call", "a", '{"x":1,"y":"aaaa bbbb"}'),
        ("message", "final_answer", "Done with it."),
    ]


@STEPS
def test_responses_when_reasoning_follows_a_preamble_then_items_are_in_that_order(
    served: ServedModel, steps: list[int]
) -> None:
    middle = "<|channel|>analysis<|message|>Hm."
    result = responses(served, case(f"{PREAMBLE}{NEXT}{middle}{NEXT}{CALL}<|call|>"), steps)
    assert [each[:2] for each in output(result)] == [
        ("message", "commentary"),
        ("reasoning", None),
        ("function_call", "a"),
    ]


@STEPS
def test_responses_when_there_is_a_preamble_then_it_is_a_message_of_its_own(
    served: ServedModel, steps: list[int]
) -> None:
    result = responses(served, case(f'{PREAMBLE}{NEXT}{FINAL}{{"a":1}}<|return|>'), steps)
    assert output(result) == [
        ("message", "commentary", "I will look it up."),
        ("message", "final_answer", '{"a":1}'),
    ]
    names = [event["type"].removeprefix("response.") for event in result["events"]]
    one_item = ["output_item.added", "content_part.added", "output_text.delta"]
    one_item += ["output_text.done", "content_part.done", "output_item.done"]
    assert names == ["created", "in_progress", *one_item, *one_item, "completed"]
    added = [each["item"]["phase"] for each in result["events"] if each["type"].endswith("item.added")]
    assert added == ["commentary", "final_answer"]


@STEPS
def test_responses_when_messages_have_logprobs_then_each_has_its_own(served: ServedModel, steps: list[int]) -> None:
    result = responses(served, case(f"{PREAMBLE}{NEXT}{FINAL}Two.<|return|>", has_logprobs=True), steps)
    for item in result["events"][-1]["response"]["output"]:
        part = item["content"][0]
        assert "".join(each["token"] for each in part["logprobs"]) == part["text"]


def test_responses_when_the_format_marks_no_commentary_then_messages_have_no_phase() -> None:
    result = responses(served_by(OtherFormat(reasoning="basic")), case("<think>a</think>b"), [1000])
    assert output(result) == [("reasoning", None, "a"), ("message", None, "b")]
    assert "phase" not in result["events"][-1]["response"]["output"][1]


@STEPS
def test_chat_when_text_follows_a_call_then_events_are_in_that_order(served: ServedModel, steps: list[int]) -> None:
    result = chat(served, case(f"{CALL}{NEXT}{FINAL}Done with it.<|return|>"), steps)
    assert result["runs"] == [["call 0", 'a{"x":1,"y":"aaaa bbbb"}'], ["content", "Done with it."]]


@STEPS
def test_chat_when_there_is_a_preamble_then_content_is_one_string(served: ServedModel, steps: list[int]) -> None:
    result = chat(served, case(f"{PREAMBLE}{NEXT}{FINAL}Two.<|return|>"), steps)
    assert result["runs"] == [["content", "I will look it up.Two."]]
    assert result["answer"]["choices"][0]["message"]["content"] == "I will look it up.Two."


@STEPS
def test_chat_when_text_ends_like_a_stop_string_then_it_does_not_move_behind_the_call(
    served: ServedModel, steps: list[int]
) -> None:
    result = chat(served, case(f"{PREAMBLE} ST{NEXT}{CALL}<|call|>", stop=("STOP",)), steps)
    assert [field for field, _ in result["runs"]] == ["content", "call 0"]
    assert result["runs"][0][1] == "I will look it up. ST"


@STEPS
def test_chat_when_a_stop_string_follows_a_call_then_the_call_stays(served: ServedModel, steps: list[int]) -> None:
    result = chat(served, case(f"{CALL}{NEXT}{FINAL}Done. STOP it.<|return|>", stop=(" STOP",)), steps)
    assert result["runs"] == [["call 0", 'a{"x":1,"y":"aaaa bbbb"}'], ["content", "Done."]]
    assert result["finish"] == "stop"


@STEPS
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_chat_when_a_stop_string_ends_it_then_no_later_token_counts(
    served: ServedModel, steps: list[int], has_logprobs: bool
) -> None:
    options = {"stop": (" STOP",), "has_token_ids": True, "has_logprobs": has_logprobs}
    more = f"<|channel|>analysis<|message|>Why?{NEXT}{FINAL}"
    made = case(f"{more}Done. STOP it.{NEXT}{more}<|return|>", **options)
    result = chat(served, made, steps)
    used = harmony().encode(f"{more}Done. STOP", allowed_special="all")
    assert result["token_ids"] == used
    assert result["usage"].completion_tokens == len(used)
    assert result["usage"].reasoning_tokens == 2
    shown = "".join(each["token"] for each in result["logprobs"])
    assert shown == ("Done. STOP" if has_logprobs else "")


@STEPS
def test_chat_when_only_one_call_is_allowed_then_text_before_the_second_stays(
    served: ServedModel, steps: list[int]
) -> None:
    text = f"{CALL}{NEXT}{PREAMBLE}{NEXT}{CALL}{NEXT}{FINAL}Done.<|return|>"
    result = chat(served, case(text, is_one_call=True), steps)
    assert [field for field, _ in result["runs"]] == ["call 0", "content"]
    assert result["finish"] == "tool_calls"
