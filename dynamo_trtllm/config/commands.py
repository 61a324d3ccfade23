"""Define the settings of launcher, chat, preflight, clear_namespace, and of one process of a multi-process frontend."""

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
    """Settings of `python -m dynamo_trtllm.preflight`."""

    examples: ClassVar[str] = """\
example, the disaggregated Kubernetes target for gpt-oss-120b, without the model's files:
  python -m dynamo_trtllm.preflight --prefill engine_configs/gpt-oss-120b/k8s-disagg/prefill.yaml \\
    --decode engine_configs/gpt-oss-120b/k8s-disagg/decode.yaml --gpu gb200 --model gpt-oss-120b \\
    --isl 8192 --osl 1024 --concurrency 1536
exit status: 0 without errors (warnings are allowed), 1 with errors, 2 for a bad command line
"""

    prefill: Path | None = Field(
        default=None,
        description="YAML file of a prefill worker's engine arguments.",
        json_schema_extra=cli_option(ROLE),
    )
    decode: Path | None = Field(
        default=None,
        description="YAML file of a decode worker's engine arguments. With --prefill the pair is checked too.",
        json_schema_extra=cli_option(ROLE),
    )
    agg: Path | None = Field(
        default=None,
        description="YAML file of an aggregated worker's engine arguments.",
        json_schema_extra=cli_option(ROLE),
    )
    prefill_args: str | None = Field(
        default=None,
        description="More flags of the prefill worker, as one string: '--max-num-tokens 20000 --max-batch-size 32'.",
        json_schema_extra=cli_option(ROLE),
    )
    decode_args: str | None = Field(
        default=None, description="More flags of the decode worker, as one string.", json_schema_extra=cli_option(ROLE)
    )
    agg_args: str | None = Field(
        default=None,
        description="More flags of the aggregated worker, as one string.",
        json_schema_extra=cli_option(ROLE),
    )
    gpu: str | None = Field(
        default=None,
        description="GPU model, such as b200, gb200, b300, h100, h200, rtx-pro-6000. Default: the GPU of this machine.",
        json_schema_extra=cli_option(ENGINE),
    )
    release: str = Field(
        default="1.2.1", description="TensorRT-LLM release to check against.", json_schema_extra=cli_option(ENGINE)
    )
    model_path: str | None = Field(
        default=None,
        description="Model folder, of which only the JSON files are read; or gpt-oss-120b or gpt-oss-20b for their "
        "published shape. Without it, the model's limits and memory are not checked.",
        json_schema_extra=cli_option(MODEL, "--model"),
    )
    isl: PositiveInt | None = Field(
        default=None,
        description="Tokens of the longest prompt. Default: the smaller of max_seq_len and the transfer buffer.",
        json_schema_extra=cli_option(LOAD),
    )
    osl: PositiveInt | None = Field(
        default=None, description="Tokens of the longest output.", json_schema_extra=cli_option(LOAD)
    )
    concurrency: PositiveInt | None = Field(
        default=None, description="Number of concurrent requests.", json_schema_extra=cli_option(LOAD)
    )
    json_output: bool = Field(
        default=False, description="Print JSON instead of tables.", json_schema_extra=cli_option(PROCESS, "--json")
    )

    @model_validator(mode="after")
    def _has_a_role(self) -> PreflightConfig:
        if self.agg is not None and (self.prefill is not None or self.decode is not None):
            raise ValueError("--agg can't be combined with --prefill or --decode; give it alone, or those two")
        if self.agg is None and self.prefill is None and self.decode is None:
            raise ValueError("nothing to check; give --prefill and --decode, or --agg")
        if self.isl is None and (self.osl is not None or self.concurrency is not None):
            raise ValueError("--osl and --concurrency need --isl; add it")
        return self


class ClearNamespaceConfig(ConnectionConfig):
    """Settings of `python -m dynamo_trtllm.clear_namespace`."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.clear_namespace --namespace dynamo
  python -m dynamo_trtllm.clear_namespace --namespace dynamo --yes
exit status: 0 if the namespace is clear, 1 if records are left or a server is unreachable, 2 for a bad command line
"""

    yes: bool = Field(
        default=False,
        description="Remove without confirmation. Required when stdin is not a terminal.",
        json_schema_extra=cli_option(PROCESS),
    )
    force: bool = Field(
        default=False,
        description="Also remove live instances by revoking their leases. A worker that still runs registers again "
        "within seconds.",
        json_schema_extra=cli_option(PROCESS),
    )


class ChatConfig(Config):
    """Settings of `python -m dynamo_trtllm.chat`. None selects the server's own default."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.chat
  python -m dynamo_trtllm.chat --url http://gpu-host:8000 --model gpt-oss-120b --reasoning-effort low
  echo "What is KV?" | python -m dynamo_trtllm.chat
"""

    url: str = Field(
        default="http://localhost:8000",
        description="Address of a frontend.",
        json_schema_extra=cli_option(HTTP, is_address=True),
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Model name. Default: the only model of the frontend.",
        json_schema_extra=cli_option(MODEL),
    )
    system: str | None = Field(
        default=None, description="System message, sent before the first question.", json_schema_extra=cli_option(MODEL)
    )
    reasoning_effort: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Reasoning effort of the model.", json_schema_extra=cli_option(MODEL)
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="Maximum tokens of an answer, reasoning included.",
        json_schema_extra=cli_option(MODEL),
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Sampling temperature. 0 selects the most likely token; higher values vary more.",
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
    """Settings of `python -m dynamo_trtllm.launch`."""

    deployment: Path = Field(
        description="YAML file that lists services, frontend and workers.",
        json_schema_extra=cli_option(PROCESS, positional=True),
    )
    model: str | None = Field(
        default=None,
        description="Model for all workers, instead of the one in the file.",
        json_schema_extra=cli_option(MODEL),
    )
    engine: EngineName | None = Field(
        default=None,
        description="Engine for all workers, instead of the one in the file. Arguments of another engine are dropped.",
        json_schema_extra=cli_option(ENGINE),
    )
    port: Port | None = Field(
        default=None,
        description="Port of the OpenAI-compatible API, instead of the one in the file; 0 takes a free one.",
        json_schema_extra=cli_option(HTTP),
    )
    host: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Address that the API listens on, instead of the one in the file; 0.0.0.0 accepts connections from "
        "other machines. Default without a value in the file: 127.0.0.1.",
        json_schema_extra=cli_option(HTTP),
    )
    demo: bool = Field(
        default=False,
        description="Once all processes are ready, send a sample request and print which workers processed it.",
        json_schema_extra=cli_option(PROCESS),
    )
    once: bool = Field(
        default=False,
        description="Stop all processes once they are ready and the demo is done.",
        json_schema_extra=cli_option(PROCESS),
    )
    log_level: LogLevel = Field(default="info", description="Minimum log level.", json_schema_extra=cli_option(PROCESS))
    log_format: LogFormat = Field(
        default="text",
        description="Format of log lines, also of the started processes: text, or json (one object per line).",
        json_schema_extra=cli_option(PROCESS),
    )


class FrontendProcessConfig(FrontendConfig):
    """Settings of one process of a frontend with several `workers`. The frontend starts these processes."""

    number: PositiveInt = Field(
        description="Number of this process among the processes of the frontend, from 1.",
        json_schema_extra=cli_option(PROCESS),
    )
