"""Run `dynamo-trtllm launch`: supervise a deployment, and send a sample request."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import ssl
import sys
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.access.api_keys import new_key
from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.config_base import LogFormat
from dynamo_trtllm.config.deployment import DeploymentConfig, load_deployment
from dynamo_trtllm.config.engine_names import DEFAULT_ENGINE
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.layers import find_file
from dynamo_trtllm.config.load import (
    child_environment,
    command,
    process_environment,
    warn_of_ignored_variables,
)
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.engines.factory import check_prerequisites
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.launcher import Launcher
from dynamo_trtllm.launch.process_output import LAUNCHER, ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec, is_open_to_all, processes, with_settings
from dynamo_trtllm.launch.readiness import NotYet, poll
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord
from dynamo_trtllm.models import locate
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.subprocesses import RunFailed
from dynamo_trtllm.support.tls import own_server_context, server_certificate

PROG = "python -m dynamo_trtllm.launch"
PROMPT = "Explain the concept of disaggregated serving in LLM inference in 3 sentences."
# Prompts by model, where PROMPT is too hard.
_PROMPTS = {"smollm2": "What is the capital of France?"}
MAX_TOKENS = 200
_API_KEY = f"{ENV_PREFIX}API_KEY"
_KEY_HEADER = f'-H "Authorization: Bearer ${_API_KEY}"'  # for the shell
_KEY_NOTE = (
    "Other machines can connect, so clients need this API key, which is new with each start:"
)
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

    def trust(self) -> ssl.SSLContext | None:
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


@command(LaunchConfig, PROG, RunFailed)
def main(config: LaunchConfig) -> None:
    """Run the command.

    Exit with status 0 after a stop by signal, 2 for a bad configuration, and 1 if the deployment
    failed or was stopped before `--once` was done.
    """
    launch(config, SAMPLE if config.demo else None, once=config.once)


def launch(config: LaunchConfig, demonstration: Demonstration | None, *, once: bool) -> None:
    """Run the deployment of these settings.

    Args:
        config: the settings.
        demonstration: what to show when all processes are ready.
        once: stop after the demonstration.

    Raises:
        ConfigError, RunFailed, OSError: as for `run`.
    """
    OUTPUTS.start(LAUNCHER, config.log_format)
    observe_logging.setup(config.log_level, LAUNCHER, config.log_format)
    deployment = with_settings(
        load_deployment(find_file(config.deployment), process_environment()), config
    )
    if demonstration is not None and deployment.frontend is None:
        raise ConfigError(
            f"{config.deployment}: --demo needs a frontend, but frontend is null; remove one of"
            " them"
        )
    asyncio.run(
        run(deployment, log_format=config.log_format, demonstration=demonstration, once=once)
    )


async def run(
    deployment: DeploymentConfig,
    *,
    log_format: LogFormat,
    demonstration: Demonstration | None = None,
    once: bool = False,
    preface: Sequence[str] = (),
) -> None:
    """Run a deployment until a signal, or until it has been ready once.

    Args:
        deployment: the deployment.
        log_format: format of log lines, also of the processes.
        demonstration: what to show when all processes are ready.
        once: stop when all processes are ready and the demonstration is done.
        preface: lines to write before anything starts.

    Raises:
        ConfigError: a setting is wrong, or a port is in use.
        RunFailed: the deployment failed, or was stopped before `once` was done.
        OSError: the reader of the output has exited. The deployment was stopped.
    """
    environ = child_environment() | {f"{ENV_PREFIX}LOG_FORMAT": log_format}
    demo_key = ""
    is_quiet = demonstration is not None and demonstration.is_quiet
    if demonstration is not None and is_open_to_all(deployment, environ):
        demo_key = new_key()
        environ[_API_KEY] = demo_key
    # Check all settings before the servers start, so that a mistake is reported at once, and only
    # by this process.
    specs = processes(deployment, environ)
    _check_processes(specs, environ)
    if demonstration is not None:
        demonstration.check(specs)
    warn_of_ignored_variables(*(spec.worker or FrontendConfig() for spec in specs))
    output = ProcessOutput(sys.stdout, [spec.name for spec in specs], is_json=log_format == "json")
    for line in preface:
        output.say(line)
    is_done = False

    async def on_ready(record: LaunchRecord) -> bool:
        nonlocal is_done
        frontend = record.frontend
        url = None if frontend is None else frontend.url
        rows = [] if is_quiet else [*_name_rows(record), *_summary(specs, url)]
        _say_ready(output, rows, url, once=once)
        if demo_key:
            output.say(f"{_KEY_NOTE}\nexport {_API_KEY}={demo_key}")
        if demonstration is not None and frontend is not None:
            await demonstration.show(ReadyDeployment(output, specs, record, frontend))
        is_done = True
        return once

    if output.failure is None:
        with output.hiding_lines() if is_quiet else nullcontext(), output.starting():
            await Launcher(deployment, specs, output, environ).run(on_ready)
    if output.failure is not None:
        raise output.failure
    if once and not is_done:
        raise RunFailed("stopped before all processes were ready and the demo was done")


def _check_processes(specs: Sequence[ProcessSpec], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a package, file or GPU that a process needs is missing or wrong."""
    for spec in specs:
        try:
            server_certificate(spec.tls_files)
            if spec.worker is not None:
                check_prerequisites(spec.worker, {**environ, **spec.env}, locate)
        except ConfigError as exc:
            raise ConfigError(f"{spec.name}: {exc.message}", field=exc.field) from exc


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
                f" {_API_KEY}, too, or leave out --demo",
                field="api_key",
            )


