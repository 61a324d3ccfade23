"""What a request comes down to: choices, prompts, samplings, and refusals in the API's words."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import orjson
import pytest

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.api.sampling import SamplingFields
from dynamo_trtllm.frontend.requests import preprocess
from dynamo_trtllm.frontend.requests.completions import CHAT
from dynamo_trtllm.frontend.requests.conversation import GenerationOptions
from dynamo_trtllm.frontend.requests.preprocess import prepare_conversation
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import (
    ContextTooLong,
    InvalidRequest,
    RequestError,
    UnsupportedParameter,
)
from dynamo_trtllm.protocol.messages import Sampling, SamplingDefaults
from tests.kit.cases import each_case
from tests.kit.generation_plans import (
    TIME,
    WEATHER,
    TemplateModels,
    chat,
    prompt,
    refusing,
    text,
)

# --- choices --------------------------------------------------------------------------------------


def test_one_choice_then_the_request_keeps_its_id_and_seed(harmony: ServedModel) -> None:
    (choice,) = chat(harmony, seed=7, max_tokens=5).choices
    assert (choice.request.request_id, choice.request.sampling.seed, choice.request.deadline) == (
        "id",
        7,
        5.0,
    )
    assert choice.request.sampling.max_tokens == 5


def test_n_choices_then_each_has_its_id_its_seed_and_its_parser(harmony: ServedModel) -> None:
    plan = chat(harmony, n=3, seed=(1 << 63) - 2)
    assert [choice.request.request_id for choice in plan.choices] == ["id-0", "id-1", "id-2"]
    assert [choice.request.sampling.seed for choice in plan.choices] == [
        (1 << 63) - 2,
        (1 << 63) - 1,
        -(1 << 63),
    ]
    parsers = [choice.make_parser() for choice in plan.choices]
    assert len({id(parser) for parser in parsers}) == 3
    assert (plan.candidates, plan.keep) == (3, 3)
    assert {choice.request.sampling.seed for choice in chat(harmony, n=3).choices} == {None}


CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_many_choices_take_little_memory_while_they_wait(harmony: ServedModel) -> None:
    """A thousand requests may wait for their permits, with 128 choices each."""

    def waiting(n: int) -> object:
        body = parse(ChatRequest, orjson.dumps(CHAT_BODY | {"n": n}))
        plan = chat(harmony, n=n)
        return plan, CHAT.builder(ResponseMeta(id="", model="m", created=0), body, plan)

    def size(n: int) -> int:
        waiting(n)  # fills caches
        before, _ = tracemalloc.get_traced_memory()
        request = waiting(n)
        after, _ = tracemalloc.get_traced_memory()
        del request
        return after - before

    tracemalloc.start()
    try:
        assert (size(128) - size(1)) / 127 < 600
    finally:
        tracemalloc.stop()


def test_choices_with_too_long_prompts_are_rejected_by_n(
    harmony: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "MAX_PROMPT_TOKENS", 8)
    assert len(text(harmony, prompt=[5, 6], n=4).choices) == 4
    with pytest.raises(
        InvalidRequest, match="the prompts of 5 choices have 10 tokens together; at most 8"
    ) as caught:
        text(harmony, prompt=[5, 6], n=5)
    assert caught.value.field == "n"


def test_best_of_candidates_follow_the_prompt_order(harmony: ServedModel) -> None:
    plan = text(harmony, prompt=["a", [5, 6]], n=2, best_of=3, seed=1)
    assert [harmony.renderer.decode(choice.request.token_ids) for choice in plan.choices[:3]] == [
        "a"
    ] * 3
    assert [list(choice.request.token_ids) for choice in plan.choices[3:]] == [[5, 6]] * 3
    assert [choice.request.request_id for choice in plan.choices] == [
        f"id-{index}" for index in range(6)
    ]
    assert [choice.request.sampling.seed for choice in plan.choices] == [1, 2, 3, 4, 5, 6]
    assert (plan.candidates, plan.keep) == (3, 2)
    assert {
        (choice.request.sampling.logprobs, choice.shows_logprobs) for choice in plan.choices
    } == {(0, False)}


def test_best_of_with_logprobs_then_the_client_sees_its_own(harmony: ServedModel) -> None:
    choice, _ = text(harmony, best_of=2, logprobs=3).choices
    assert (choice.request.sampling.logprobs, choice.shows_logprobs) == (3, True)
    (choice,) = text(harmony).choices
    assert choice.request.sampling.logprobs is None


def test_echo_then_each_choice_begins_with_its_prompt(harmony: ServedModel) -> None:
    ids = list(harmony.renderer.encode("two words"))
    plan = text(harmony, prompt=["one", ids], n=2, echo=True)
    assert [choice.echo for choice in plan.choices] == ["one", "one", "two words", "two words"]
    assert [choice.echo for choice in text(harmony).choices] == [""]


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [chat, text])
def test_top_k_is_limited_to_the_vocabulary(harmony: ServedModel, make: Any) -> None:
    # an engine's 64 signed bits do not hold it
    (choice,) = make(harmony, top_k=(1 << 64) - 1).choices
    assert choice.request.sampling.top_k == harmony.card.vocab_size


@pytest.mark.parametrize(("asked", "taken"), [(1e-46, 0.0), (1e-9, 0.0), (1e-3, 1e-3)])
def test_temperature_too_small_is_greedy(harmony: ServedModel, asked: float, taken: float) -> None:
    (choice,) = chat(harmony, temperature=asked).choices
    assert choice.request.sampling.temperature == taken


@pytest.mark.parametrize("make", [chat, text])
def test_sampling_defaults_fill_missing_fields(harmony: ServedModel, make: Any) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=-1, top_p=0.9, repetition_penalty=1.1)
    served = ServedModel(
        msgspec.structs.replace(harmony.card, sampling_defaults=defaults), harmony.renderer
    )
    (choice,) = make(served, top_p=1.0, temperature=None).choices
    found = choice.request.sampling
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (
        0.6,
        0,
        1.0,
        1.1,
    )
    (choice,) = make(served, temperature=1, repetition_penalty=1.0).choices
    assert (choice.request.sampling.temperature, choice.request.sampling.repetition_penalty) == (
        1.0,
        1.0,
    )


def test_all_sampling_fields_then_they_reach_the_engine(harmony: ServedModel) -> None:
    fields: dict[str, Any] = {
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "repetition_penalty": 1.1,
        "seed": 4,
        "logit_bias": {"5": -100, "201087": 1.5},
        "stop_token_ids": [42],
        "logprobs": True,
        "top_logprobs": 2,
    }
    (choice,) = chat(harmony, stop="x", cache_salt="s", **fields).choices
    assert choice.request.sampling == Sampling(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (201087, 1.5)),
        seed=4,
        stop_token_ids=(42, 200002, 200012),
        logprobs=2,
    )
    assert (choice.options.stop, choice.request.cache_salt) == (("x",), "s")
    assert choice.hidden_token_ids == {42}


def test_ignore_eos_omits_the_stops_of_the_format(harmony: ServedModel) -> None:
    for fields in ({"ignore_eos": True}, {"nvext": {"ignore_eos": True}}):
        (choice,) = chat(harmony, **fields).choices
        assert choice.request.sampling.ignore_eos
        assert choice.request.sampling.stop_token_ids == ()
    (choice,) = chat(harmony, nvext={"cache_salt": "t"}).choices
    assert choice.request.cache_salt == "t"


def test_max_tokens_default_is_rest_for_chat_else_sixteen(harmony: ServedModel) -> None:
    (choice,) = chat(harmony).choices
    assert choice.request.sampling.max_tokens == 2000 - len(choice.request.token_ids)
    assert text(harmony).choices[0].request.sampling.max_tokens == 16


@each_case(
    ("fields", "param"),
    [
        ({"logit_bias": {"201088": 1}}, "logit_bias"),
        ({"stop_token_ids": [1, 201088]}, "stop_token_ids"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_value_that_does_not_fit_the_model_then_named(
    harmony: ServedModel, fields: Any, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        chat(harmony, **fields)
    assert refused.value.field == param
    assert isinstance(refused.value, InvalidRequest | ContextTooLong)


def test_messages_that_give_no_token_are_named(make_template: TemplateModels) -> None:
    served = make_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="makes an empty prompt of the messages") as refused:
        chat(served, messages=[{"role": "user", "content": ""}])
    assert refused.value.field == "messages"
    assert len(chat(served, messages=[{"role": "user", "content": "hi"}]).choices) == 1


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("min_p", {"min_p": 0.1}, "min_p"),
    ("frequency_penalty", {"frequency_penalty": 0.1}, "frequency_penalty"),
    ("logit_bias", {"logit_bias": {"1": 1}}, "logit_bias"),
    ("logprobs", {"logprobs": True}, "logprobs"),
    ("seed", {"seed": 0}, "seed"),
    ("stop_token_ids", {"stop_token_ids": [3]}, "stop_token_ids"),
    ("cache_salt", {"cache_salt": "s"}, "cache_salt"),
    ("guided", {"response_format": {"type": "json_object"}}, "response_format"),
    ("guided", {"tools": [WEATHER, TIME], "tool_choice": "required"}, "tool_choice"),
]


@each_case(("refused", "fields", "param"), REFUSALS)
def test_field_rejected_by_engine_uses_the_api_name(
    harmony: ServedModel, refused: str, fields: dict[str, Any], param: str
) -> None:
    served = refusing(harmony, refused, "resumed_tokens")
    with pytest.raises(UnsupportedParameter, match=f"{param} is not supported by m: ") as raised:
        chat(served, **fields)
    assert raised.value.field == param
    assert chat(served).choices
    assert chat(harmony, **fields).choices


def test_best_of_when_the_engine_has_no_logprobs_then_refused(harmony: ServedModel) -> None:
    served = refusing(harmony, "logprobs")
    with pytest.raises(UnsupportedParameter) as refused:
        text(served, best_of=2)
    assert refused.value.field == "best_of"
    assert len(text(served, n=2, best_of=2).choices) == 2


# --- messages -------------------------------------------------------------------------------------


def test_user_name_in_harmony_then_the_model_sees_it(harmony: ServedModel) -> None:
    shown = prompt(
        chat(harmony, messages=[{"role": "user", "name": "alice", "content": "hi"}]), harmony
    )
    assert "<|start|>user:alice<|message|>hi<|end|>" in shown


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_name_hidden_from_the_prompt_is_listed(harmony: ServedModel, role: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": "hi"}]
    plan = chat(harmony, messages=[messages[0], messages[1] | {"name": "alice"}])
    assert prompt(plan, harmony) == prompt(chat(harmony, messages=messages), harmony)
    assert plan.ignored == ("name",)


def tool_turns(call_id: str, name: str) -> list[dict[str, Any]]:
    """Return a call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "1"},
    ]


