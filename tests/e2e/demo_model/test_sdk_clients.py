"""Errors and headers in the OpenAI SDK, clients of it that leave, and the terminal client, through
real processes.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.e2e.demo_model.torch_cluster import AGGREGATED, TorchCluster
from tests.kit.cluster import PLAIN, START_TIMEOUT_S, TINY, Process, command, gauges, until
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

CHAT_CLIENT = "dynamo_trtllm.chat"
HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": TINY, "messages": HELLO, "temperature": 0}
ENDLESS: dict[str, Any] = {
    "model": TINY,
    "messages": HELLO,
    "max_tokens": 1500,
    "extra_body": {"ignore_eos": True},
}


def check_idle(torch: TorchCluster) -> None:
    """Neither worker holds anything of any request: far sooner than an endless answer would end."""
    for worker in (torch.prefill, torch.decode):
        until(functools.partial(_holds_nothing, worker), SOON_S)


def _holds_nothing(worker: Process) -> bool:
    found = gauges(worker)
    return not any(
        found[name] for name in ("running", "waiting", "pending_kv_transfers", "kv_blocks_used")
    )


REFUSED: dict[str, tuple[Callable[[openai.OpenAI], Any], type[openai.APIStatusError], str, str | None]] = {
    "unknown model": (
        lambda sdk: sdk.chat.completions.create(model="org/none", messages=HELLO),
        openai.NotFoundError, "model_not_found", "model",
    ),
    "unknown model, looked up": (
        lambda sdk: sdk.models.retrieve("org/none"), openai.NotFoundError, "model_not_found", "model",
    ),
    "suffix": (
        lambda sdk: sdk.completions.create(model=TINY, prompt="x", suffix="y"),
        openai.BadRequestError, "unsupported_parameter", "suffix",
    ),
    "too long": (
        lambda sdk: sdk.completions.create(model=TINY, prompt=[7], max_tokens=10**6),
        openai.BadRequestError, "context_length_exceeded", "max_tokens",
    ),
    "endpoint that is none": (
        lambda sdk: sdk.embeddings.create(model=TINY, input="x"), openai.NotFoundError, "unknown_url", None,
    ),
    "misspelled field of a stream": (
        lambda sdk: sdk.chat.completions.create(**GREEDY, stream=True, extra_body={"nvext": {"cache_salts": "x"}}),
        openai.BadRequestError, "unsupported_parameter", "nvext.cache_salts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_sdk_exception_has_code_param_and_request_id(sdk: openai.OpenAI, name: str) -> None:
    ask, kind, code, param = REFUSED[name]
    with pytest.raises(kind) as caught:
        ask(sdk)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.fixture
def narrow(torch_cluster: TorchCluster) -> Iterator[openai.OpenAI]:
    """A frontend of the same workers that takes one request at a time."""
    cluster = torch_cluster.cluster
    argv = ["--http-port", "0", "--max-inflight", "1", "--max-queued", "0"]
    frontend = Process("dynamo_trtllm.frontend", argv, cluster.env)
    try:
        frontend.wait_for(f"model {TINY} is ready")
        with openai.DefaultHttpxClient(**PLAIN) as http:
            yield openai.OpenAI(
                base_url=f"{frontend.url()}/v1", api_key="none", http_client=http, max_retries=0
            )
    finally:
        frontend.stop()


def test_full_frontend_rate_limits_and_retry_succeeds(narrow: openai.OpenAI) -> None:
    stream = narrow.chat.completions.create(**ENDLESS, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        narrow.chat.completions.create(**GREEDY, max_tokens=1)
    assert (caught.value.code, caught.value.type) == ("overloaded", "rate_limit_error")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    stream.close()
    patient = narrow.with_options(max_retries=3)
    assert patient.chat.completions.create(**GREEDY, max_tokens=1).choices


def test_request_id_when_given_or_not_then_on_every_answer(sdk: openai.OpenAI) -> None:
    given = {"x-request-id": "sdk-test.1"}
    raw = sdk.chat.completions.with_raw_response.create(**GREEDY, max_tokens=1, extra_headers=given)
    assert raw.headers["x-request-id"] == raw.request_id == raw.parse()._request_id == "sdk-test.1"
    first = sdk.chat.completions.create(**GREEDY, max_tokens=1)
    second = sdk.chat.completions.create(**GREEDY, max_tokens=1)
    assert first._request_id
    assert first._request_id != second._request_id
    asked = GREEDY | {"max_tokens": 4, "stream": True, "extra_headers": given}
    with sdk.chat.completions.with_streaming_response.create(**asked) as streaming:
        assert streaming.headers["x-request-id"] == "sdk-test.1"
        assert streaming.headers["x-decode-instance"]
        assert len(list(streaming.parse())) > 1


def test_client_when_it_leaves_midway_then_the_workers_are_idle(
    sdk: openai.OpenAI, torch_cluster: TorchCluster
) -> None:
    with sdk.chat.completions.create(**ENDLESS, stream=True) as stream:
        for _ in range(3):
            next(iter(stream))
        assert gauges(torch_cluster.decode)["running"] == 1.0
    check_idle(torch_cluster)


async def test_cancelled_async_client_leaves_workers_idle(
    async_sdk: openai.AsyncOpenAI, torch_cluster: TorchCluster
) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async with async_sdk.chat.completions.stream(**ENDLESS) as stream:
            async for _ in stream:
                begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await asyncio.to_thread(check_idle, torch_cluster)


def test_client_timeout_leaves_workers_idle(
    sdk: openai.OpenAI, torch_cluster: TorchCluster
) -> None:
    with pytest.raises(openai.APITimeoutError):
        sdk.with_options(timeout=0.5).chat.completions.create(**ENDLESS)
    check_idle(torch_cluster)


def test_chat_from_a_pipe_answers_each_question_without_colors(torch_cluster: TorchCluster) -> None:
    cluster = torch_cluster.cluster
    argv = [
        "--url",
        cluster.frontend.url(),
        "--model",
        TINY,
        "--temperature",
        "0",
        "--max-tokens",
        "24",
    ]
    done = subprocess.run(
        [sys.executable, "-m", CHAT_CLIENT, *argv, "--reasoning-effort", "low"],
        input="What is prefill?\n\nWhat is decode?\n",
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr.count("TTFT"), done.stderr.count("tokens/s")) == (
        0,
        2,
        2,
    ), done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "\x1b" not in done.stdout + done.stderr
    assert "<|" not in done.stdout


def test_chat_when_several_models_exist_then_lists_them(torch_cluster: TorchCluster) -> None:
    cluster = torch_cluster.cluster
    status, said = command([CHAT_CLIENT, "--url", cluster.frontend.url()], cluster.env)
    assert status == 2
    assert len(said) == 1
    assert f"choose one with --model: {AGGREGATED}, {TINY}" in said[0]
