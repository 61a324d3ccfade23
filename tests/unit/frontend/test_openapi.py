"""The description of the API: whole, true to what is answered, and readable with nothing else at
hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import jsonschema_rs
import pytest

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.frontend.http.openapi import document
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.http_status import STATUS
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CALL,
    MODEL,
    REASONING,
    Catalog,
    FakeFrontend,
    chunk,
    front,
    stop,
)
from tests.kit.instances import make_instance
from tests.kit.memory_http import asgi

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
STATS = {"x-dynamo-stats": "1"}
UNLISTED = {"/openapi.json", "/docs", "/"}
CONSOLE = "/console/"  # what only the page of the console uses


async def ask(served: FakeFrontend, method: str, path: str, **kwargs: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.request(method, path, **kwargs)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields


def message(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=9) | fields


@cache
def described() -> dict[str, Any]:
    return document()


@cache
def schema(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(
        {"$ref": f"#/components/schemas/{name}", "components": described()["components"]}
    )


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in value.items():
            if key == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_openapi_references_are_all_resolvable() -> None:
    response = await ask(front(), "GET", "/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described = response.json()
    assert described["openapi"].startswith("3.1")
    names = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(references(described)) <= names
    for schema in described["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_openapi_then_it_lists_exactly_the_routes_of_the_app() -> None:
    routes = {
        (re.sub(r"{\w+(:path)?}", "{id}", route.path), route.method.lower())
        for route in front().app.routes
        if route.path not in UNLISTED and not route.path.startswith(CONSOLE)
    }
    assert routes == {
        (path, method) for path, methods in described()["paths"].items() for method in methods
    }


def test_openapi_generation_lists_every_error_status() -> None:
    for path in (CHAT, TEXT, "/v1/responses", MESSAGES):
        answers = described()["paths"][path]["post"]["responses"]
        assert set(answers) == {"200", *map(str, STATUS.values())}
        for status in ("429", "503"):
            assert answers[status]["headers"]["retry-after"]["required"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}])
async def test_chat_then_whole_and_streamed_answers_are_as_described(
    fields: dict[str, Any],
) -> None:
    script = [
        chunk("why", ids=[REASONING], logprobs=True),
        chunk("{", ids=[CALL], logprobs=True),
        stop("}"),
    ]
    whole = await ask(front(*script), "POST", CHAT, json=chat(**fields), headers=STATS)
    schema("ChatCompletion").validate(whole.json())
    streamed = await ask(
        front(*script), "POST", CHAT, json=chat(stream=True, **fields), headers=STATS
    )
    for line in streamed.text.split("\n\n")[:-2]:
        schema("ChatCompletionChunk").validate(json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True, "n": 2}])
async def test_text_then_whole_and_streamed_answers_are_as_described(
    fields: dict[str, Any],
) -> None:
    asked = {"model": MODEL, "prompt": "hi"} | fields
    script = [chunk("ab", logprobs=True), stop("c")]
    schema("TextCompletion").validate(
        (await ask(front(*script), "POST", TEXT, json=asked, headers=STATS)).json()
    )
    streamed = await ask(front(*script), "POST", TEXT, json=asked | {"stream": True}, headers=STATS)
    for line in streamed.text.split("\n\n")[:-2]:
        schema("TextCompletion").validate(json.loads(line.removeprefix("data: ")))


async def test_messages_match_their_description() -> None:
    script = [chunk("why", ids=[REASONING]), chunk("{", ids=[CALL]), stop("}")]
    asked = message(thinking={"type": "adaptive"})
    whole = await ask(front(*script), "POST", MESSAGES, json=asked, headers=STATS)
    schema("Message").validate(whole.json())
    streamed = await ask(front(*script), "POST", MESSAGES, json=asked | {"stream": True})
    for event in streamed.text.split("\n\n")[:-1]:
        schema("MessageEvent").validate(json.loads(event.partition("\ndata: ")[2]))
    counted = await ask(front(), "POST", f"{MESSAGES}/count_tokens", json=asked)
    schema("MessageTokens").validate(counted.json())
    failed = await ask(front(errors.NoInstances("none")), "POST", MESSAGES, json=asked)
    schema("MessagesError").validate(failed.json())


async def test_tokenization_then_as_described() -> None:
    served = front()
    strs = {"return_token_strs": True}
    for body in (chat(), chat(**strs), {"model": MODEL, "prompt": "hi"}):
        schema("Tokenization").validate((await ask(served, "POST", "/tokenize", json=body)).json())
    body = {"model": MODEL, "tokens": [104]}
    schema("Detokenization").validate((await ask(served, "POST", "/detokenize", json=body)).json())
    asked = {"model": MODEL, "input": "hi"}
    path = "/v1/responses/input_tokens"
    schema("InputTokens").validate((await ask(served, "POST", path, json=asked)).json())


async def test_endpoints_that_answer_at_once_then_as_described() -> None:
    served = front()
    served.catalog.up = [make_instance(1, role=Role.PREFILL), make_instance(2)]
    described = {
        "/health": "Health",
        "/ready": "FrontendReady",
        "/live": "Live",
        "/v1/models": "ModelList",
    }
    described["/version"] = "Version"
    for path, name in described.items():
        schema(name).validate((await ask(served, "GET", path)).json())
    served.not_ready_reason = "other processes of this frontend are starting"
    schema("FrontendReady").validate((await ask(served, "GET", "/ready")).json())
    schema("Model").validate((await ask(served, "GET", f"/v1/models/{MODEL}")).json())
    schema("Ready").validate((await ask(served, "GET", f"/v1/models/{MODEL}/ready")).json())
    served.catalog.lacks = "model lab/tiny has no decode worker"
    served.catalog.shown["rejected_records"] = [
        {"key": "v1/instances/dynamo/x", "reason": "the key is not of the form"}
    ]
    schema("Health").validate((await ask(served, "GET", "/health")).json())
    not_ready = await ask(served, "GET", f"/v1/models/{MODEL}/ready")
    schema("Ready").validate(not_ready.json())
    assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    "script",
    [
        [errors.NoInstances("none")],
        [chunk("a"), errors.Disconnected("lost")],
        [RuntimeError("bug")],
    ],
)
async def test_errors_then_as_described(script: list[Any]) -> None:
    schema("Error").validate((await ask(front(*script), "POST", CHAT, json=chat())).json())


ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "ChatRequest": [
        chat(stop=""),
        chat(stop="x", seed=None, metadata={"a": "1"}, functions=[]),
        chat(tool_choice={"type": "function", "function": {"name": "f"}}),
        chat(tools=[{"type": "web_search", "filters": {}}]),
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "stop": ["a", "b"],
        },
        chat(
            logit_bias={"17": -100}, reasoning_effort="low", response_format={"type": "json_object"}
        ),
    ],
    "CompletionRequest": [
        {"model": "m", "prompt": prompt} for prompt in ("a", [1, 2], ["a", "b"], [[1], [2, 3]])
    ],
    "MessagesRequest": [
        message(system="be", stop_sequences=["x"], thinking={"type": "adaptive"}),
        message(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
        message(tools=[{"name": "f", "input_schema": {}}, {"type": "bash_20250124", "name": "b"}]),
        message(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]),
    ],
    "CountTokensRequest": [{"model": "m", "messages": [{"role": "user", "content": "hi"}]}],
    "ResponseRequest": [
        {"model": "m", "input": "hi", "text": {"format": {"type": "text"}}},
        {
            "model": "m",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        },
    ],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "ChatRequest": [
        {"model": "m"},
        chat(temprature=1),
        chat(stop=[""]),
        chat(n=0),
        chat(modalities=["audio"]),
        chat(logit_bias={"4294967295": 101}),
    ],
    "CompletionRequest": [
        {"model": "m", "prompt": ""},
        {"model": "m", "prompt": "a", "suffix": "b"},
    ],
    "MessagesRequest": [
        message(max_tokens=None),
        message(system=5),
        message(tools=[{"type": 5}]),
        message(messages=[{"role": "user", "content": [{"type": "image"}]}]),
    ],
    "ResponseRequest": [
        {"model": "m", "input": []},
        {"model": "m", "input": "hi", "background": True},
    ],
}


@each_case(("name", "body"), [(name, body) for name, bodies in ACCEPTED.items() for body in bodies])
def test_request_that_is_taken_then_its_schema_takes_it(name: str, body: dict[str, Any]) -> None:
    schema(name).validate(body)


@each_case(("name", "body"), [(name, body) for name, bodies in REFUSED.items() for body in bodies])
def test_request_that_is_refused_then_its_schema_refuses_it(
    name: str, body: dict[str, Any]
) -> None:
    assert not schema(name).is_valid(body)


def test_every_body_has_an_example_that_its_schema_accepts() -> None:
    bodies = [
        operation["requestBody"]["content"]["application/json"]
        for methods in described()["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    ]
    assert bodies
    for body in bodies:
        name = body["schema"]["$ref"].rpartition("/")[2]
        assert body["example"]["model"] == "MODEL"
        assert schema(name).is_valid(body["example"]), body


async def test_docs_then_a_page_that_loads_nothing_else() -> None:
    response = await ask(front(), "GET", "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert not re.search(r"https?:|//\w+\.|<script src|<link rel=\"stylesheet", response.text)
    assert 'fetch("openapi.json",' in response.text
    assert "prefers-color-scheme: dark" in response.text
    assert len(response.content) < 20_000


async def test_docs_then_status_codes_and_field_names_stay_on_one_line() -> None:
    page = (await ask(front(), "GET", "/docs")).text
    assert "td:first-child, td:first-child code { white-space: nowrap }" in page
    assert '"default and meaning"' in page


async def test_endpoint_bug_is_500_in_the_common_error_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def names(_: Catalog, __: Tenant | None = None) -> list[str]:
        raise RuntimeError("secret")

    monkeypatch.setattr(Catalog, "names", names)
    response = await ask(front(), "GET", "/v1/models", headers={"x-request-id": "job-7"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "job-7"
