"""Tool choices and answer formats: what is put after the prompt, and what the engine is held to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_trtllm.frontend.tokenization.conversation import Tool
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.kit.generation_plans import (
    CITY,
    FORMAT,
    HEADER,
    NAMED,
    REST,
    TIME,
    WEATHER,
    TemplateModels,
    chat,
    prompt,
    refusing,
)

STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


def test_named_tool_choice_forces_the_call_header(harmony: ServedModel) -> None:
    plan = chat(harmony, tools=[WEATHER, TIME], tool_choice=NAMED)
    assert prompt(plan, harmony).endswith(f"<|start|>assistant{HEADER}get_weather{REST}")
    (choice,) = plan.choices
    guided = StructuredOutput(alternatives=(OutputFormat(json_schema=json.dumps(CITY)),))
    assert choice.request.sampling.guided == guided
    (call,) = choice.make_parser().push(harmony.renderer.encode('{"city": "Bern"}')).deltas
    assert (call.name, call.text) == ("get_weather", '{"city": "Bern"}')


def test_tool_choice_required_with_one_tool_then_as_if_named(harmony: ServedModel) -> None:
    named = chat(harmony, tools=[WEATHER], tool_choice=NAMED)
    assert (
        chat(harmony, tools=[WEATHER], tool_choice="required").choices[0].request
        == named.choices[0].request
    )


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_single_call_without_guidance_forces_the_header(harmony: ServedModel, choice: Any) -> None:
    plans = [chat(refusing(harmony, "guided"), tools=[WEATHER], tool_choice=choice)]
    plans.append(chat(harmony, tools=[WEATHER], tool_choice=choice, min_tokens=1))
    plans.append(chat(harmony, tools=[WEATHER], tool_choice=choice, ignore_eos=True))
    for plan in plans:
        assert plan.choices[0].request.sampling.guided is None
        assert prompt(plan, harmony).endswith(f"{HEADER}get_weather{REST}")


def test_required_tool_choice_of_several_guides_the_name(harmony: ServedModel) -> None:
    plan = chat(harmony, tools=[WEATHER, TIME], tool_choice="required")
    assert prompt(plan, harmony).endswith(f"<|start|>assistant{HEADER}")
    (choice,) = plan.choices
    guided = choice.request.sampling.guided
    assert guided is not None
    assert (guided.trigger, list(guided.trigger_ids)) == ("", [])
    assert [
        (alternative.prefix, json.loads(alternative.json_schema))
        for alternative in guided.alternatives
    ] == [
        (f"get_weather{REST}", CITY),
        (f"get_time{REST}", {"type": "object"}),
    ]
    header = harmony.renderer.call_header(Tool(name="get_time"))
    assert header is not None
    step = choice.make_parser().push(harmony.renderer.encode("get_time") + header[-4:])
    assert [call.name for call in step.deltas] == ["get_time"]


def test_tool_choice_limits_the_tools_in_the_prompt(harmony: ServedModel) -> None:
    assert "get_weather" not in prompt(
        chat(harmony, tools=[WEATHER, TIME], tool_choice="none"), harmony
    )
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
        {
            "tools": [TIME],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": []},
            },
        },
        {
            "tools": [TIME],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED]},
            },
        },
    ],
)
def test_tool_choice_among_tools_that_are_not_there_then_invalid(
    harmony: ServedModel, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(harmony, **fields)
    assert refused.value.field == "tool_choice"


def test_strict_tool_of_required_call_guides_arguments(harmony: ServedModel) -> None:
    (choice,) = chat(harmony, tools=[STRICT], tool_choice=NAMED).choices
    guided = choice.request.sampling.guided
    assert guided is not None
    assert guided.alternatives == (OutputFormat(json_schema=json.dumps(CITY)),)


def test_strict_tool_of_optional_call_guides_once_begun(harmony: ServedModel) -> None:
    plan = chat(harmony, tools=[STRICT, TIME])
    assert prompt(plan, harmony).endswith("<|start|>assistant")
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    assert guided.trigger == HEADER.removesuffix(".")
    natural = harmony.renderer.call_header(Tool(name="get_weather"))
    assert natural is not None
    # or it would not be met in what a model writes
    assert natural[: len(guided.trigger_ids)] == guided.trigger_ids
    assert [
        (alternative.prefix, json.loads(alternative.json_schema))
        for alternative in guided.alternatives
    ] == [
        (f".get_weather{REST}", CITY),
        (f".get_time{REST}", {}),
    ]


def test_strict_tool_and_response_format_guide_separately(harmony: ServedModel) -> None:
    guided = (
        chat(harmony, tools=[STRICT, TIME], response_format=FORMAT)
        .choices[0]
        .request.sampling.guided
    )
    assert guided is not None
    assert guided.trigger == HEADER.removesuffix(".")
    assert [json.loads(alternative.json_schema) for alternative in guided.alternatives] == [
        CITY,
        {},
    ]
    answer = guided.otherwise
    assert answer is not None
    assert answer.trigger == "<|channel|>final"
    assert [json.loads(alternative.json_schema) for alternative in answer.alternatives] == [CITY]


@pytest.mark.parametrize("tools", [[], [STRICT], [TIME]])
def test_response_format_requires_an_answer_or_a_call(
    harmony: ServedModel, tools: list[Any]
) -> None:
    guided = chat(harmony, tools=tools, response_format=FORMAT).choices[0].request.sampling.guided
    assert guided is not None
    ends_call = harmony.renderer.call_stop_token_ids
    ends_answer = harmony.renderer.stop_token_ids
    allowed = ends_call if tools else ()
    assert set(guided.unfinished_ids) == set(ends_answer) - set(allowed)


@pytest.mark.parametrize("choice", ["auto", NAMED])
def test_strict_tool_without_engine_support_is_ignored(harmony: ServedModel, choice: Any) -> None:
    plan = chat(refusing(harmony, "guided"), tools=[STRICT], tool_choice=choice)
    assert plan.choices[0].request.sampling.guided is None
    assert plan.ignored == ("tools.strict",)


@pytest.mark.parametrize("tool", [STRICT, WEATHER])
def test_chat_template_with_tools_gives_answer_or_call(
    make_template: TemplateModels, tool: Any
) -> None:
    served = make_template(tool_call_parser="hermes")
    plan = chat(served, tools=[tool], response_format=FORMAT)
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    answer, call = guided.alternatives
    assert (answer.prefix, json.loads(answer.json_schema)) == ("", CITY)
    assert call.prefix == "<tool_call>\n"
    properties = json.loads(call.json_schema)["properties"]
    assert properties == {"name": {"const": "get_weather"}, "arguments": CITY}
    assert plan.ignored == (("tools.strict",) if tool is STRICT else ())
    parser = plan.choices[0].make_parser()
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}'
    deltas = [*parser.push(served.renderer.encode(text)).deltas, *parser.finish().deltas]
    assert {delta.name for delta in deltas} - {None} == {"get_weather"}
    assert json.loads("".join(delta.text for delta in deltas)) == {"city": "Bern"}


def test_references_of_a_tool_follow_its_schema_into_the_call(
    make_template: TemplateModels,
) -> None:
    """Schemas of pydantic's models have `$defs`, and recursive ones refer to their root."""
    parameters = {
        "$id": "https://example.org/place",
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "near": {"type": "array", "items": {"$ref": "#"}},
            "$ref": {"type": "string", "enum": ["#/x"], "default": {"$ref": "#/x"}},
            "named": {"$ref": "#city"},
            "default": {"$ref": "#/$defs/City"},
            "other": {"$id": "https://example.org/other", "$ref": "#/x"},
        },
        "$defs": {"City": {"$anchor": "city", "anyOf": [{"$ref": "#/$defs/Name"}]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = chat(make_template(tool_call_parser="hermes"), tools=[tool], response_format=FORMAT)
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    shown = json.loads(guided.alternatives[1].json_schema)["properties"]["arguments"]
    root = "#/properties/arguments"
    assert shown == {
        "type": "object",
        "properties": {
            "city": {"$ref": f"{root}/$defs/City"},
            "near": {"type": "array", "items": {"$ref": root}},
            "$ref": {"type": "string", "enum": ["#/x"], "default": {"$ref": "#/x"}},
            "named": {"$ref": "#city"},
            "default": {"$ref": f"{root}/$defs/City"},
            "other": {"$id": "https://example.org/other", "$ref": "#/x"},
        },
        "$defs": {"City": {"$anchor": "city", "anyOf": [{"$ref": f"{root}/$defs/Name"}]}},
    }


def test_parallel_tool_calls_false_then_one_call_at_most(harmony: ServedModel) -> None:
    assert (
        not chat(harmony, tools=[TIME], parallel_tool_calls=False)
        .choices[0]
        .options.parallel_tool_calls
    )
    assert chat(harmony, tools=[TIME]).choices[0].options.parallel_tool_calls


@pytest.mark.parametrize(("form", "schema"), [({"type": "json_object"}, {}), (FORMAT, CITY)])
def test_response_format_then_guided_after_the_final_channel(
    harmony: ServedModel, form: Any, schema: Any
) -> None:
    plan = chat(harmony, response_format=form, tools=[TIME])
    guided = plan.choices[0].request.sampling.guided
    assert guided is not None
    assert guided.trigger == "<|channel|>final"
    assert harmony.renderer.decode(guided.trigger_ids) == guided.trigger
    (alternative,) = guided.alternatives
    assert (alternative.prefix, json.loads(alternative.json_schema)) == ("<|message|>", schema)
    assert (
        chat(harmony, response_format={"type": "text"}).choices[0].request.sampling.guided is None
    )


def test_json_schema_in_harmony_follows_instructions(harmony: ServedModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    shown = prompt(chat(harmony, messages=messages, response_format=FORMAT), harmony)
    schema = json.dumps(CITY, separators=(",", ":"))
    assert (
        f"# Instructions\n\nBe brief.\n\n# Response Formats\n\n## answer\n\n{schema}<|end|>"
        in shown
    )
    assert "Formats" not in prompt(chat(harmony, response_format={"type": "json_object"}), harmony)


@pytest.mark.parametrize("field", ["ignore_eos", "min_tokens"])
def test_guided_form_with_endless_answer_is_invalid(harmony: ServedModel, field: str) -> None:
    with pytest.raises(InvalidRequest, match="which ends the output itself") as refused:
        chat(
            harmony,
            response_format={"type": "json_object"},
            **{field: 1 if field == "min_tokens" else True},
        )
    assert refused.value.field == field


def test_chat_template_format_is_guided_from_first_token(make_template: TemplateModels) -> None:
    served = make_template()
    guided = chat(served, response_format=FORMAT).choices[0].request.sampling.guided
    assert guided is not None
    assert guided.trigger == ""
    assert json.loads(guided.alternatives[0].json_schema) == CITY
    with pytest.raises(UnsupportedParameter) as refused:
        chat(served, response_format=FORMAT, tools=[TIME])
    assert refused.value.field == "response_format"


def test_chat_template_required_call_uses_its_parser_form(make_template: TemplateModels) -> None:
    served = make_template(tool_call_parser="hermes")
    opening = '<tool_call>\n{"name": "get_weather", "arguments":'
    assert prompt(chat(served, tools=[WEATHER, TIME], tool_choice=NAMED), served).endswith(opening)
    guided = (
        chat(served, tools=[WEATHER, TIME], tool_choice="required")
        .choices[0]
        .request.sampling.guided
    )
    assert guided is not None
    assert [alternative.prefix for alternative in guided.alternatives] == [
        opening,
        opening.replace("weather", "time"),
    ]
    with pytest.raises(UnsupportedParameter) as refused:
        chat(make_template(), tools=[WEATHER], tool_choice=NAMED)
    assert refused.value.field == "tool_choice"