async def _show_sample(deployment: ReadyDeployment) -> None:
    """Send the sample request to the frontend, and show its answer and statistics."""
    model = deployment.model
    is_mock = any(spec.engine == "mock" for spec in deployment.specs)
    url = deployment.frontend.url
    api_key = deployment.api_key
    answer = await ask_sample(url, model, api_key, deployment.trust())
    say = deployment.output.say
    say(sample_report(answer, model, deployment.names(), is_mock=is_mock))
    say(next_step(url, model, needs_api_key=bool(api_key)))


SAMPLE = Demonstration(_show_sample, check_access)


def _say_ready(
    output: ProcessOutput, rows: Sequence[tuple[str, str]], url: str | None, *, once: bool
) -> None:
    """Write that all processes are ready: as a panel with these rows, or in one line."""
    stop = "" if once else " (Ctrl-C to stop)"
    if not output.end_start(f"Ready{stop}", rows):
        where = " without a frontend" if url is None else f": {url}"
        output.say(f"Ready{where}{stop}")


def _name_rows(record: LaunchRecord) -> list[tuple[str, str]]:
    """Return the name of a deployment, if it is not its namespace: other commands need it."""
    return [("name", record.name)] if record.name != record.namespace else []


def _shell_rows() -> list[tuple[str, str]]:
    """Return the row that says how a shell finds the commands of the panel.

    There is no row if this process finds them. `scripts/demo` starts the program of a virtual
    environment that the shell has not activated.
    """
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which(CONSOLE) is not None or not script.is_file():
        return []
    shown = script
    # It may be in another folder, or the working folder was deleted.
    with suppress(ValueError, FileNotFoundError):
        shown = script.relative_to(Path.cwd())
    return [("shell", f"source {shlex.quote(str(shown))}   # once in each terminal")]


def _summary(specs: Sequence[ProcessSpec], url: str | None) -> list[tuple[str, str]]:
    """Return what a user needs to know of a ready deployment, as subjects and texts."""
    workers = [spec for spec in specs if spec.worker is not None]
    models = dict.fromkeys(spec.model for spec in workers)
    rows = [("models", ", ".join(models))]
    names_by_place: dict[tuple[str | None, str], list[str]] = {}
    for spec in workers:
        place = (spec.engine, _device(spec))
        names_by_place.setdefault(place, []).append(spec.name)
    for (engine, device), names in names_by_place.items():
        rows.append(("workers", f"{', '.join(names)} ({engine or DEFAULT_ENGINE}, {device})"))
    if url is None:
        return rows
    header = ""
    if any(spec.needs_api_key for spec in specs):
        header = f" {_KEY_HEADER}"
    return [
        ("URL", f"{url}/v1"),
        *rows,
        *_shell_rows(),
        ("chat", f"{CONSOLE} chat --url {url}"),
        ("curl", f"curl {url}/v1/models{header}"),
        ("logs", f"{CONSOLE} logs --follow"),
        ("API", f"{url}/docs"),
    ]


def _device(spec: ProcessSpec) -> str:
    visible = spec.env.get(VISIBLE, "")
    return f"GPU {visible}" if visible else "CPU"


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
    header = f"{_KEY_HEADER} " if needs_api_key else ""
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
