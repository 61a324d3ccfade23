"""What clients of other servers send: unknown fields, other names of fields, and what their answers
have.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import RequestRejected, UnsupportedParameter
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.kit import generation_plans
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CONTENT,
    END,
    MODEL,
    REASONING,
    FakeFrontend,
    chunk,
    front,
    stop,
)
from tests.kit.generation_plans import WEATHER
from tests.kit.memory_http import asgi
from tests.unit.frontend.test_generate_endpoint import (
    CHAT,
    TEXT,
    USER,
    chat,
    check_error,
    events,
    post,
    text,
)

RESPONSES = "/v1/responses"
IGNORED = "x-dynamo-ignored-fields"
HTTPX = f"python-httpx/{httpx.__version__}"


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi"} | fields


def tolerant(mode: str) -> FakeFrontend:
    return front(stop("x"), unknown_fields=mode)


# --- unknown fields -------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (TEXT, text), (RESPONSES, response)])
async def test_unknown_field_with_warning_is_named_in_a_header(path: str, body: Any) -> None:
    for stream in (False, True):
        answer = await post(tolerant("warn"), path, body(zebra=1, stream=stream))
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED] == "zebra"


async def test_unknown_nested_fields_are_named_once() -> None:
    part = {"type": "text", "text": "hi", "cache_control": {}}
    tool = {"type": "function", "function": {"name": "f", "zoo": 1}}
    choice = {"type": "function", "function": {"name": "f"}, "lion": 1}
    body = chat(
        messages=[{"role": "user", "content": [part], "zebra": 1}],
        tools=[tool],
        tool_choice=choice,
        zebra=2,
    )
    answer = await post(tolerant("warn"), CHAT, body)
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[IGNORED].split(", ")) == ["cache_control", "lion", "zebra", "zoo"]


async def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    served = tolerant("warn")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await post(served, CHAT, chat(zebra=1))
        await post(served, CHAT, chat(zebra=1), headers={"user-agent": "Zoo/1.0 (of animals)"})
    assert [record.getMessage() for record in caplog.records] == [
        f"request fields are ignored: zebra (client {HTTPX})",
        "request fields are ignored: zebra (client Zoo/1.0)",
    ]
    page = served.metrics.render().decode()
    assert 'dynamo_trtllm_ignored_fields_total{field="zebra"} 3.0' in page


async def test_unknown_fields_ever_new_log_one_line_per_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = tolerant("warn")
    with caplog.at_level(logging.WARNING):
        for at in range(70):
            await post(served, CHAT, chat(**{f"x{at}-{number}": 1 for number in range(20)}))
        await post(served, CHAT, chat(zebra=1))
    assert len(caplog.records) == 71
    assert caplog.records[-1].getMessage() == f"request fields are ignored: zebra (client {HTTPX})"


@pytest.mark.parametrize("place", ["top", "part"])
def test_unknown_fields_of_a_large_body_are_stored_in_part(place: str) -> None:
    wild = {f"{at}" + "x" * 100: 1 for at in range(1000)}
    part = {"type": "text", "text": "hi"}
    if place == "part":
        body = chat(messages=[{"role": "user", "content": [part | wild, part | {"zebra": 1}]}])
    else:
        body = chat(messages=[{"role": "user", "content": "hi"} | wild], **wild)
    ignored = IgnoredFields()
    parse(ChatRequest, json.dumps(body).encode(), ignored)
    assert 0 < sum(map(len, ignored)) < 2000


async def test_unknown_fields_ignored_have_no_header_or_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = await post(tolerant("ignore"), CHAT, chat(zebra=1))
    assert answer.status_code == 200
    assert IGNORED not in answer.headers
    assert not caplog.records


async def test_unknown_fields_header_is_short_and_clean() -> None:
    wild = {f"{at}\r\nx: y" + "z" * 500: 1 for at in range(100)}
    header = (await post(tolerant("warn"), CHAT, chat(**wild))).headers[IGNORED]
    assert header.startswith("0??x??y")
    assert len(header) < 1100


@pytest.mark.parametrize("mode", ["warn", "ignore"])
async def test_unsupported_field_is_rejected_though_unknown_pass(mode: str) -> None:
    check_error(
        await post(tolerant(mode), CHAT, chat(audio={"voice": "x"})),
        400,
        "unsupported_parameter",
        "audio",
    )


async def test_unknown_field_by_default_then_ignored_and_named() -> None:
    for body in (chat(zebra=1), chat(messages=[USER[0] | {"zebra": 1}])):
        answer = await post(front(stop("x")), CHAT, body)
        assert answer.status_code == 200
        assert answer.headers[IGNORED] == "zebra"


async def test_unknown_field_when_they_are_rejected_then_status_400() -> None:
    for body in (chat(zebra=1), chat(messages=[USER[0] | {"zebra": 1}])):
        answer = await post(tolerant("reject"), CHAT, body)
        assert answer.status_code == 400
        assert "is not a known field" in answer.json()["error"]["message"]


PART = {"type": "text", "text": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
MISSPELLED = [
    (CHAT, chat(max_token=3), "max_token", "max_tokens"),
    (CHAT, chat(maxTokens=3), "maxTokens", "max_tokens"),
    (CHAT, chat(tempreature=0), "tempreature", "temperature"),
    (CHAT, chat(stream=True, stream_option={}), "stream_option", "stream_options"),
    (TEXT, text(eco=True), "eco", "echo"),
    (RESPONSES, response(instruction="x"), "instruction", "instructions"),
    (RESPONSES, response(reasoning={"efort": "low"}), "reasoning.efort", "effort"),
    (
        RESPONSES,
        response(input=[{"role": "user", "content": "x", "tpye": "message"}]),
        "input[0].tpye",
        "type",
    ),
    (CHAT, chat(messages=[USER[0] | {"names": "x"}]), "messages[0].names", "name"),
    (
        CHAT,
        chat(tools=[TOOL | {"function": {"name": "f", "parameter": {}}}]),
        "tools[0].function.parameter",
        "parameters",
    ),
    (
        CHAT,
        chat(response_format={"type": "text", "json_schemas": {}}),
        "response_format.json_schemas",
        "json_schema",
    ),
    (CHAT, chat(nvext={"cache_salts": "x"}), "nvext.cache_salts", "cache_salt"),
]


@each_case(("path", "body", "field", "meant"), MISSPELLED)
async def test_misspelled_field_suggests_the_right_name(
    path: str, body: dict[str, Any], field: str, meant: str
) -> None:
    answer = await post(front(stop("x")), path, body)
    check_error(answer, 400, "unsupported_parameter", field)
    assert f"did you mean {meant!r}?" in answer.json()["error"]["message"]


async def test_misspelled_field_of_a_part_by_default_then_rejected() -> None:
    body = chat(messages=[{"role": "user", "content": [PART | {"zoo": 1}, PART | {"texts": "x"}]}])
    answer = await post(front(stop("x")), CHAT, body)
    check_error(answer, 400, "unsupported_parameter", "messages[0].content")
    assert "did you mean 'text'?" in answer.json()["error"]["message"]


@each_case("name", ["bad_words", "top_a", "max_new_tokens", "stop_sequences", "typical_p", "regex"])
async def test_field_that_changes_the_answer_says_what_to_do(name: str) -> None:
    answer = await post(front(stop("x")), CHAT, chat(**{name: "something"}))
    check_error(answer, 400, "unsupported_parameter", name)
    assert ChatRequest.unsupported[name] in answer.json()["error"]["message"]


# What LiteLLM, LangGraph, Anthropic's and OpenAI's clients add on their own.
ADDED = {
    "message": {
        "provider_specific_fields": {"refusal": None, "reasoning": "r"},
        "thinking_blocks": [{}],
    },
    "part": {"cache_control": {"type": "ephemeral"}},
    "body": {
        "client_metadata": {"session_id": "s"},
        "litellm_metadata": {},
        "web_search_options": {},
    },
}


async def test_fields_added_by_clients_are_accepted() -> None:
    messages = [
        USER[0],
        {"role": "assistant", "name": "ops_agent", "content": "a", "refusal": None}
        | ADDED["message"],
        {"role": "user", "name": "team", "content": [PART | ADDED["part"]]},
    ]
    known = {
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": True,
        "user": "u",
        "metadata": {"a": "b"},
    }
    answer = await post(front(stop("x")), CHAT, chat(messages=messages, **ADDED["body"], **known))
    assert answer.status_code == 200, answer.text
    named = set(answer.headers[IGNORED].split(", "))
    assert named >= {*ADDED["message"], *ADDED["part"], *ADDED["body"]}
    assert not named & known.keys()


@pytest.mark.parametrize("mode", ["warn", "reject"])
async def test_name_dropped_by_prompt_format_is_reported(mode: str) -> None:
    messages = [USER[0], {"role": "assistant", "name": "ops_agent", "content": "a"}, USER[0]]
    answer = await post(tolerant(mode), CHAT, chat(messages=messages))
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "name"


@pytest.mark.parametrize("mode", ["warn", "ignore", "reject"])
async def test_known_field_of_a_wrong_type_then_rejected(mode: str) -> None:
    check_error(
        await post(tolerant(mode), CHAT, chat(max_tokens="3")), 400, "invalid_request", "max_tokens"
    )


# --- structured output under the names of vLLM and Dynamo -----------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CITY_TEXT = '{"type":"object","properties":{"city":{"type":"string"}}}'
FORMATS: list[tuple[dict[str, Any], OutputFormat]] = [
    ({"guided_json": CITY}, OutputFormat(json_schema=CITY_TEXT)),
    ({"guided_json": CITY_TEXT}, OutputFormat(json_schema=CITY_TEXT)),
    ({"guided_regex": "a+"}, OutputFormat(json_schema="", regex="a+")),
    (
        {"guided_choice": ["yes", "a.b"], "guided_decoding_backend": "xgrammar"},
        OutputFormat(json_schema="", regex=r"yes|a\.b"),
    ),
    ({"guided_grammar": 'root ::= "a"'}, OutputFormat(json_schema="", grammar='root ::= "a"')),
    ({"structured_outputs": {"json": CITY}}, OutputFormat(json_schema=CITY_TEXT)),
    ({"structured_outputs": {"json_object": True}}, OutputFormat(json_schema="{}")),
    (
        {"structured_outputs": {"regex": "a+", "disable_fallback": False}},
        OutputFormat(json_schema="", regex="a+"),
    ),
    (
        {"structured_outputs": {"choice": ["yes"]}, "guided_choice": ["yes"]},
        OutputFormat(json_schema="", regex="yes"),
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        OutputFormat(json_schema="{}"),
    ),
]


@each_case(("fields", "wanted"), FORMATS)
def test_output_format_has_the_same_effect_under_any_name(
    harmony: ServedModel, fields: dict[str, Any], wanted: OutputFormat
) -> None:
    guided = generation_plans.chat(harmony, **fields).choices[0].request.sampling.guided
    assert guided is not None
    (alternative,) = guided.alternatives
    assert guided.trigger == "<|channel|>final"
    assert alternative == OutputFormat(
        json_schema=wanted.json_schema,
        regex=wanted.regex,
        grammar=wanted.grammar,
        prefix="<|message|>",
    )
    if "response_format" not in fields:
        completion = generation_plans.text(harmony, **fields).choices[0].request.sampling
        assert completion.guided == StructuredOutput(alternatives=(wanted,))


@each_case(
    ("fields", "param"),
    [
        ({"guided_json": CITY, "guided_regex": "a"}, "guided_regex"),
        (
            {"guided_choice": ["a"], "structured_outputs": {"choice": ["b"]}},
            "structured_outputs.choice",
        ),
        ({"response_format": {"type": "json_object"}, "guided_json": CITY}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["x" * 1000] * 66}, "guided_choice"),
        ({"structured_outputs": {"choice": ["x" * 1000] * 66}}, "structured_outputs.choice"),
        ({"ignore_eos": True, "nvext": {"ignore_eos": False}}, "nvext.ignore_eos"),
        ({"cache_salt": "a", "nvext": {"cache_salt": "b"}}, "nvext.cache_salt"),
        # higher is first
        ({"priority": 5, "nvext": {"agent_hints": {"priority": 5}}}, "nvext.agent_hints.priority"),
        ({"priority": 1 << 21}, "priority"),
        ({"attention_dp_relax": True}, "attention_dp_relax"),
    ],
)
async def test_wrong_or_conflicting_formats_name_one_field(
    fields: dict[str, Any], param: str
) -> None:
    check_error(await post(front(stop("x")), CHAT, chat(**fields)), 400, "invalid_request", param)


async def test_conflicting_reasoning_names_are_400() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}
    answer = await post(front(stop("x")), CHAT, chat(messages=[*USER, message]))
    check_error(answer, 400, "invalid_request", "messages[1].reasoning")


@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"structural_tag": "x"}}, {"guided_whitespace_pattern": " "}]
)
async def test_unsupported_structured_output_part_is_rejected(fields: dict[str, Any]) -> None:
    answer = await post(front(stop("x")), CHAT, chat(**fields))
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_output_format_without_engine_support_names_field(harmony: ServedModel) -> None:
    for plan in (generation_plans.chat, generation_plans.text):
        with pytest.raises(UnsupportedParameter) as refused:
            plan(generation_plans.refusing(harmony, "guided"), guided_regex="a")
        assert refused.value.field == "guided_regex"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, chat(guided_regex="a"), "guided_regex"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (CHAT, chat(tools=[WEATHER], tool_choice="required"), "tool_choice"),
        (TEXT, text(structured_outputs={"choice": ["a"]}), "structured_outputs.choice"),
        (RESPONSES, response(text={"format": {"type": "json_object"}}), "text.format"),
    ],
)
async def test_output_format_rejected_by_engine_names_field(
    path: str, body: dict[str, Any], name: str
) -> None:
    served = front(RequestRejected("the output format is not supported", field="guided"))
    message = check_error(await post(served, path, body), 400, "engine_rejected", name)
    assert message == f"{name}: the output format is not supported"


# --- what answers have ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_include_reasoning_when_false_then_the_answer_has_none(stream: bool) -> None:
    served = front(chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop("!"))
    answer = await post(served, CHAT, chat(include_reasoning=False, stream=stream))
    assert "why" not in answer.text
    assert "reasoning" not in answer.text.replace("reasoning_tokens", "")
    assert "so" in answer.text


async def test_return_token_ids_of_chat_has_prompt_and_answer() -> None:
    script = chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop("!")
    body = (await post(front(*script), CHAT, chat(return_token_ids=True))).json()
    assert body["prompt_token_ids"] == [*b"hi"]
    generated = [REASONING, *b"why", CONTENT, *b"so", *b"!", END]
    assert body["choices"][0]["token_ids"] == generated
    first, *rest = events(
        await post(front(*script), CHAT, chat(return_token_ids=True, stream=True))
    )
    assert first["prompt_token_ids"] == [*b"hi"]
    assert [
        token for event in rest for token in event["choices"][0].get("token_ids", ())
    ] == generated
    assert not any("prompt_token_ids" in event for event in rest)


async def test_return_token_ids_when_text_then_ids_are_in_each_choice() -> None:
    body = (
        await post(front(stop("a")), TEXT, text(prompt=["x", "yz"], n=2, return_token_ids=True))
    ).json()
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
        [*b"x"],
        [*b"x"],
        [*b"yz"],
        [*b"yz"],
    ]
    assert [choice["token_ids"] for choice in body["choices"]] == [[*b"a", END]] * 4
    got = events(await post(front(stop("a")), TEXT, text(return_token_ids=True, stream=True)))
    assert got[0]["choices"][0]["prompt_token_ids"] == [*b"hi"]
    assert got[1]["choices"][0]["token_ids"] == [*b"a", END]


async def test_unused_template_argument_is_named_in_a_header() -> None:
    body = chat(chat_template_kwargs={"enable_thinking": False})
    answer = await post(front(stop("x")), CHAT, body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "chat_template_kwargs.enable_thinking"
    assert IGNORED not in (await post(tolerant("ignore"), CHAT, body)).headers


# --- pages of other origins -----------------------------------------------------------------------

PAGE = {"origin": "https://chat.example.org"}
PREFLIGHT = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,x-y",
}


async def options(served: FakeFrontend, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.options(CHAT, headers=headers)


@pytest.mark.parametrize(
    ("origins", "allowed"), [("*", "*"), (f"http://a,{PAGE['origin']}", PAGE["origin"])]
)
async def test_allowed_origin_gets_cors_headers(origins: str, allowed: str) -> None:
    preflight = await options(front(cors_origins=origins), PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == allowed
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-y"
    for body in (chat(), chat(stream=True), chat(temperature=9)):
        answer = await post(front(stop("x"), cors_origins=origins), CHAT, body, headers=PAGE)
        assert answer.headers["access-control-allow-origin"] == allowed
        assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("origins", [None, "https://other.example.org"])
async def test_page_of_another_origin_then_rejected_without_headers(origins: str | None) -> None:
    served = front(stop("x"), cors_origins=origins)
    assert (await options(served, PREFLIGHT)).status_code == 405
    answer = await post(served, CHAT, chat(), headers=PAGE)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]
    same_site = await post(served, CHAT, chat())
    # for caches
    assert {answer.headers.get("vary"), same_site.headers.get("vary")} == {origins and "Origin"}


async def test_options_that_is_no_preflight_then_405() -> None:
    assert (await options(front(cors_origins="*"), PAGE)).status_code == 405


# --- when and where workers run a request ---------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (TEXT, text), (RESPONSES, response)])
async def test_scheduling_fields_then_every_call_to_workers_has_them(path: str, body: Any) -> None:
    served = front(stop("x"))
    nvext = {"agent_hints": {"priority": -5, "osl": 10}, "dp_rank": 1, "prefill_dp_rank": 0}
    conversation = {"conversation_params": {"conversation_id": "c"}}
    fields = {"priority": 5, "nvext": nvext, "attention_dp_relax": True, **conversation}
    session = {"X-Session-ID": " s "}
    for sent, headers in ((fields, session), ({}, session), ({}, {})):
        answer = await post(served, path, body(**sent), headers=headers)
        assert answer.status_code == 200, answer.text
    full, named, plain = served.router.requests
    assert (full.priority, full.dp_rank, full.prefill_dp_rank, full.relax_dp_rank) == (
        5,
        1,
        0,
        True,
    )
    assert [one.conversation_id for one in (full, named, plain)] == ["c", "s", None]
    assert (plain.priority, plain.dp_rank, plain.prefill_dp_rank, plain.relax_dp_rank) == (
        0,
        None,
        None,
        False,
    )
    check_error(
        await post(served, path, body(), headers={"x-session-id": "s" * 257}),
        400,
        "invalid_request",
        None,
    )


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (RESPONSES, response)])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_answer_that_ends_without_its_format_is_incomplete(
    path: str, body: Any, logprobs: bool
) -> None:
    if path == CHAT:
        fields = {"response_format": {"type": "json_object"}, "logprobs": logprobs}
    else:
        fields = {"text": {"format": {"type": "json_object"}}, "top_logprobs": int(logprobs)}
    served = front(chunk("hm", ids=[REASONING], logprobs=logprobs), stop(""))
    answer = (await post(served, path, body(**fields))).json()
    if path == CHAT:
        assert answer["choices"][0]["message"]["content"] in (None, "")
        assert answer["choices"][0]["finish_reason"] == "length"
    else:
        assert answer["status"] == "incomplete"
    served = front(chunk("{}", ids=[CONTENT], logprobs=logprobs), stop(""))
    answer = (await post(served, path, body(**fields))).json()
    assert (answer["choices"][0]["finish_reason"] if path == CHAT else answer["status"]) in (
        "stop",
        "completed",
    )
