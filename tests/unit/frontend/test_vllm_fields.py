"""Fields of vLLM: usage in each event, log-probabilities and truncation of prompts, special tokens
in the text.
"""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest, UnsupportedParameter
from dynamo_trtllm.protocol.messages import Chunk, FinishReason, token_ids
from tests.kit import frontend_app, generation_plans
from tests.kit.answer_parts import content_of
from tests.kit.frontend_app import CALL, chunk, front, stop
from tests.kit.generation_plans import TemplateModels
from tests.kit.small_tokenizer import CONTROL
from tests.unit.frontend.test_compatibility import IGNORED, RESPONSES, response
from tests.unit.frontend.test_generate_endpoint import (
    CHAT,
    TEXT,
    chat,
    check_error,
    events,
    post,
    text,
)

# --- usage of each event --------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (TEXT, text)])
async def test_continuous_usage_stats_are_in_each_event(path: str, body: Any) -> None:
    served = front(chunk("a\U0001d11e"), chunk('b"usage":null}'), stop())
    wanted = body(
        stream=True, n=2, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    *parts, last = events(await post(served, path, wanted))
    for index in range(2):
        usages = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
        assert usages[-3:] == [
            {"prompt_tokens": 2, "completion_tokens": made, "total_tokens": 2 + made}
            for made in (2, 16, 17)
        ]
    if path == CHAT:
        assert parts[0]["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    assert (
        "".join(delta_text(part) for part in parts if part["choices"][0]["index"] == 0)
        == 'a\U0001d11eb"usage":null}'
    )
    assert last["usage"]["completion_tokens"] == 34


def delta_text(event: dict[str, Any]) -> str:
    (choice,) = event["choices"]
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat(stream=True)), (RESPONSES, response(stream=True)), (TEXT, text(stream=True))],
)
async def test_continuous_usage_stats_without_usage_are_400(path: str, body: Any) -> None:
    options = {"continuous_usage_stats": True, "include_usage": path == RESPONSES}
    answer = await post(front(stop("a")), path, body | {"stream_options": options})
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


# --- log-probabilities of prompts -----------------------------------------------------------------


def scored(text: str) -> Chunk:
    return chunk(text, logprobs=True, finish=FinishReason.LENGTH)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_logprobs_of_prompt_precede_the_answer(stream: bool) -> None:
    served = front(scored("de"))
    answer = await post(
        served, TEXT, text(prompt="abc", echo=True, logprobs=1, max_tokens=2, stream=stream)
    )
    if stream:
        choices = [event["choices"][0] for event in events(answer)]
        (logprobs,) = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert "".join(choice["text"] for choice in choices) == "abcde"
    else:
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "abcde"
        logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"abcde"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs["top_logprobs"][:3] == [None, {"b": -1.0}, {"c": -2.0}]
    assert served.router.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_when_no_token_is_wanted_then_only_the_prompt(logprobs: int | None) -> None:
    served = front(scored("d") if logprobs is not None else chunk("d", finish=FinishReason.LENGTH))
    body = (
        await post(
            served, TEXT, text(prompt=["abc", [65]], echo=True, logprobs=logprobs, max_tokens=0)
        )
    ).json()
    assert [choice["text"] for choice in body["choices"]] == ["abc", "A"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    if logprobs is not None:
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert body["usage"]["completion_tokens"] == 0
    assert served.router.requests[0].sampling.max_tokens == 1


async def test_logprobs_without_echo_exclude_the_prompt() -> None:
    served = front(scored("d"))
    body = (await post(served, TEXT, text(logprobs=1))).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["d"]
    assert served.router.requests[0].sampling.prompt_logprobs is None


async def test_max_tokens_0_without_echo_then_400() -> None:
    check_error(await post(front(), TEXT, text(max_tokens=0)), 400, "invalid_request", "max_tokens")


def test_echo_logprobs_without_engine_support_name_echo(harmony: ServedModel) -> None:
    served = generation_plans.refusing(harmony, "prompt_logprobs")
    generation_plans.text(served, echo=True)
    with pytest.raises(UnsupportedParameter) as refused:
        generation_plans.text(served, echo=True, logprobs=1)
    assert refused.value.field == "echo"


def test_echo_logprobs_of_too_long_prompts_are_rejected(harmony: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match="128000 prompt tokens; at most 65536") as refused:
        generation_plans.text(harmony, prompt=[[7] * 1000] * 128, echo=True, logprobs=1)
    assert refused.value.field == "echo"


async def test_echo_logprobs_missing_from_older_worker_are_502(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontend_app, "prompt_logprobs", lambda *_: [])
    answer = await post(front(scored("d")), TEXT, text(echo=True, logprobs=1))
    assert "upgrade it" in check_error(answer, 502, "incomplete")


async def test_prompt_logprobs_are_in_each_text_choice() -> None:
    wanted = [
        None,
        {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -2.0, "rank": 1, "decoded_token": "c"}},
    ]
    served = front(scored("d"))
    body = (await post(served, TEXT, text(prompt=["abc", "x"], n=2, prompt_logprobs=1))).json()
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [
        wanted,
        wanted,
        [None],
        [None],
    ]
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    served = front(scored("d"))
    messages = [{"role": "user", "content": "abc"}]
    body = (await post(served, CHAT, chat(messages=messages, n=2, prompt_logprobs=1))).json()
    assert body["prompt_logprobs"] == wanted
    assert not any("prompt_logprobs" in choice for choice in body["choices"])
    assert [request.sampling.prompt_logprobs for request in served.router.requests] == [1, None]