def test_name_of_a_tools_result_then_it_must_be_that_of_the_call(harmony: ServedModel) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    assert chat(harmony, messages=[*turns, result | {"name": "get_time"}]).choices[
        0
    ].request.token_ids == (chat(harmony, messages=[*turns, result]).choices[0].request.token_ids)
    with pytest.raises(InvalidRequest) as refused:
        chat(harmony, messages=[*turns, result | {"name": "other"}])
    assert refused.value.field == "messages[2].name"


def test_template_sees_the_name_of_the_called_function(make_template: TemplateModels) -> None:
    """Some templates write the name of a tool result, and some clients do not send it."""
    served = make_template(
        "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}, *tool_turns("c", "f"), *tool_turns("d", "g")]
    shown = prompt(chat(served, messages=messages), served)
    assert "tool f: 1\n" in shown
    assert "tool g: 1\n" in shown
    messages[2]["name"] = "f"
    assert prompt(chat(served, messages=messages), served) == shown
    assert chat(make_template(), messages=messages).ignored == ()


def test_call_id_of_an_earlier_turn_then_the_latest_call_counts(harmony: ServedModel) -> None:
    messages = [{"role": "user", "content": "x"}, *tool_turns("c", "f"), *tool_turns("c", "g")]
    nameless = chat(harmony, messages=messages).choices[0].request.token_ids
    messages[2]["name"] = "f"
    messages[4]["name"] = "g"
    assert chat(harmony, messages=messages).choices[0].request.token_ids == nameless
    messages[2]["name"] = "g"
    with pytest.raises(InvalidRequest, match="the called function is 'f'"):
        chat(harmony, messages=messages)


@pytest.mark.parametrize("field", ["chat_template_args", "chat_template_kwargs"])
def test_unused_template_argument_is_listed(
    harmony: ServedModel, make_template: TemplateModels, field: str
) -> None:
    fields = {field: {"mood": "good", "enable_thinking": False}}
    plan = chat(harmony, **fields)
    assert prompt(plan, harmony) == prompt(chat(harmony), harmony)
    assert plan.ignored == (f"{field}.mood", f"{field}.enable_thinking")
    assert chat(make_template(), **fields).ignored == (f"{field}.mood",)


def test_chat_template_treats_developer_as_system(make_template: TemplateModels) -> None:
    served = make_template()
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    plan = chat(
        served, messages=messages, tools=[TIME], chat_template_kwargs={"enable_thinking": True}
    )
    shown = prompt(plan, served)
    assert "get_time" in shown
    assert shown.endswith("system: be brief\nuser: hi\nthink")
    assert chat(served, messages=[{"role": "user", "name": "alice", "content": "hi"}]).ignored == (
        "name",
    )
    with pytest.raises(UnsupportedParameter) as refused:
        chat(served, reasoning_effort="high")
    assert refused.value.field == "reasoning_effort"
    with pytest.raises(UnsupportedParameter, match=r"^tools is not supported"):
        chat(make_template("{% for m in messages %}{{ m.content }}{% endfor %}"), tools=[TIME])


def test_conversation_of_another_api_then_errors_use_its_names(harmony: ServedModel) -> None:
    names = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
    }
    cases = [
        (Message(role="user", content="word " * 3000), "medium", 0, "input"),
        (Message(role="user", content="x"), "medium", 2000, "max_output_tokens"),
        (Message(role="user", content="x"), "none", 0, "reasoning.effort"),
        (Message(role="tool", content="x"), "medium", 0, "input"),
    ]
    call = SamplingFields.model_validate({"model": "m"}).call("id", 5.0, "")
    for message, effort, budget, field in cases:
        conversation = Conversation(messages=(message,), reasoning_effort=effort)
        with pytest.raises(RequestError) as refused:
            prepare_conversation(
                conversation,
                GenerationOptions(sampling=Sampling(max_tokens=budget), names=names),
                harmony,
                call,
            )
        assert refused.value.field == field
        assert "reasoning_effort" not in refused.value.message
