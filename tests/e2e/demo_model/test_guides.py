"""What the guides tell people to send, byte for byte but for the model's name, against the demo
model.

The guides' answers are held by structure and meaning: their fields, the call, who answers what.
Never the words. The guides set no temperature, so an answer to a request as written is sampled: its
meaning is checked greedily.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from tests.e2e.demo_model.guides import FIRST, GUIDES, REQUESTS, SECOND
from tests.e2e.demo_model.torch_cluster import TorchCluster
from tests.kit.cluster import TINY, events

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

CHAT = "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0}
CHATS = [name for name, body in REQUESTS.items() if "messages" in body]
# Only their meaning is known, which a greedy answer has.
ROUNDS = [name for name in CHATS if " round " in name]
STREAMED = (FIRST, SECOND)
RESPONSES = "responses 000 001 004"
EXPLAIN = REQUESTS[RESPONSES]["input"]
# what the benchmark adds
OPERATOR = {"Authorization": "Bearer NOT USED", "Accept": "text/event-stream"}


EFFORTS = ("low", "medium", "high")


class Asked(NamedTuple):
    as_written: dict[str, httpx.Response]
    greedy: dict[str, httpx.Response]
    streamed: dict[str, httpx.Response]
    efforts: list[httpx.Response]
    benchmark: httpx.Response
    responses: httpx.Response


@pytest.fixture(scope="module")
def asked(torch_cluster: TorchCluster) -> Asked:
    """All that is asked here and needs no other answer, sent at once: a step of the model then
    serves many requests.
    """
    explain: dict[str, Any] = {"model": TINY, "messages": [{"role": "user", "content": EXPLAIN}]}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    with torch_cluster.cluster.client() as client, ThreadPoolExecutor(32) as pool:

        def send(
            path: str, body: dict[str, Any], headers: Mapping[str, str] = {}
        ) -> Future[httpx.Response]:
            return pool.submit(client.post, path, json=body, headers=headers)

        benchmark = send(CHAT, explain | GUIDES["benchmark"] | usage, OPERATOR)
        thinking = [
            {"chat_template_args": {"reasoning_effort": effort}, "max_tokens": 100}
            for effort in EFFORTS
        ]
        efforts = [send(CHAT, explain | GREEDY | effort) for effort in thinking]
        as_written = {name: send(CHAT, REQUESTS[name]) for name in CHATS}
        greedy = {name: send(CHAT, REQUESTS[name] | GREEDY) for name in ROUNDS}
        streamed = {name: send(CHAT, REQUESTS[name] | GREEDY | usage) for name in STREAMED}
        responses = send("/v1/responses", REQUESTS[RESPONSES])
        return Asked(
            as_written={name: future.result() for name, future in as_written.items()},
            greedy={name: future.result() for name, future in greedy.items()},
            streamed={name: future.result() for name, future in streamed.items()},
            efforts=[future.result() for future in efforts],
            benchmark=benchmark.result(),
            responses=responses.result(),
        )


def answer_of(name: str) -> dict[str, Any] | None:
    """The guide's own."""
    found: dict[str, Any] | None = next(
        (expected for kind, expected in GUIDES["answers"].items() if name.startswith(kind)), None
    )
    return found


