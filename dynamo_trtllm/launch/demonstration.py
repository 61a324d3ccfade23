"""Show that a deployment works: send it a sample request, and write what came back (`--demo`)."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.launch.process_output import ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec
from dynamo_trtllm.launch.readiness import NotYet, poll
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.subprocesses import RunFailed
from dynamo_trtllm.support.tls import own_server_context

PROMPT = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
# Prompts by model, where PROMPT is too hard.
_PROMPTS = {"smollm2": "What is the capital of France?"}
MAX_TOKENS = 200
API_KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
KEY_HEADER = f'-H "Authorization: Bearer ${API_KEY_VARIABLE}"'  # for the shell
CHAT_PATH = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 120.0
_MODEL_TIMEOUT_S = 30.0
_SHORTEST_PHASE_S = 0.0005  # a shorter phase would be shown as 0 ms


class ReadyDeployment(NamedTuple):
    """A deployment with a frontend, all processes of which are ready."""

    output: ProcessOutput
    specs: Sequence[ProcessSpec]
    record: LaunchRecord
    frontend: ProcessRecord

    @property
    def model(self) -> str:
        """Return the name of the first worker's model."""
        return next(spec.model for spec in self.specs if spec.worker is not None)

    @property
    def api_key(self) -> str:
        """Return an API key that the frontend accepts; empty if it needs none."""
        return next(spec.api_key for spec in self.specs if spec.is_frontend)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context that trusts the frontend's certificate; None: it has no TLS."""
        if not self.frontend.uses_tls:
            return None
        return own_server_context(Path(self.frontend.certificate))

    def names(self) -> dict[str, str]:
        """Return the names of the workers by instance id (hexadecimal)."""
        return {process.instance_id: process.name for process in self.record.processes}


@dataclass(frozen=True)
class Demonstration:
    """What a demo shows when all processes are ready.

    Attributes:
        show: sends requests to the frontend.
        check: raises ConfigError before anything starts, if the deployment does not fit.
        is_quiet: the lines of the processes and of the launcher are hidden, unless the run fails.
    """

    show: Callable[[ReadyDeployment], Awaitable[None]]
    check: Callable[[Sequence[ProcessSpec]], None]
    is_quiet: bool = False


