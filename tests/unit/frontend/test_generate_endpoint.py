"""Generations over HTTP against a scripted router: both answers, every refusal, errors before and
after headers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from dynamo_trtllm.frontend.requests.request_body import is_large_body
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.messages import FinishReason
from tests.kit.cases import each_case
from tests.kit.frontend_app import (
    CALL,
    CONTENT,
    END,
    HALF,
    MODEL,
    REASONING,
    Catalog,
    FakeFrontend,
    ScriptedRouter,
    chunk,
    front,
    stop,
)
from tests.kit.memory_http import asgi

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WHY = {"reasoning_content": "why", "reasoning": "why"}
USER = [{"role": "user", "content": "hi"}]


async def post(served: FakeFrontend, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=asgi(served.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.post(path, **({"json": body} if body is not None else {}), **kwargs)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi"} | fields


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert response.headers["x-request-id"]
    return str(error["message"])


# --- whole answers --------------------------------------------------------------------------------


async def test_chat_whole_then_reasoning_content_usage_and_headers() -> None:
    served = front(chunk("why", ids=[REASONING]), chunk("Hel", ids=[CONTENT]), chunk("lo"), stop())
    response = await post(served, CHAT, chat())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello", "refusal": None} | WHY
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert response.headers["x-prefill-instance"] == "ab"
    assert response.headers["x-decode-instance"] == "cd"
    assert "dynamo_trtllm" not in body
    assert served.router.running == 0


@pytest.mark.parametrize("size", [100, 900, 2000])
async def test_chat_with_slow_tokenizer_renders_off_the_loop(size: int) -> None:
    served = FakeFrontend(ScriptedRouter([stop("x")]), catalog=Catalog(context_length=10_000))
    response = await post(served, CHAT, chat(messages=[{"role": "user", "content": "a" * size}]))
    assert response.status_code == 200
    assert served.catalog.renderer.rendered_on_loop == [size < served.catalog.renderer.inline_bytes]


@pytest.mark.parametrize(
    ("size", "objects", "is_large"),
    [
        (20_000, 500, False),
        (20_000, 501, True),
        (16_000, 900, False),
    ],
)
def test_is_large_body_of_objects_begins_at_a_smaller_size(
    size: int, objects: int, is_large: bool
) -> None:
    # the last ones are text
    body = b'{\n"a":{}}' * (objects // 2) + b'{ "' * (objects % 2) + b'{\\"' * 900
    assert is_large_body(body + b" word" * ((size - len(body)) // 5)) is is_large


@pytest.mark.parametrize(
    ("size", "word", "is_large"),
    [(131_000, 8, False), (132_000, 8, True), (16_000, 40, False), (17_000, 40, True)],
)
def test_is_large_body_when_it_has_words_then_only_at_128_kib(
    size: int, word: int, is_large: bool
) -> None:
    assert is_large_body((b"x" * (word - 1) + b" ") * (size // word)) is is_large


async def test_chat_calling_a_tool_finishes_with_tool_calls() -> None:
    served = front(chunk("{", ids=[CALL]), chunk("}"), stop())
    tools = [
        {
            "type": "function",
            "function": {"name": "get_system_health", "parameters": {"type": "object"}},
        }
    ]
    body = (await post(served, CHAT, chat(tools=tools))).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_system_health", "arguments": "{}"}
    assert served.catalog.renderer.conversations[0].tools[0].name == "get_system_health"


async def test_length_when_tools_were_called_then_finish_is_length() -> None:
    served = front(chunk("{", ids=[CALL], finish=FinishReason.LENGTH))
    assert (await post(served, CHAT, chat())).json()["choices"][0]["finish_reason"] == "length"


async def test_text_whole_then_text_and_default_of_16_tokens() -> None:
    served = front(chunk("abc"), chunk("d", finish=FinishReason.LENGTH))
    body = (await post(served, TEXT, text())).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "abcd"
    assert served.router.requests[0].sampling.max_tokens == 16


async def test_text_prompt_ids_reach_the_router_unchanged() -> None:
    served = front(stop("x"))
    await post(served, TEXT, text(prompt=[5, 6, 7]))
    assert list(served.router.requests[0].token_ids) == [5, 6, 7]


async def test_stats_when_asked_for_then_both_calls_are_merged() -> None:
    served = front(chunk("a"), stop("b"))
    body = (await post(served, CHAT, chat(), headers={"x-dynamo-stats": "1"})).json()
    stats = body["dynamo_trtllm"]
    assert (stats["prefill_instance"], stats["decode_instance"]) == ("ab", "cd")
    assert (stats["kv_bytes"], stats["transport"]) == (4096, "nixl")
    assert {
        "queue",
        "prefill",
        "kv_transfer",
        "decode_wait",
        "receive",
        "tokenize",
        "respond",
    } <= set(stats["phase_s"])
    assert sum(stats["phase_s"].values()) == pytest.approx(stats["total_s"])
    assert stats["total_s"] >= stats["ttft_s"] >= 0


# --- streams --------------------------------------------------------------------------------------


async def test_chat_stream_begins_with_role_and_ends_with_done() -> None:
    served = front(
        chunk("why", ids=[REASONING]),
        chunk('He"', ids=[CONTENT]),
        chunk(ids=[HALF]),
        chunk("llo"),
        stop(),
    )
    response = await post(served, CHAT, chat(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-decode-instance"] == "cd"
    got = events(response)
    deltas = [event["choices"][0]["delta"] for event in got]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        WHY,
        {"content": 'He"'},
        {"content": "llo"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in got] == [None] * 4 + ["stop"]
    assert len({event["id"] for event in got}) == 1
    assert all("usage" not in event for event in got)


async def test_chat_stream_last_event_has_usage_and_stats() -> None:
    served = front(chunk("a"), stop("b"))
    body = chat(stream=True, stream_options={"include_usage": True})
    got = events(await post(served, CHAT, body, headers={"x-dynamo-stats": "1"}))
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 3
    assert got[-1]["dynamo_trtllm"]["kv_bytes"] == 4096
    assert all(event["usage"] is None for event in got[:-1])


async def test_chat_stream_of_a_tool_call_then_id_and_name_come_once() -> None:
    served = front(chunk("{", ids=[CALL]), chunk("}"), stop())
    got = events(await post(served, CHAT, chat(stream=True)))
    calls = [call for event in got for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"].get("name") for call in calls] == ["get_system_health", None]
    assert [bool(call.get("id")) for call in calls] == [True, False]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert got[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_chunks_closes_the_router(stream: bool) -> None:
    never = asyncio.Event()
    served = front(chunk("one ST"), chunk("O"), chunk("P two"), never)
    response = await post(served, CHAT, chat(stop="STOP", stream=stream))
    if stream:
        got = events(response)
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in got)
        finish = got[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        content = choice["message"]["content"]
        finish = choice["finish_reason"]
    assert (content, finish) == ("one ", "stop")
    assert served.router.running == 0


async def test_text_stream_then_text_events() -> None:
    got = events(await post(front(chunk("ab"), stop("c")), TEXT, text(stream=True)))
    assert [event["choices"][0]["text"] for event in got] == ["ab", "c", ""]
    assert {event["object"] for event in got} == {"text_completion"}


async def test_chat_logprobs_cover_content_without_infinities() -> None:
    served = front(
        chunk("w", ids=[REASONING], logprobs=True), chunk("h", ids=[CONTENT], logprobs=True), stop()
    )
    body = (await post(served, CHAT, chat(logprobs=True, top_logprobs=2))).json()
    (token,) = body["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("h", -0.5, [104])
    assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -9999.0]
    assert served.router.requests[0].sampling.logprobs == 2


async def test_logprobs_of_text_then_offsets_count_characters() -> None:
    served = front(chunk("ab", logprobs=True), chunk("c", logprobs=True), stop())
    streamed = events(await post(served, TEXT, text(logprobs=1, stream=True)))
    offsets = [event["choices"][0]["logprobs"] for event in streamed]
    assert [offset["text_offset"] for offset in offsets if offset] == [[0, 1], [2]]


# --- refusals -------------------------------------------------------------------------------------


async def test_malformed_json_then_400_with_position() -> None:
    response = await post(
        front(), CHAT, content=b'{"model": }', headers={"content-type": "application/json"}
    )
    assert "line 1, column 11" in check_error(response, 400, "invalid_request")


async def test_form_body_then_415() -> None:
    response = await post(
        front(), CHAT, content=b"{}", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    check_error(response, 415, "unsupported_media")


@pytest.mark.parametrize("declared", [True, False])
async def test_large_body_then_413(declared: bool) -> None:
    async def body() -> Any:
        yield b" " * 300

    content = b" " * 300 if declared else body()
    response = await post(
        front(max_body_bytes=200),
        CHAT,
        content=content,
        headers={"content-type": "application/json"},
    )
    check_error(response, 413, "payload_too_large")


async def test_unknown_model_then_404() -> None:
    check_error(await post(front(), CHAT, chat(model="nope")), 404, "model_not_found", "model")


async def test_unknown_field_then_400_with_the_nearest_name() -> None:
    message = check_error(
        await post(front(), CHAT, chat(temprature=1)), 400, "unsupported_parameter", "temprature"
    )
    assert "'temperature'" in message


async def test_prompt_longer_than_context_then_400_with_both_numbers() -> None:
    long = [{"role": "user", "content": "x" * 150}]
    message = check_error(
        await post(front(), CHAT, chat(messages=long)), 400, "context_length_exceeded", "messages"
    )
    assert "150" in message
    assert "100" in message


async def test_max_tokens_over_context_names_the_maximum() -> None:
    message = check_error(
        await post(front(), TEXT, text(max_tokens=99)), 400, "context_length_exceeded", "max_tokens"
    )
    assert "at most 98" in message


async def test_token_id_outside_the_vocabulary_then_400() -> None:
    message = check_error(
        await post(front(), TEXT, text(prompt=[1, 0x3000])), 400, "invalid_request", "prompt"
    )
    assert "prompt[1]" in message


async def test_empty_prompt_then_400() -> None:
    check_error(await post(front(), TEXT, text(prompt="")), 400, "invalid_request", "prompt")


@each_case("stream", [False, True])
@each_case(
    ("error", "status"),
    [
        (errors.NoInstances("no decode worker"), 503),
        (errors.Overloaded("full"), 429),
        (errors.DeadlineExceeded("late"), 504),
        (errors.RequestRejected("no"), 400),
    ],
)
async def test_error_before_the_first_chunk_then_its_own_status(
    stream: bool, error: errors.DynamoError, status: int
) -> None:
    response = await post(front(error), CHAT, chat(stream=stream))
    check_error(response, status, error.code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_error_after_first_chunk_has_its_status() -> None:
    check_error(
        await post(front(chunk("a"), errors.StreamIncomplete("gap")), CHAT, chat()),
        502,
        "incomplete",
    )


async def test_error_after_headers_ends_the_stream_with_an_event() -> None:
    response = await post(front(chunk("a"), errors.Disconnected("lost")), CHAT, chat(stream=True))
    got = events(response)
    assert response.status_code == 200
    assert got[1]["choices"][0]["delta"] == {"content": "a"}
    assert got[-1]["error"]["code"] == "disconnected"


async def test_stream_without_terminal_chunk_then_incomplete() -> None:
    check_error(await post(front(chunk("a")), CHAT, chat()), 502, "incomplete")


async def test_bug_in_the_router_then_500_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = await post(
        front(RuntimeError("secret")), CHAT, chat(), headers={"x-request-id": "job-7"}
    )
    assert "RuntimeError; see the log" in check_error(response, 500, "internal")
    (details,) = [record.getMessage() for record in caplog.records if record.exc_info]
    assert details.startswith("request failed: job-7-")
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_request_when_memory_is_short_then_429() -> None:
    check_error(await post(front(MemoryError()), CHAT, chat()), 429, "overloaded")  # type: ignore[arg-type]


async def test_request_over_max_inflight_is_429_then_accepted() -> None:
    held = asyncio.Event()
    served = front(chunk("a"), held, stop(), max_inflight=1, max_queued=0)
    first = asyncio.create_task(post(served, CHAT, chat()))
    await served.router.begun.wait()
    check_error(await post(served, CHAT, chat()), 429, "overloaded")
    held.set()
    assert (await first).status_code == 200
    assert (await post(served, CHAT, chat())).status_code == 200


async def test_long_body_is_prepared_in_a_thread_and_released() -> None:
    held = asyncio.Event()
    served = front(chunk("o"), held, stop("k"))
    answering = asyncio.create_task(
        post(served, CHAT, chat(prompt_cache_options={"pad": "x" * 100_000}))
    )
    await served.router.begun.wait()
    assert "dynamo_trtllm_body_bytes 0.0" in served.metrics.render().decode()
    held.set()
    assert (await answering).json()["choices"][0]["message"]["content"] == "ok"


# --- what reaches the engine ----------------------------------------------------------------------


async def test_sampling_then_each_field_arrives() -> None:
    served = front(stop("a"))
    await post(
        served,
        CHAT,
        chat(
            max_completion_tokens=7,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=4,
            seed=9,
            stop_token_ids=[65],
        ),
    )
    sampling = served.router.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0.0)
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 4, 9)
    assert sampling.stop_token_ids == (65, END)
    assert not sampling.ignore_eos


async def test_ignore_eos_then_the_format_stops_are_not_given() -> None:
    served = front(stop("a"))
    await post(served, CHAT, chat(nvext={"ignore_eos": True}))
    sampling = served.router.requests[0].sampling
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == ()
    assert sampling.max_tokens == 98


async def test_own_stop_token_then_its_text_is_not_shown() -> None:
    served = front(chunk("abc", finish=FinishReason.STOP))
    body = (await post(served, TEXT, text(stop_token_ids=[ord("c")]))).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3


async def test_reasoning_effort_from_template_args_then_it_is_rendered() -> None:
    served = front(stop("a"))
    await post(served, CHAT, chat(chat_template_args={"reasoning_effort": "low"}))
    assert served.catalog.renderer.conversations[0].reasoning_effort == "low"
