"""Define the settings of launcher, chat, preflight, clear-namespace and one process of a frontend of several."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from dynamo_trtllm.config.base import (
    ENGINE,
    HTTP,
    LOAD,
    MODEL,
    PROCESS,
    ROLE,
    Config,
    ConnectionConfig,
    EngineName,
    LogFormat,
    LogLevel,
    Port,
    PositiveInt,
    cli_option,
)
from dynamo_trtllm.config.models import FrontendConfig


class PreflightConfig(Config):
    """Settings of preflight, which checks engine arguments on any machine: it loads nothing and contacts no server."""

    examples: ClassVar[str] = """\
example, the disaggregated Kubernetes target for gpt-oss-120b, without the model's files:
  python -m dynamo_trtllm.preflight --prefill engine_configs/gpt-oss-120b/k8s-disagg/prefill.yaml \\
    --decode engine_configs/gpt-oss-120b/k8s-disagg/decode.yaml --gpu gb200 --model gpt-oss-120b \\
    --isl 8192 --osl 1024 --concurrency 1536
exit status: 0 without errors (warnings are allowed), 1 with errors, 2 for a bad command line
"""

    prefill: Path | None = Field(
        default=None, description="YAML of a prefill worker's engine arguments", json_schema_extra=cli_option(ROLE)
    )
    decode: Path | None = Field(
        default=None,
        description="YAML of a decode worker's engine arguments; with --prefill the two are judged as a pair too",
        json_schema_extra=cli_option(ROLE),
    )
    agg: Path | None = Field(
        default=None,
        description="YAML of the engine arguments of a worker for whole requests",
        json_schema_extra=cli_option(ROLE),
    )
    prefill_args: str | None = Field(
        default=None,
        description="further flags of the prefill worker, in one text: '--max-num-tokens 20000 --max-batch-size 32'",
        json_schema_extra=cli_option(ROLE),
    )
    decode_args: str | None = Field(
        default=None, description="further flags of the decode worker", json_schema_extra=cli_option(ROLE)
    )
    agg_args: str | None = Field(
        default=None, description="further flags of the worker for whole requests", json_schema_extra=cli_option(ROLE)
    )
    gpu: str | None = Field(
        default=None,
        description="kind of GPU, such as b200, gb200, b300, h100, h200, rtx-pro-6000; without it this machine's",
        json_schema_extra=cli_option(ENGINE),
    )
    release: str = Field(
        default="1.2.1", description="release of TensorRT-LLM to judge for", json_schema_extra=cli_option(ENGINE)
    )
    model_path: str | None = Field(
        default=None,
        description="model folder, of which only the JSON files are read, or gpt-oss-120b or gpt-oss-20b for their "
        "published shape; without it nothing about model and memory is said",
        json_schema_extra=cli_option(MODEL, "--model"),
    )
    isl: PositiveInt | None = Field(
        default=None,
        description="tokens of the longest prompt; without it the smaller of max_seq_len and the transfer buffer",
        json_schema_extra=cli_option(LOAD),
    )
    osl: PositiveInt | None = Field(
        default=None, description="tokens of the longest answer", json_schema_extra=cli_option(LOAD)
    )
    concurrency: PositiveInt | None = Field(
        default=None, description="requests at once", json_schema_extra=cli_option(LOAD)
    )
    json_output: bool = Field(
        default=False, description="print JSON instead of tables", json_schema_extra=cli_option(PROCESS, "--json")
    )

    @model_validator(mode="after")
    def _something_to_judge(self) -> PreflightConfig:
        if self.agg is not None and (self.prefill is not None or self.decode is not None):
            raise ValueError("--agg is for workers of whole requests; give it alone, or --prefill and --decode")
        if self.agg is None and self.prefill is None and self.decode is None:
            raise ValueError("nothing to judge; give --prefill and --decode, or --agg")
        if self.isl is None and (self.osl is not None or self.concurrency is not None):
            raise ValueError("--osl and --concurrency say nothing without --isl; give it too")
        return self


class ClearNamespaceConfig(ConnectionConfig):
    """Removes what a deployment left in etcd and JetStream."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.clear_namespace --namespace dynamo
  python -m dynamo_trtllm.clear_namespace --namespace dynamo --yes
