"""Sends one question to a ready deployment, and reports which workers answered it and how fast."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

PROMPT = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
_PROMPTS = {"smollm2": "What is the capital of France?"}  # of models that can't answer the guides' question
MAX_TOKENS = 200
_PATH = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 120.0
_KNOWN_WITHIN_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 0.5


class DemoFailed(Exception):
    """No answer. The message says what the frontend said."""


def body(model: str) -> dict[str, Any]:
    """Return the request of the guides, with a question that the model can answer, and greedy: equal each time."""
    message = {"role": "user", "content": _PROMPTS.get(model, PROMPT)}
    return {"model": model, "messages": [message], "stream": False, "max_tokens": MAX_TOKENS, "temperature": 0}


def ask(frontend: str, model: str, given_up: threading.Event) -> dict[str, Any]:
    """The answer's JSON, with the frontend's own account of it. `frontend` is HOST:PORT. Blocks; waits for the model
    until `given_up` is set at the longest. Raises DemoFailed."""
    try:
        _await_model(frontend, model, given_up)
        status, text = _request(frontend, "POST", _PATH, json.dumps(body(model)).encode())
    except (OSError, http.client.HTTPException) as exc:
        raise DemoFailed(f"the demo's request failed: {exc}") from exc
    if status != 200:
        raise DemoFailed(f"the demo's request was answered {status}: {text.strip()}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _await_model(frontend: str, model: str, given_up: threading.Event) -> None:
    """The frontend takes connections, and has fetched the model's files, some time after the workers are up."""
    deadline, wait_s = time.monotonic() + _KNOWN_WITHIN_S, _FIRST_WAIT_S
    while True:
        try:
            status, text = _request(frontend, "GET", f"/v1/models/{urllib.parse.quote(model)}/ready", None)
        except ConnectionRefusedError as exc:
            status, text = 0, str(exc)
        if status == 200:
            return
        if time.monotonic() >= deadline:
            raise DemoFailed(f"model {model} was not ready within {_KNOWN_WITHIN_S:g} s: {text.strip()}")
        if given_up.wait(wait_s):
            raise DemoFailed("stopped before the demo's question")
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
    """Return lines for people.

    Args:
        names: instance ids in hexadecimal to the names of the launcher.
        is_mock: the answer is the mock engine's, which has no model.
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
    """What to try next, ready to be pasted."""
    request = body(model) | {"stream": True}
    return (
        "\ntry it yourself, streaming:\n"
        f"curl -N {frontend}{_PATH} -H 'Content-Type: application/json' -d '{json.dumps(request)}'"
    )


def _process_name(instance: str | None, names: Mapping[str, str]) -> str:
    if instance is None:
        return "none"
    return f"{names.get(instance, 'a worker of another launcher')} (instance {instance})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