def check_shape(expected: Any, got: Any, where: str = "answer") -> None:
    """All that the guide shows is there, of the same kind. Where it shows null, anything may be."""
    if isinstance(expected, dict):
        assert isinstance(got, dict), where
        for key, value in expected.items():
            assert key in got, f"{where}.{key}"
            check_shape(value, got[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(got, list), where
        assert got, where
        for answer in got:
            check_shape(expected[0], answer, f"{where}[]")
    elif expected is not None:
        assert type(got) is type(expected), where
        assert got or not expected, where


def check_usage(usage: dict[str, Any], most: int) -> None:
    assert usage["prompt_tokens"] > 60
    assert 1 <= usage["completion_tokens"] <= most
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def check_choice(name: str, message: dict[str, Any], finish: str) -> None:
    assert message["role"] == "assistant"
    assert message["reasoning_content"]
    if name.startswith("first round"):
        assert (finish, message["content"]) == ("tool_calls", None)
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call-")
        assert (call["type"], call["function"]) == (
            "function",
            {"name": "get_system_health", "arguments": "{}"},
        )
        return
    assert "tool_calls" not in message
    assert message["content"]
    if name.startswith("second round"):
        assert finish == "stop"
        assert "up and running" in message["content"]  # as the tool's result says
    assert finish in ("stop", "length")


@pytest.mark.parametrize("name", CHATS)
def test_chat_when_asked_as_in_the_guides_then_answered_as_there(asked: Asked, name: str) -> None:
    answers = [asked.as_written[name]]
    if name in ROUNDS:
        answers.append(asked.greedy[name])
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert "<|" not in answer.text
        ChatCompletion.model_validate_json(answer.text, strict=True)
        body = answer.json()
        assert body["id"].startswith("chatcmpl-")
        assert (body["object"], body["model"]) == ("chat.completion", TINY)
        check_usage(body["usage"], REQUESTS[name]["max_tokens"])
    check_shape(answer_of(name) or {}, body)
    (choice,) = body["choices"]
    assert choice["index"] == 0
    check_choice(name, choice["message"], choice["finish_reason"])


@pytest.mark.parametrize("name", STREAMED)
def test_chat_streamed_equals_the_guides_answer(asked: Asked, name: str) -> None:
    whole = asked.greedy[name].json()
    answer = asked.streamed[name]
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = list(events(answer.iter_lines()))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *parts, totals = chunks
    # what the prefix cache had
    cached = {"prompt_tokens_details": whole["usage"]["prompt_tokens_details"]}
    assert (totals["choices"], totals["usage"] | cached) == ([], whole["usage"])
    choices = [chunk["choices"][0] for chunk in parts]
    assert choices[0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes == [None] * (len(finishes) - 1) + [whole["choices"][0]["finish_reason"]]
    message = whole["choices"][0]["message"]
    assert joined(choices, "content") == (message["content"] or "")
    assert joined(choices, "reasoning_content") == message["reasoning_content"]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == names(
        message
    )
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert arguments == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls", ())
    )


def joined(choices: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for choice in choices)


def names(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def test_second_round_passes_the_tool_result_to_the_model(asked: Asked, tiny: httpx.Client) -> None:
    first = asked.greedy[FIRST].json()["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    question, _, result = REQUESTS[SECOND]["messages"]
    result = result | {"tool_call_id": first["message"]["tool_calls"][0]["id"]}
    second = tiny.post(
        CHAT, json=REQUESTS[SECOND] | GREEDY | {"messages": [question, first["message"], result]}
    )
    assert second.status_code == 200, second.text
    choice = second.json()["choices"][0]
    check_choice(SECOND, choice["message"], choice["finish_reason"])


def test_responses_of_the_guides_request_are_complete(asked: Asked) -> None:
    answer = asked.responses
    assert answer.status_code == 200, answer.text
    response = Response.model_validate_json(answer.text, strict=True)
    assert (response.object, response.model) == ("response", TINY)
    # sampled: it may think until its tokens are used up
    assert response.status in ("completed", "incomplete")
    assert response.output[0].type == "reasoning"
    assert "<|" not in answer.text
    assert response.usage is not None
    assert response.usage.input_tokens > 60
    assert 1 <= response.usage.output_tokens <= REQUESTS[RESPONSES]["max_output_tokens"]
    assert answer.headers["x-prefill-instance"] != answer.headers["x-decode-instance"]


def test_effort_increases_the_length_of_thinking(asked: Asked) -> None:
    assert [answer.status_code for answer in asked.efforts] == [200] * len(EFFORTS)
    usages = [answer.json()["usage"] for answer in asked.efforts]
    low, medium, high = (usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages)
    assert 0 < low < medium < high


def test_benchmarks_request_then_as_many_tokens_as_it_wants(asked: Asked) -> None:
    assert asked.benchmark.status_code == 200
    *_, last, totals = events(asked.benchmark.iter_lines())
    assert last["choices"][0]["finish_reason"] == "length"
    assert totals["usage"]["completion_tokens"] == GUIDES["benchmark"]["max_tokens"]


def test_health_when_all_serve_then_both_guides_shapes(
    tiny: httpx.Client, torch_cluster: TorchCluster
) -> None:
    body = tiny.get("/health").json()
    for expected in GUIDES["health"]:
        check_shape(expected, body)
    namespace = torch_cluster.cluster.env["DYN_NAMESPACE"]
    assert body["status"] == "healthy"
    endpoints = {
        expected.replace("dynamo", namespace) for expected in GUIDES["health"][0]["endpoints"]
    }
    assert set(body["endpoints"]) == endpoints
    by_id = {f"{instance['instance_id']:x}": instance for instance in body["instances"]}
    workers = (torch_cluster.prefill, torch_cluster.decode, torch_cluster.aggregated)
    assert set(by_id) == {worker.instance() for worker in workers}
    assert by_id[torch_cluster.prefill.instance()]["component"] == "prefill"