exit status: 0 when it is clear, 1 when something was left or could not be reached, 2 for a bad command line
"""

    yes: bool = Field(
        default=False,
        description="remove without asking; required when there is no terminal to ask on",
        json_schema_extra=cli_option(PROCESS),
    )
    force: bool = Field(
        default=False,
        description="also instances that live; their leases are revoked, and a worker that does run registers again "
        "within seconds",
        json_schema_extra=cli_option(PROCESS),
    )


class ChatConfig(Config):
    """`python -m dynamo_trtllm.chat`. None means: the server's own default."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.chat
  python -m dynamo_trtllm.chat --url http://gpu-host:8000 --model gpt-oss-120b --reasoning-effort low
  echo "What is KV?" | python -m dynamo_trtllm.chat
"""

    url: str = Field(
        default="http://localhost:8000",
        description="address of a frontend",
        json_schema_extra=cli_option(HTTP, is_address=True),
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="name of the model; without it the only one that is served",
        json_schema_extra=cli_option(MODEL),
    )
    system: str | None = Field(
        default=None, description="system message, sent before the first question", json_schema_extra=cli_option(MODEL)
    )
    reasoning_effort: Literal["low", "medium", "high"] | None = Field(
        default=None, description="how much the model thinks before it answers", json_schema_extra=cli_option(MODEL)
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="longest answer in tokens, reasoning included", json_schema_extra=cli_option(MODEL)
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None,
        description="0 takes the likeliest token, more is more varied",
        json_schema_extra=cli_option(MODEL),
    )

    @field_validator("url")
    @classmethod
    def _url_of_a_server(cls, value: str) -> str:
        try:
            parts = urllib.parse.urlsplit(value)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError("expected an address like http://localhost:8000")
        return value.rstrip("/").removesuffix("/v1")


class LaunchConfig(Config):
    """`python -m dynamo_trtllm.launch`."""

    deployment: Path = Field(
        description="YAML file that lists services, frontend and workers",
        json_schema_extra=cli_option(PROCESS, positional=True),
    )
    model: str | None = Field(
        default=None,
        description="serve this model instead of the one in the file, with every worker",
        json_schema_extra=cli_option(MODEL),
    )
    engine: EngineName | None = Field(
        default=None,
        description="engine for all workers, instead of the one in the file; drops the other engine's arguments",
        json_schema_extra=cli_option(ENGINE),
    )
    port: Port | None = Field(
        default=None,
        description="port of the OpenAI-compatible API, instead of the one in the file; 0 takes a free one",
        json_schema_extra=cli_option(HTTP),
    )
    host: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="address that the API listens on, instead of the one in the file; 0.0.0.0 accepts connections from "
        "other machines. Default, where the file has none: 127.0.0.1",
        json_schema_extra=cli_option(HTTP),
    )
    demo: bool = Field(
        default=False,
        description="once all processes are ready, send a sample request and print which workers served it",
        json_schema_extra=cli_option(PROCESS),
    )
    once: bool = Field(
        default=False,
        description="stop all processes once they are ready and the demo is done",
        json_schema_extra=cli_option(PROCESS),
    )
    log_level: LogLevel = Field(
        default="info", description="least severe level logged", json_schema_extra=cli_option(PROCESS)
    )
    log_format: LogFormat = Field(
        default="text",
        description="format of log lines, also for the started processes: text, or json (one object per line)",
        json_schema_extra=cli_option(PROCESS),
    )


class FrontendProcessConfig(FrontendConfig):
    """One process of a frontend of several `workers`, which starts it."""

    number: PositiveInt = Field(description="which of the processes it is", json_schema_extra=cli_option(PROCESS))
