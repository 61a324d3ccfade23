"""What a request comes down to: prompts, samplings, forced and guided forms, and refusals in the API's words."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import msgspec
import orjson
import pytest

from dynamo_trtllm.errors import ContextTooLong, InvalidRequest, RequestError, UnsupportedParameter
from dynamo_trtllm.frontend.models import ServedModel
from dynamo_trtllm.frontend.options import Options
from dynamo_trtllm.frontend.preprocess import Identity, Plan, prepare_chat, prepare_conversation, prepare_text
from dynamo_trtllm.messages import Conversation, Guided, GuidedAlternative, Message, ModelCard, Sampling
from dynamo_trtllm.openai.chat import ChatRequest
from dynamo_trtllm.openai.completions import CompletionRequest
from dynamo_trtllm.openai.wire import parse
from dynamo_trtllm.render.harmony import HarmonyRenderer
from dynamo_trtllm.render.template import ChatTemplateRenderer
from tests.small_tokenizer import CONTROL, write_tokenizer

CARD = ModelCard(name="m", context_length=2000, vocab_size=201088, eos_token_ids=(200002, 200012), renderer="harmony")
IDENTITY = Identity(request_id="id", deadline=5.0)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
HEADER = "<|channel|>commentary to=functions."
REST = " <|constrain|>json<|message|>"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}think{% endif %}"
)


@pytest.fixture(scope="module")
def harmony() -> ServedModel:
    return ServedModel(CARD, HarmonyRenderer(today=lambda: date(2026, 1, 2)))


@pytest.fixture(scope="module")
def make_template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer")).read_bytes()

    def make(template: str = TEMPLATE, **parsers: str) -> ServedModel:
        config = json.dumps({"chat_template": template}).encode()
        files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
        stops = (CONTROL["<|end|>"],)
        card = msgspec.structs.replace(CARD, renderer="chat_template", vocab_size=320, eos_token_ids=stops, **parsers)
        return ServedModel(card, ChatTemplateRenderer(files, stop_token_ids=stops, **parsers))

    return make


def chat(served: ServedModel, **fields: Any) -> Plan:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return prepare_chat(parse(ChatRequest, orjson.dumps(body)), served, IDENTITY)


def text(served: ServedModel, **fields: Any) -> Plan:
    body = {"model": "m", "prompt": "hi"} | fields
    return prepare_text(parse(CompletionRequest, orjson.dumps(body)), served, IDENTITY)


def refusing(served: ServedModel, *fields: str) -> ServedModel:
    return ServedModel(msgspec.structs.replace(served.card, refuses=fields), served.renderer)


def prompt(plan: Plan, served: ServedModel) -> str:
    return served.renderer.decode(plan.choices[0].request.token_ids)


# --- choices -------------------------------------------------------------------------------------------


def test_one_choice_then_the_request_keeps_its_id_and_seed(harmony: ServedModel) -> None:
    (choice,) = chat(harmony, seed=7, max_tokens=5).choices
    assert (choice.request.request_id, choice.request.sampling.seed, choice.request.deadline) == ("id", 7, 5.0)
    assert choice.request.sampling.max_tokens == 5


def test_n_choices_then_each_has_its_id_its_seed_and_its_parser(harmony: ServedModel) -> None:
    plan = chat(harmony, n=3, seed=(1 << 63) - 2)
    assert [choice.request.request_id for choice in plan.choices] == ["id-0", "id-1", "id-2"]
    assert [choice.request.sampling.seed for choice in plan.choices] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
    assert len({id(choice.parser) for choice in plan.choices}) == 3
    assert (plan.candidates, plan.keep) == (3, 3)
    assert {choice.request.sampling.seed for choice in chat(harmony, n=3).choices} == {None}


def test_several_prompts_with_best_of_then_candidates_in_the_order_of_the_prompts(harmony: ServedModel) -> None:
    plan = text(harmony, prompt=["a", [5, 6]], n=2, best_of=3, seed=1)
    assert [harmony.renderer.decode(choice.request.token_ids) for choice in plan.choices[:3]] == ["a"] * 3
    assert [list(choice.request.token_ids) for choice in plan.choices[3:]] == [[5, 6]] * 3
    assert [choice.request.request_id for choice in plan.choices] == [f"id-{index}" for index in range(6)]
    assert [choice.request.sampling.seed for choice in plan.choices] == [1, 2, 3, 4, 5, 6]
    assert (plan.candidates, plan.keep) == (3, 2)
    assert {(choice.request.sampling.logprobs, choice.shows_logprobs) for choice in plan.choices} == {(0, False)}


def test_best_of_with_logprobs_then_the_client_sees_its_own(harmony: ServedModel) -> None:
    (choice, _) = text(harmony, best_of=2, logprobs=3).choices
    assert (choice.request.sampling.logprobs, choice.shows_logprobs) == (3, True)
    (choice,) = text(harmony).choices
    assert choice.request.sampling.logprobs is None


def test_echo_then_each_choice_begins_with_its_prompt(harmony: ServedModel) -> None:
    ids = list(harmony.renderer.encode("two words"))
    plan = text(harmony, prompt=["one", ids], n=2, echo=True)
    assert [choice.echo for choice in plan.choices] == ["one", "one", "two words", "two words"]
    assert [choice.echo for choice in text(harmony).choices] == [""]


# --- sampling ------------------------------------------------------------------------------------------


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
    assert (choice.stop, choice.request.cache_salt) == (("x",), "s")
    assert choice.hidden_token_ids == {42}


def test_ignore_eos_in_either_place_then_the_formats_stops_are_left_out(harmony: ServedModel) -> None:
    for fields in ({"ignore_eos": True}, {"nvext": {"ignore_eos": True}}):
        (choice,) = chat(harmony, **fields).choices
        assert choice.request.sampling.ignore_eos
        assert choice.request.sampling.stop_token_ids == ()
    (choice,) = chat(harmony, nvext={"cache_salt": "t"}).choices
    assert choice.request.cache_salt == "t"


def test_no_max_tokens_then_chat_takes_the_rest_of_the_context_and_completions_sixteen(harmony: ServedModel) -> None:
    (choice,) = chat(harmony).choices
    assert choice.request.sampling.max_tokens == 2000 - len(choice.request.token_ids)
    assert text(harmony).choices[0].request.sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"201088": 1}}, "logit_bias"),
        ({"stop_token_ids": [1, 201088]}, "stop_token_ids"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"reasoning_effort": "xhigh"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_args.enable_thinking"),
    ],
)
def test_value_that_does_not_fit_the_model_then_named(harmony: ServedModel, fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(harmony, **fields)
    assert refused.value.field == param
    assert isinstance(refused.value, InvalidRequest | ContextTooLong)


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


@pytest.mark.parametrize(("refused", "fields", "param"), REFUSALS)
def test_field_that_the_engine_refuses_then_refused_by_the_apis_name_and_only_when_set(
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


# --- tools and forms -----------------------------------------------------------------------------------


def test_tool_choice_named_then_the_calls_header_is_forced_and_told_to_the_parser(harmony: ServedModel) -> None:
    plan = chat(harmony, tools=[WEATHER, TIME], tool_choice=NAMED)
    assert prompt(plan, harmony).endswith(f"<|start|>assistant{HEADER}get_weather{REST}")
    (choice,) = plan.choices
    assert choice.request.sampling.guided == Guided(alternatives=(GuidedAlternative(json_schema="{}"),))
    delta = choice.parser.push(harmony.renderer.encode('{"city": "Bern"}'))
    (call,) = delta.tool_calls
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Bern"}')


def test_tool_choice_required_with_one_tool_then_as_if_named(harmony: ServedModel) -> None:
    named = chat(harmony, tools=[WEATHER], tool_choice=NAMED)
    assert chat(harmony, tools=[WEATHER], tool_choice="required").choices[0].request == named.choices[0].request


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_one_call_when_nothing_can_be_guided_then_its_header_is_forced_all_the_same(
    harmony: ServedModel, choice: Any
) -> None:
    plans = [chat(refusing(harmony, "guided"), tools=[WEATHER], tool_choice=choice)]
    plans.append(chat(harmony, tools=[WEATHER], tool_choice=choice, min_tokens=1))
    plans.append(chat(harmony, tools=[WEATHER], tool_choice=choice, ignore_eos=True))
    for plan in plans:
        assert plan.choices[0].request.sampling.guided is None
        assert prompt(plan, harmony).endswith(f"{HEADER}get_weather{REST}")


def test_tool_choice_required_with_several_then_the_name_is_guided(harmony: ServedModel) -> None:
    plan = chat(harmony, tools=[WEATHER, TIME], tool_choice="required")
    assert prompt(plan, harmony).endswith(f"<|start|>assistant{HEADER}")
    (choice,) = plan.choices
    guided = choice.request.sampling.guided
    assert guided is not None
    assert (guided.after, list(guided.after_ids)) == ("", [])
    assert [(each.literal, json.loads(each.json_schema)) for each in guided.alternatives] == [
        (f"get_weather{REST}", CITY),
        (f"get_time{REST}", {"type": "object"}),
    ]
    header = harmony.renderer.call_header("get_time")
    assert header is not None
    delta = choice.parser.push(harmony.renderer.encode("get_time") + header[-4:])
    assert [call.name for call in delta.tool_calls] == ["get_time"]


def test_tool_choice_none_and_allowed_tools_then_the_model_is_told_of_those_only(harmony: ServedModel) -> None:
    assert "get_weather" not in prompt(chat(harmony, tools=[WEATHER, TIME], tool_choice="none"), harmony)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    shown = prompt(chat(harmony, tools=[WEATHER, TIME], tool_choice=allowed), harmony)
    assert "get_time" not in shown
    assert shown.endswith(f"{HEADER}get_weather{REST}")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": NAMED},
        {"tool_choice": NAMED, "tools": [TIME]},
        {"tool_choice": "required"},
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
        {
            "tools": [TIME],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        },
    ],
)
def test_tool_choice_among_tools_that_are_not_there_then_invalid(harmony: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(harmony, **fields)
    assert refused.value.field == "tool_choice"


def test_strict_tool_then_guided_where_a_call_is_demanded_and_refused_elsewhere(harmony: ServedModel) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    (choice,) = chat(harmony, tools=[strict], tool_choice=NAMED).choices
    guided = choice.request.sampling.guided
    assert guided is not None
    assert guided.alternatives == (GuidedAlternative(json_schema=json.dumps(CITY)),)
    with pytest.raises(UnsupportedParameter, match=r"^tools\.strict"):
        chat(harmony, tools=[strict])


def test_parallel_tool_calls_false_then_one_call_at_most(harmony: ServedModel) -> None:
    assert chat(harmony, tools=[TIME], parallel_tool_calls=False).choices[0].max_tool_calls == 1
    assert chat(harmony, tools=[TIME]).choices[0].max_tool_calls is None


@pytest.mark.parametrize(("form", "schema"), [({"type": "json_object"}, {}), (FORMAT, CITY)])
def test_response_format_then_guided_after_the_final_channel(harmony: ServedModel, form: Any, schema: Any) -> None:
    plan = chat(harmony, response_format=form, tools=[TIME])
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    assert guided.after == "<|channel|>final"
    assert harmony.renderer.decode(guided.after_ids) == guided.after
    (alternative,) = guided.alternatives
    assert (alternative.literal, json.loads(alternative.json_schema)) == ("<|message|>", schema)
    assert chat(harmony, response_format={"type": "text"}).choices[0].request.sampling.guided is None


def test_json_schema_in_harmony_then_the_model_is_told_of_it_after_the_instructions(harmony: ServedModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = prompt(chat(harmony, messages=messages, response_format=FORMAT), harmony)
    schema = json.dumps(CITY, separators=(",", ":"))
    assert f"# Instructions\n\nBe brief.\n\n# Response Formats\n\n## answer\n\n{schema}<|end|>" in shown
    assert "Formats" not in prompt(chat(harmony, response_format={"type": "json_object"}), harmony)


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_guided_form_with_what_keeps_an_answer_going_then_invalid(harmony: ServedModel, field: str) -> None:
    with pytest.raises(InvalidRequest, match="whose output ends by its form") as refused:
        chat(harmony, response_format={"type": "json_object"}, **{field: 1 if field == "min_tokens" else True})
    assert refused.value.field == field


# --- messages ------------------------------------------------------------------------------------------


def test_user_name_in_harmony_then_the_model_sees_it(harmony: ServedModel) -> None:
    shown = prompt(chat(harmony, messages=[{"role": "user", "name": "alice", "content": "hi"}]), harmony)
    assert "<|start|>user:alice<|message|>hi<|end|>" in shown


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_name_that_the_prompt_does_not_show_then_refused(harmony: ServedModel, role: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": role, "name": "alice", "content": "hi"}]
    with pytest.raises(UnsupportedParameter) as refused:
        chat(harmony, messages=messages)
    assert refused.value.field == "messages[1].name"


def test_name_of_a_tools_result_then_it_must_be_that_of_the_call(harmony: ServedModel) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    assert chat(harmony, messages=[*turns, result | {"name": "get_time"}]).choices[0].request.token_ids == (
        chat(harmony, messages=[*turns, result]).choices[0].request.token_ids
    )
    with pytest.raises(InvalidRequest) as refused:
        chat(harmony, messages=[*turns, result | {"name": "other"}])
    assert refused.value.field == "messages[2].name"


def test_chat_template_then_developer_is_system_and_what_it_ignores_is_refused(make_template: Any) -> None:
    served = make_template()
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    plan = chat(served, messages=messages, tools=[TIME], chat_template_kwargs={"enable_thinking": True})
    shown = prompt(plan, served)
    assert "get_time" in shown
    assert shown.endswith("system: be brief\nuser: hi\nthink")
    for fields, param in (
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_args": {"mood": "good"}}, "chat_template_args.mood"),
        ({"messages": [{"role": "user", "name": "alice", "content": "hi"}]}, "messages[0].name"),
    ):
        with pytest.raises(UnsupportedParameter) as refused:
            chat(served, **fields)
        assert refused.value.field == param
    with pytest.raises(UnsupportedParameter, match=r"^tools is not supported"):
        chat(make_template("{% for m in messages %}{{ m.content }}{% endfor %}"), tools=[TIME])


def test_chat_template_when_a_format_is_asked_then_guided_from_the_first_token(make_template: Any) -> None:
    served = make_template()
    guided = chat(served, response_format=FORMAT).choices[0].request.sampling.guided
    assert guided is not None
    assert guided.after == ""
    assert json.loads(guided.alternatives[0].json_schema) == CITY
    with pytest.raises(UnsupportedParameter) as refused:
        chat(served, response_format=FORMAT, tools=[TIME])
    assert refused.value.field == "response_format"


def test_chat_template_when_a_call_is_demanded_then_in_the_form_of_its_parser(make_template: Any) -> None:
    served = make_template(tool_call_parser="hermes")
    opening = '<tool_call>\n{"name": "get_weather", "arguments":'
    assert prompt(chat(served, tools=[WEATHER, TIME], tool_choice=NAMED), served).endswith(opening)
    guided = chat(served, tools=[WEATHER, TIME], tool_choice="required").choices[0].request.sampling.guided
    assert guided is not None
    assert [each.literal for each in guided.alternatives] == [opening, opening.replace("weather", "time")]
    with pytest.raises(UnsupportedParameter) as refused:
        chat(make_template(), tools=[WEATHER], tool_choice=NAMED)
    assert refused.value.field == "tool_choice"


def test_conversation_of_another_api_then_errors_use_its_names(harmony: ServedModel) -> None:
    names = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
    cases = [
        (Message(role="user", content="word " * 3000), "medium", 0, "input"),
        (Message(role="user", content="x"), "medium", 2000, "max_output_tokens"),
        (Message(role="user", content="x"), "max", 0, "reasoning.effort"),
        (Message(role="tool", content="x"), "medium", 0, "input"),
    ]
    for message, effort, budget, field in cases:
        conversation = Conversation(messages=(message,), reasoning_effort=effort)
        with pytest.raises(RequestError) as refused:
            prepare_conversation(
                conversation, Options(sampling=Sampling(max_tokens=budget), names=names), harmony, IDENTITY
            )
        assert refused.value.field == field
