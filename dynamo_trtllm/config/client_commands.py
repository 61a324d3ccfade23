"""Define the settings of the commands that use a running deployment."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dynamo_trtllm.config.config_base import (
    Config,
    ConnectionConfig,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option,
)
from dynamo_trtllm.config.http_access import HttpClientConfig
from dynamo_trtllm.protocol.number_types import MAX_SECONDS

# HOST:PORT, perhaps with a path.
_WITHOUT_SCHEME = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}(/.*)?")


def _server_url(value: str) -> str:
    """Return an address with its scheme, http if it has none, and without `/v1`."""
    if _WITHOUT_SCHEME.fullmatch(value):
        value = f"http://{value}"
    try:
        parts = urllib.parse.urlsplit(value)
        # Reading the port raises ValueError if it is not a number up to 65535. None: no port.
        is_valid_port = parts.port != 0
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and is_valid_port
    except ValueError:
        is_address = False
    # Paths are added at the end of the address.
    has_query_or_fragment = "?" in value or "#" in value
    if not is_address or has_query_or_fragment:
        raise ValueError("expected an address like localhost:8000 or https://HOST:PORT")
    return value.rstrip("/").removesuffix("/v1")


ServerUrl = Annotated[str, AfterValidator(_server_url)]
DEFAULT_FRONTEND = "http://localhost:8000"


class DeploymentChoiceConfig(Config):
    """The setting with which a command chooses among the deployments that run on this machine."""

    deployment_name: NonEmpty | None = option(
        "this command",
        None,
        help="Name of a deployment that was launched on this machine, as status shows it. Default:"
        " the only one.",
    )


class ChatConfig(HttpClientConfig, DeploymentChoiceConfig):
    """Chat with a running frontend: stream answers with reasoning and tool calls, and print TTFT
    and speed.

    If the output is not a terminal, it contains the answers only, without reasoning.

    examples:
      %(prog)s
      %(prog)s "What is the KV cache?"
      %(prog)s --url gpu-host:8000 --model gpt-oss-120b --reasoning-effort low
      cat questions.txt | %(prog)s > answers.txt
    exit status: 0, 1 if a frontend is unreachable or a question got no answer, 2 for a bad command
    line
    """

    question: NonEmpty | None = option(
        "this command",
        None,
        positional=True,
        help="A question, in quotes: print its answer and exit. Default: a conversation.",
    )
    url: ServerUrl | None = option(
        "HTTP and routing",
        None,
        is_address=True,
        help="Address of a frontend. Default: that of the deployment that was launched on this"
        f" machine, otherwise {DEFAULT_FRONTEND}.",
    )
    model: NonEmpty | None = option(
        "model", None, help="Model name. Default: the only model of the frontend."
    )
    system: str | None = option(
        "model", None, help="System message, sent before the first question."
    )
    # In the fields below, None selects the server's own default.
    reasoning_effort: Literal["low", "medium", "high"] | None = option(
        "model", None, help="Reasoning effort of the model."
    )
    max_tokens: PositiveInt | None = option(
        "model", None, help="Maximum tokens of an answer, reasoning included."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = option(
        "model",
        None,
        help="Sampling temperature. 0 selects the most likely token; higher values vary more.",
    )


class StatusConfig(ConnectionConfig, HttpClientConfig, DeploymentChoiceConfig):
    """Show the processes of running deployments, their health and their load.

    examples:
      %(prog)s
      %(prog)s --watch
      %(prog)s --url http://gpu-host:8000 --json
    exit status: 0 if all processes are ready, 1 if one is not or nothing runs, 2 for a bad command
    line
    """

    url: ServerUrl | None = option(
        "HTTP and routing",
        None,
        is_address=True,
        help="Address of a frontend. Default: all deployments that were launched on this machine,"
        f" otherwise the frontend at {DEFAULT_FRONTEND} and the workers registered in etcd.",
    )
    deployment_name: NonEmpty | None = option(
        "this command",
        None,
        help="Show only the deployment of this name, of those launched on this machine.",
    )
    watch: bool = option(
        "this command", False, help="Show the status again and again until Ctrl-C."
    )
    interval_s: PositiveFloat = option(
        "this command", 2.0, help="Seconds between two outputs of --watch."
    )
    timeout_s: PositiveFloat = option(
        "this command", 3.0, help="Maximum seconds to wait for the answers of all processes."
    )
    json_output: bool = option(
        "this command",
        False,
        aliases=("--json",),
        help="Print JSON, with --watch one line each time.",
    )


class ExplainConfig(ConnectionConfig, DeploymentChoiceConfig):
    """Show the life of a request across the processes of all machines, or the requests that are
    stuck.

    examples:
      %(prog)s                                  # the latest requests
      %(prog)s chatcmpl-5f0c1d2e3a4b5c6d7e8f90a1b2c3d4e5
      %(prog)s --stuck --older-than-s 5
      %(prog)s --perfetto trace.json            # to open in https://ui.perfetto.dev
      %(prog)s --trace requests.jsonl           # to replay with a benchmark
    exit status: 0; 1 if the request is unknown, nothing is recorded, or --stuck has found
    something; 2 for a bad command line
    """

    request: NonEmpty | None = option(
        "this command",
        None,
        positional=True,
        help="Id of the request, as shown in its response (chatcmpl-..., cmpl-..., resp_...), in"
        " the header X-Request-Id, or in a log line. Default: list the latest requests.",
    )
    stuck: bool = option(
        "this command",
        False,
        help="List requests that have not ended and are silent, with the process that holds each.",
    )
    older_than_s: Annotated[float, Field(ge=1.5, le=MAX_SECONDS)] = option(
        "this command",
        10.0,
        help="Seconds of silence after which a request counts as stuck, at least 1.5: the progress"
        " of a stream is recorded once a second.",
    )
    perfetto: Path | None = option(
        "this command",
        None,
        help="Write the events to this file as a Chrome trace (JSON), for Perfetto.",
    )
    trace: Path | None = option(
        "this command",
        None,
        help="Write arrival times, lengths and shared prompt blocks to this file, in Mooncake's"
        " format (JSONL).",
    )
    json_output: bool = option(
        "this command", False, aliases=("--json",), help="With --stuck: print JSON."
    )
    recorder_dir: NonEmpty | None = option(
        "this command",
        None,
        help="Folder of the flight recorder's files. Default: dynamo_trtllm in $XDG_RUNTIME_DIR,"
        " otherwise /dev/shm/dynamo_trtllm-UID.",
    )
    local: bool = option(
        "this command",
        False,
        help="Read only the files of this machine. Default: the running processes of other"
        " machines and containers are asked, too, over etcd and NATS.",
    )
    timeout_s: PositiveFloat = option(
        "this command",
        2.0,
        help="Maximum seconds to wait for etcd, for NATS, and for the answers of all processes.",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> ExplainConfig:
        if self.stuck and (self.request or self.perfetto or self.trace):
            raise ValueError(
                "--stuck can't be combined with a request, --perfetto or --trace; run them"
                " separately"
            )
        if self.json_output and not self.stuck:
            raise ValueError("--json needs --stuck; add it, or export the events with --perfetto")
        return self


class StopConfig(Config):
    """Stop a deployment that was launched on this machine, and wait until its processes have ended.

    Running requests may finish, within the time of --drain-timeout-s of the processes. Ctrl-C ends
    all processes at once.

    examples:
      %(prog)s
      %(prog)s dynamo-2 --kill
    exit status: 0 if it has ended, also if none runs; 1 if it still runs; 2 for a bad command line
    or a name that does not run
    """

    deployment_name: NonEmpty | None = option(
        "this command",
        None,
        positional=True,
        aliases=("--deployment-name",),
        help="Name of the deployment, as status shows it. Default: the only one.",
    )
    kill: bool = option(
        "this command", False, help="End all processes at once. Running requests fail."
    )
    timeout_s: PositiveFloat = option(
        "this command", 120.0, help="Maximum seconds to wait for the end of all processes."
    )


class LogsConfig(DeploymentChoiceConfig):
    """Show the latest output of the processes of a deployment that was launched on this machine.

    Until its end, the launcher keeps the lines of all processes in two files in rotation: at least
    the last 8 MiB, and at most 16 MiB.

    examples:
      %(prog)s
      %(prog)s decode --tail 100 --follow
    exit status: 0; 1 if no deployment runs or it keeps no lines; 2 for a bad command line
    """

    process: NonEmpty | None = option(
        "this command",
        None,
        positional=True,
        help="Name of a process, as status shows it, or launch for the launcher. Default: all, each"
        " line with the name of its process.",
    )
    follow: bool = option(
        "this command",
        False,
        aliases=("-f",),
        help="Also show new lines, until Ctrl-C or the end of the deployment.",
    )
    tail: NonNegativeInt | None = option(
        "this command", None, aliases=("-n",), help="Number of lines to begin with. Default: all."
    )
