"""Steps of many tokens: the order of text and calls, and the phase of messages."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.responses_api import response_builder
from dynamo_trtllm.frontend.responses_api.items import normalized, with_ids
from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest
from tests.kit.step_splits import (
    RESPONSE,
    Case,
    OtherFormat,
    chat,
    output,
    responses,
    served_by,
)

NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I will look it up."
CALL = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x":1,"y":"aaaa bbbb"}'
STEPS = pytest.mark.parametrize("steps", [[1], [3], [16], [1000]], ids=str)

harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)


def case(text: str, **options: Any) -> Case:
    return Case(tuple(harmony().encode(text, allowed_special="all")), **options)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return served_by(HarmonyRenderer())


@STEPS
def test_responses_text_after_a_call_keeps_order(served: ServedModel, steps: list[int]) -> None:
    result = responses(served, case(f"{CALL}{NEXT}{FINAL}Done with it.<|return|>"), steps)
    assert output(result) == [
        ("function_call", "a", '{"x":1,"y":"aaaa bbbb"}'),
        ("message", "final_answer", "Done with it."),
    ]


@STEPS
def test_responses_reasoning_after_preamble_keeps_order(
    served: ServedModel, steps: list[int]
) -> None:
    middle = "<|channel|>analysis<|message|>Hm."
    result = responses(served, case(f"{PREAMBLE}{NEXT}{middle}{NEXT}{CALL}<|call|>"), steps)
    assert [part[:2] for part in output(result)] == [
        ("message", "commentary"),
        ("reasoning", None),
        ("function_call", "a"),
    ]


@STEPS
def test_responses_preamble_is_its_own_message(served: ServedModel, steps: list[int]) -> None:
    result = responses(served, case(f'{PREAMBLE}{NEXT}{FINAL}{{"a":1}}<|return|>'), steps)
    assert output(result) == [
        ("message", "commentary", "I will look it up."),
        ("message", "final_answer", '{"a":1}'),
    ]
    names = [event["type"].removeprefix("response.") for event in result["events"]]
    one_item = ["output_item.added", "content_part.added", "output_text.delta"]
    one_item += ["output_text.done", "content_part.done", "output_item.done"]
    assert names == ["created", "in_progress", *one_item, *one_item, "completed"]
    added = [
        event["item"]["phase"] for event in result["events"] if event["type"].endswith("item.added")
    ]
    assert added == ["commentary", "final_answer"]


@STEPS
def test_responses_messages_have_their_own_logprobs(served: ServedModel, steps: list[int]) -> None:
    result = responses(
        served, case(f"{PREAMBLE}{NEXT}{FINAL}Two.<|return|>", has_logprobs=True), steps
    )
    for item in result["events"][-1]["response"]["output"]:
        part = item["content"][0]
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]


@STEPS
def test_responses_text_for_impossible_tool_is_no_answer(
    served: ServedModel, steps: list[int]
) -> None:
    code = "<|channel|>analysis to=functions.a/b code<|message|>print(1)"
    result = responses(served, case(f"{code}{NEXT}{FINAL}1<|return|>"), steps)
    assert output(result) == [
        ("message", "commentary", "print(1)"),
        ("message", "final_answer", "1"),
    ]


def test_responses_without_commentary_have_no_phase() -> None:
    result = responses(served_by(OtherFormat(reasoning="basic")), case("<think>a</think>b"), [1000])
    assert output(result) == [("reasoning", None, "a"), ("message", None, "b")]
    assert "phase" not in result["events"][-1]["response"]["output"][1]


@STEPS
def test_chat_text_after_a_call_keeps_order(served: ServedModel, steps: list[int]) -> None:
    result = chat(served, case(f"{CALL}{NEXT}{FINAL}Done with it.<|return|>"), steps)
    assert result["runs"] == [["call 0", 'a{"x":1,"y":"aaaa bbbb"}'], ["content", "Done with it."]]


@STEPS
def test_chat_preamble_and_answer_are_one_string(served: ServedModel, steps: list[int]) -> None:
    result = chat(served, case(f"{PREAMBLE}{NEXT}{FINAL}Two.<|return|>"), steps)
    assert result["runs"] == [["content", "I will look it up.Two."]]
    assert result["answer"]["choices"][0]["message"]["content"] == "I will look it up.Two."


@STEPS
def test_chat_partial_stop_string_stays_before_the_call(
    served: ServedModel, steps: list[int]
) -> None:
    result = chat(served, case(f"{PREAMBLE} ST{NEXT}{CALL}<|call|>", stop=("STOP",)), steps)
    assert [field for field, _ in result["runs"]] == ["content", "call 0"]
    assert result["runs"][0][1] == "I will look it up. ST"


@STEPS
def test_chat_stop_string_after_a_call_keeps_the_call(
    served: ServedModel, steps: list[int]
) -> None:
    result = chat(
        served, case(f"{CALL}{NEXT}{FINAL}Done. STOP it.<|return|>", stop=(" STOP",)), steps
    )
    assert result["runs"] == [["call 0", 'a{"x":1,"y":"aaaa bbbb"}'], ["content", "Done."]]
    assert result["finish"] == "stop"


@STEPS
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_chat_ended_by_stop_string_counts_no_later_token(
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
    shown = "".join(entry["token"] for entry in result["logprobs"])
    assert shown == ("Done. STOP" if has_logprobs else "")


@STEPS
def test_chat_single_call_keeps_text_before_the_second(
    served: ServedModel, steps: list[int]
) -> None:
    text = f"{CALL}{NEXT}{PREAMBLE}{NEXT}{CALL}{NEXT}{FINAL}Done.<|return|>"
    result = chat(served, case(text, is_one_call=True), steps)
    assert [field for field, _ in result["runs"]] == ["call 0", "content"]
    assert result["finish"] == "tool_calls"


# --- input ----------------------------------------------------------------------------------------

LOOK = {"role": "assistant", "content": "I will look it up.", "phase": "commentary"}
ANSWER = {"role": "assistant", "content": "It is up.", "phase": "final_answer"}
WHY = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Why?"}]}
CALLED = {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "ok"}
START = "<|start|>assistant<|channel|>"
COMMENTARY_PROMPT = f"{START}commentary<|message|>I will look it up.<|end|>"
FINAL_PROMPT = f"{START}final<|message|>It is up.<|end|>"
CALL_PROMPT = f"{START}commentary to=functions.a <|constrain|>json<|message|>{{}}<|call|>"
RESULT_PROMPT = "<|start|>functions.a to=assistant<|channel|>commentary<|message|>ok<|end|>"
REASONING_PROMPT = f"{START}analysis<|message|>Why?<|end|>"


def prompt(served: ServedModel, items: list[dict[str, Any]]) -> str:
    """Return what the prompt has of the items after the first message."""
    given = [{"role": "user", "content": "Is it up?"}, *items]
    body = parse(ResponseRequest, json.dumps({"model": "m", "input": given}).encode())
    normal = [normalized(item) for item in body.input]  # type: ignore[arg-type]
    conversation = response_builder._conversation(body, with_ids(normal, RESPONSE.id))
    text = served.renderer.decode(served.renderer.render(conversation))
    return text.partition("Is it up?<|end|>")[2].removesuffix("<|start|>assistant")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([LOOK, ANSWER], COMMENTARY_PROMPT + FINAL_PROMPT),
        ([LOOK], COMMENTARY_PROMPT),
        ([LOOK, CALLED, RESULT], COMMENTARY_PROMPT + CALL_PROMPT + RESULT_PROMPT),
        ([CALLED, RESULT, ANSWER], CALL_PROMPT + RESULT_PROMPT + FINAL_PROMPT),
        ([CALLED, ANSWER, RESULT], CALL_PROMPT + FINAL_PROMPT + RESULT_PROMPT),
        ([ANSWER, CALLED, RESULT], FINAL_PROMPT + CALL_PROMPT + RESULT_PROMPT),
        ([ANSWER, LOOK], FINAL_PROMPT + COMMENTARY_PROMPT),
        (
            [WHY, LOOK, WHY, CALLED, RESULT],
            (REASONING_PROMPT + COMMENTARY_PROMPT) + REASONING_PROMPT + CALL_PROMPT + RESULT_PROMPT,
        ),
        (
            [WHY, CALLED, RESULT, LOOK],
            REASONING_PROMPT + CALL_PROMPT + RESULT_PROMPT + COMMENTARY_PROMPT,
        ),
        ([WHY, LOOK, ANSWER], COMMENTARY_PROMPT + FINAL_PROMPT),
    ],
    ids=str,
)
def test_input_message_phase_selects_its_channel(
    served: ServedModel, items: list[dict[str, Any]], expected: str
) -> None:
    assert prompt(served, items) == expected


@STEPS
def test_output_sent_back_gives_the_model_messages(served: ServedModel, steps: list[int]) -> None:
    written = f"{PREAMBLE}{NEXT}{CALL}<|call|>"
    result = responses(served, case(written), steps)
    assert (
        prompt(served, result["events"][-1]["response"]["output"]) == f"<|start|>assistant{written}"
    )


def test_input_when_the_phase_is_unknown_then_the_error_names_it() -> None:
    body = {"model": "m", "input": [LOOK | {"phase": "analysis"}]}
    with pytest.raises(InvalidRequest, match=r"input\[0\]\.phase must be"):
        parse(ResponseRequest, json.dumps(body).encode())


def test_input_items_when_they_have_a_phase_then_it_is_stored() -> None:
    body = parse(ResponseRequest, json.dumps({"model": "m", "input": [LOOK, ANSWER]}).encode())
    assert [normalized(item)["phase"] for item in body.input] == ["commentary", "final_answer"]  # type: ignore[arg-type]