async def test_prompt_logprobs_and_echo_have_own_alternatives() -> None:
    served = front(scored("d"))
    fields = {"prompt": "abc", "echo": True, "logprobs": 0, "prompt_logprobs": 1, "max_tokens": 0}
    (choice,) = (await post(served, TEXT, text(**fields))).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -1.0}, {"c": -2.0}]
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None, 1, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ],
)
async def test_field_of_vllm_when_its_value_is_wrong_then_400(
    fields: dict[str, Any], param: str
) -> None:
    for path, body in ((CHAT, chat), (TEXT, text)):
        check_error(
            await post(front(stop("x")), path, body(**fields)), 400, "invalid_request", param
        )


def test_prompt_logprobs_unsupported_or_too_long_are_rejected(harmony: ServedModel) -> None:
    for plan in (generation_plans.chat, generation_plans.text):
        with pytest.raises(UnsupportedParameter) as refused:
            plan(generation_plans.refusing(harmony, "prompt_logprobs"), prompt_logprobs=0)
        assert refused.value.field == "prompt_logprobs"
    with pytest.raises(InvalidRequest, match="20000 prompt tokens; at most 18724"):
        generation_plans.text(harmony, prompt=[[7] * 1000] * 20, prompt_logprobs=20)


# --- prompts that are too long, and special tokens ------------------------------------------------


async def test_truncate_prompt_tokens_uses_the_end_of_the_prompt() -> None:
    served = front(stop("x"))
    body = (
        await post(served, TEXT, text(prompt=["abcd", "e"], truncate_prompt_tokens=2, echo=True))
    ).json()
    assert [choice["text"] for choice in body["choices"]] == ["cdx", "ex"]
    assert body["usage"]["prompt_tokens"] == 3
    messages = [{"role": "user", "content": "abcd"}]
    await post(served, CHAT, chat(messages=messages, truncate_prompt_tokens=3))
    assert [[*request.token_ids] for request in served.router.requests] == [
        [*b"cd"],
        [*b"e"],
        [*b"bcd"],
    ]


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, (84, 99)), (30, (70, 70)), (100, (1, 1))])
async def test_truncate_prompt_tokens_minus_1_fits_the_context(
    max_tokens: int | None, kept: tuple[int, int]
) -> None:
    served = front(stop("x"))
    long = "y" * 200
    fields: dict[str, Any] = {"truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    for path, body in (
        (TEXT, text(prompt=long)),
        (CHAT, chat(messages=[{"role": "user", "content": long}])),
    ):
        answer = await post(served, path, body | fields)
        assert answer.status_code == (200 if max_tokens != 100 else 400)
    if max_tokens != 100:  # of 100 tokens of context
        assert tuple(len(request.token_ids) for request in served.router.requests) == kept


async def test_skip_special_tokens_false_shows_them() -> None:
    served = front(chunk("a", ids=[CALL]), stop("b"))
    for stream in (False, True):
        answer = await post(served, TEXT, text(skip_special_tokens=False, stream=stream))
        parts = events(answer) if stream else [answer.json()]
        assert "".join(part["choices"][0]["text"] for part in parts) == chr(CALL) + "ab"
    answer = await post(served, TEXT, text())
    assert answer.json()["choices"][0]["text"] == "ab"


async def test_skip_special_tokens_in_harmony_is_named_in_a_header() -> None:
    answer = await post(front(stop("a")), CHAT, chat(skip_special_tokens=False))
    assert answer.json()["choices"][0]["message"]["content"] == "a"
    assert answer.headers[IGNORED] == "skip_special_tokens"


def test_skip_special_tokens_false_shows_them_in_a_template(make_template: TemplateModels) -> None:
    served = make_template()
    for skips, shown in ((True, ""), (False, "<|channel|>")):
        parser = generation_plans.chat(served, skip_special_tokens=skips).choices[0].make_parser()
        ids = [CONTROL["<|channel|>"], CONTROL["<|end|>"]]
        assert content_of(parser.push(token_ids(ids))) + content_of(parser.finish()) == shown
