"""Send one sample request to a ready deployment, and report which workers processed it and how fast."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

PROMPT = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
_PROMPTS = {"smollm2": "What is the capital of France?"}  # by model, where PROMPT is too hard
MAX_TOKENS = 200
_PATH = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 120.0
_MODEL_TIMEOUT_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 0.5


class DemoFailed(Exception):
    """The sample request failed. The message contains the frontend's answer."""


def body(model: str) -> dict[str, Any]:
    """Return the sample request of Dynamo's gpt-oss-120b guides, with greedy sampling so that all runs are equal."""
    message = {"role": "user", "content": _PROMPTS.get(model, PROMPT)}
    return {"model": model, "messages": [message], "stream": False, "max_tokens": MAX_TOKENS, "temperature": 0}


def ask(frontend: str, model: str, given_up: threading.Event) -> dict[str, Any]:
    """Send the sample request, and wait until the model is ready first. The call blocks.

    Args:
        frontend: HOST:PORT of the frontend.
        model: Name of the model.
        given_up: Ends the wait for the model when set.

    Returns:
        The response body, with the frontend's statistics under `dynamo_trtllm`.

    Raises:
        DemoFailed: The model was not ready in time, or the request failed.
    """
    try:
        _await_model(frontend, model, given_up)
        status, text = _request(frontend, "POST", _PATH, json.dumps(body(model)).encode())
    except (OSError, http.client.HTTPException) as exc:
        raise DemoFailed(f"the demo request failed: {exc}") from exc
    if status != 200:
        raise DemoFailed(f"the demo request failed with status {status}: {text.strip()}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _await_model(frontend: str, model: str, given_up: threading.Event) -> None:
    """Wait until the frontend listens and has fetched the model's files, some time after the workers are ready."""
    deadline, wait_s = time.monotonic() + _MODEL_TIMEOUT_S, _FIRST_WAIT_S
    while True:
        try:
            status, text = _request(frontend, "GET", f"/v1/models/{urllib.parse.quote(model)}/ready", None)
        except ConnectionRefusedError as exc:
            status, text = 0, str(exc)
        if status == 200:
            return
        if time.monotonic() >= deadline:
            raise DemoFailed(f"model {model} was not ready within {_MODEL_TIMEOUT_S:g} s: {text.strip()}")
        if given_up.wait(wait_s):
            raise DemoFailed("stopped before the demo request")
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _request(frontend: str, method: str, path: str, content: bytes | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(frontend, timeout=_ANSWER_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "x-dynamo-stats": "1"}
        connection.request(method, path, body=content, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def report(answer: Mapping[str, Any], model: str, names: Mapping[str, str], *, is_mock: bool = False) -> str:
    """Format the answer and its statistics as text.

    Args:
        answer: Return value of `ask`.
        model: Name of the model.
        names: Process name by instance id (hexadecimal).
        is_mock: The mock engine, which has no model, gave the answer.
    """
    message = answer["choices"][0]["message"]
    stats = answer["dynamo_trtllm"]
    lines = ["", f"question:   {_PROMPTS.get(model, PROMPT)}"]
    if message.get("reasoning_content"):
        lines.append(f"reasoning:  {_one_line(message['reasoning_content'])}")
    lines.append(f"answer:     {_one_line(message.get('content') or '(none)')}")
    if is_mock:
        lines.append("            (random text: the mock engine has no model. It shows routing and transfers only.)")
    lines.append(f"prefill by: {_process_name(stats['prefill_instance'], names)}")
    lines.append(f"decode by:  {_process_name(stats['decode_instance'], names)}")
    lines.append(f"KV moved:   {stats['kv_bytes']:,} bytes over {stats['transport'] or 'nothing'}")
    lines.append(f"TTFT:       {stats['ttft_s'] * 1e3:.0f} ms")
    if stats["tokens_per_s"] is not None:
        lines.append(f"speed:      {stats['tokens_per_s']:.0f} tokens/s")
    lines.append("phases:     " + ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in stats["phase_s"].items()))
    return "\n".join(lines)


def next_step(frontend: str, model: str) -> str:
    """Return a curl command for a streaming request, to copy into a shell."""
    request = body(model) | {"stream": True}
    return (
        "\nTry a streaming request:\n"
        f"curl -N {frontend}{_PATH} -H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    )


def _process_name(instance: str | None, names: Mapping[str, str]) -> str:
    if instance is None:
        return "none"
    return f"{names.get(instance, 'a worker of another deployment')} (instance {instance})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