def check_access(specs: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if a request needs an API key or a certificate that is unknown."""
    for spec in specs:
        if spec.is_frontend and spec.tls_files is not None and spec.tls_files.client_ca is not None:
            raise ConfigError(
                "the demo request has no client certificate; remove --tls-client-ca-file, or leave"
                " out --demo",
                field="tls_client_ca_file",
            )
        if spec.needs_api_key and not spec.api_key:
            raise ConfigError(
                "the demo request needs an API key, and the keys file has only their hashes; set"
                f" {API_KEY_VARIABLE}, too, or leave out --demo",
                field="api_key",
            )


async def _show_sample(deployment: ReadyDeployment) -> None:
    """Send the sample request to the frontend, and show its answer and statistics."""
    model = deployment.model
    is_mock = any(spec.engine == "mock" for spec in deployment.specs)
    url = deployment.frontend.url
    api_key = deployment.api_key
    answer = await ask_sample(url, model, api_key, deployment.tls_context())
    say = deployment.output.say
    say(sample_report(answer, model, deployment.names(), is_mock=is_mock))
    say(next_step(url, model, needs_api_key=bool(api_key)))


SAMPLE = Demonstration(_show_sample, check_access)


def sample_request(model: str) -> dict[str, Any]:
    """Return the sample request of Dynamo's gpt-oss-120b guides.

    Its sampling is greedy, so that all runs are equal.
    """
    message = {"role": "user", "content": _PROMPTS.get(model, PROMPT)}
    return {
        "model": model,
        "messages": [message],
        "stream": False,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }


async def ask_sample(
    frontend: str, model: str, api_key: str = "", tls: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Send the sample request.

    Wait first until the frontend has the model's files, which takes some time after it is ready.

    Args:
        frontend: URL of the frontend.
        model: name of the model.
        api_key: the API key to send; "": no key is sent.
        tls: decides whether an https:// frontend is trusted.

    Returns:
        The response body, with the frontend's statistics under `dynamo_trtllm`.

    Raises:
        RunFailed: the model was not ready in time, or the request failed.
    """
    await until_model_is_ready(frontend, model, api_key, tls)
    content = json.dumps(sample_request(model)).encode()
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            url = frontend + CHAT_PATH
            answer: dict[str, Any] = await _request(url, api_key, "POST", tls, content)
            return answer
    except (NotYet, OSError) as exc:
        raise RunFailed(f"the demo request failed: {str(exc) or 'no response'}") from exc


async def until_model_is_ready(
    frontend: str, model: str, api_key: str, tls: ssl.SSLContext | None
) -> None:
    """Wait until the frontend has the files of a model. The arguments are those of `ask_sample`.

    Raises:
        RunFailed: the model was not ready in time.
    """
    path = f"/v1/models/{urllib.parse.quote(model)}/ready"
    try:
        await poll(partial(_request, frontend + path, api_key, "GET", tls), _MODEL_TIMEOUT_S)
    except NotYet as exc:
        raise RunFailed(
            f"model {model} was not ready within {_MODEL_TIMEOUT_S:g} s: {exc}"
        ) from exc


async def _request(
    url: str, api_key: str, method: str, tls: ssl.SSLContext | None, content: bytes = b""
) -> Any:
    """Return the JSON body of a response. Raise NotYet if its status is not 200."""
    headers = {"Content-Type": "application/json", "x-dynamo-stats": "1"}
    headers |= http_client.bearer(api_key)
    status, answer = await http_client.request(url, method, content, headers, tls=tls)
    if status != 200:
        raise NotYet(f"status {status}: {answer.decode(errors='replace').strip()}")
    return json.loads(answer)


def sample_report(
    answer: Mapping[str, Any], model: str, names: Mapping[str, str], *, is_mock: bool = False
) -> str:
    """Format the answer and its statistics as text.

    Args:
        answer: return value of `ask_sample`.
        model: name of the model.
        names: process name by instance id (hexadecimal).
        is_mock: the mock engine, which has no model, gave the answer.
    """
    message = answer["choices"][0]["message"]
    stats = answer["dynamo_trtllm"]
    lines = ["", f"question:   {_PROMPTS.get(model, PROMPT)}"]
    if message.get("reasoning_content"):
        lines.append(f"reasoning:  {_one_line(message['reasoning_content'])}")
    lines.append(f"answer:     {_one_line(message.get('content') or '(none)')}")
    if is_mock:
        lines.append(
            "            (random text: the mock engine has no model. It shows routing and transfers"
            " only.)"
        )
    lines.append(f"prefill by: {_process_name(stats['prefill_instance'], names)}")
    lines.append(f"decode by:  {_process_name(stats['decode_instance'], names)}")
    lines.append(f"KV moved:   {stats['kv_bytes']:,} bytes over {stats['transport'] or 'nothing'}")
    lines.append(f"TTFT:       {stats['ttft_s'] * 1e3:.0f} ms")
    if stats["tokens_per_s"] is not None:
        lines.append(f"speed:      {stats['tokens_per_s']:.0f} tokens/s")
    phases = [
        f"{name} {seconds * 1e3:.0f} ms"
        for name, seconds in stats["phase_s"].items()
        if seconds >= _SHORTEST_PHASE_S
    ]
    lines.append(f"phases:     {', '.join(phases)}")
    return "\n".join(lines)


def next_step(frontend: str, model: str, *, needs_api_key: bool = False) -> str:
    """Return a curl command for a streaming request, to copy into a shell."""
    body = sample_request(model) | {"stream": True}
    header = f"{KEY_HEADER} " if needs_api_key else ""
    return (
        "\nTry a streaming request:\n"
        f"curl -N {frontend}{CHAT_PATH} {header}-H 'Content-Type: application/json'"
        f" -d '{json.dumps(body)}'"
    )


def _process_name(instance: str | None, names: Mapping[str, str]) -> str:
    if instance is None:
        return "none"
    return f"{names.get(instance, 'a worker of another deployment')} (instance {instance})"


def _one_line(text: str) -> str:
    return " ".join(text.split())
