"""Send one sample request to a ready deployment, and report which workers processed it and how fast."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Mapping
from functools import partial
from typing import Any

from dynamo_trtllm.launch.readiness_checks import NotYet, request, until
from dynamo_trtllm.subprocesses import RunFailed

PROMPT = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
_PROMPTS = {"smollm2": "What is the capital of France?"}  # by model, where PROMPT is too hard
MAX_TOKENS = 200
_PATH = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 120.0
_MODEL_TIMEOUT_S = 30.0


def body(model: str) -> dict[str, Any]:
    """Return the sample request of Dynamo's gpt-oss-120b guides, with greedy sampling so that all runs are equal."""
    message = {"role": "user", "content": _PROMPTS.get(model, PROMPT)}
    return {"model": model, "messages": [message], "stream": False, "max_tokens": MAX_TOKENS, "temperature": 0}


async def ask(frontend: str, model: str) -> dict[str, Any]:
    """Send the sample request. Wait first until the frontend has the model's files, some time after it is ready.

    Args:
        frontend: HOST:PORT of the frontend.
        model: Name of the model.

    Returns:
        The response body, with the frontend's statistics under `dynamo_trtllm`.

    Raises:
        RunFailed: The model was not ready in time, or the request failed.
    """
    path = f"/v1/models/{urllib.parse.quote(model)}/ready"
    try:
        await until(partial(_request, frontend, "GET", path), _MODEL_TIMEOUT_S)
    except NotYet as exc:
        raise RunFailed(f"model {model} was not ready within {_MODEL_TIMEOUT_S:g} s: {exc}") from exc
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            answer: dict[str, Any] = await _request(frontend, "POST", _PATH, json.dumps(body(model)).encode())
            return answer
    except (NotYet, OSError) as exc:
        raise RunFailed(f"the demo request failed: {str(exc) or 'no response'}") from exc


async def _request(frontend: str, method: str, path: str, content: bytes = b"") -> Any:
    """Return the JSON body of a response. Raise NotYet if its status is not 200."""
    host, _, port = frontend.rpartition(":")
    headers = {"Content-Type": "application/json", "x-dynamo-stats": "1"}
    status, answer = await request(host.strip("[]"), int(port), method, path, content, headers)
    if status != 200:
        raise NotYet(f"status {status}: {answer.decode(errors='replace').strip()}")
    return json.loads(answer)


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
    phases = (f"{name} {s * 1e3:.0f} ms" for name, s in stats["phase_s"].items() if s >= 0.0005)
    lines.append("phases:     " + ", ".join(phases))
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
