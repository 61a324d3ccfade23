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
    option,
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

    prefill: Path | None = option(ROLE, None, "YAML file of a prefill worker's engine arguments.")
    decode: Path | None = option(
        ROLE, None, "YAML file of a decode worker's engine arguments. With --prefill the pair is checked too."
    )
    agg: Path | None = option(ROLE, None, "YAML file of an aggregated worker's engine arguments.")
    prefill_args: str | None = option(
        ROLE, None, "More flags of the prefill worker, as one string: '--max-num-tokens 20000 --max-batch-size 32'."
    )
    decode_args: str | None = option(ROLE, None, "More flags of the decode worker, as one string.")
    agg_args: str | None = option(ROLE, None, "More flags of the aggregated worker, as one string.")
    gpu: str | None = option(
        ENGINE,
        None,
        "GPU model, such as b200, gb200, b300, h100, h200, rtx-pro-6000. Default: the GPU of this machine.",
    )
    release: str = option(ENGINE, "1.2.1", "TensorRT-LLM release to check against.")
    model_path: str | None = option(
        MODEL,
        None,
        "Model folder, of which only the JSON files are read; or gpt-oss-120b or gpt-oss-20b for their "
        "published shape. Without it, the model's limits and memory are not checked.",
        aliases=("--model",),
    )
    isl: PositiveInt | None = option(
        LOAD, None, "Tokens of the longest prompt. Default: the smaller of max_seq_len and the transfer buffer."
    )
    osl: PositiveInt | None = option(LOAD, None, "Tokens of the longest output.")
    concurrency: PositiveInt | None = option(LOAD, None, "Number of concurrent requests.")
    json_output: bool = option(PROCESS, False, "Print JSON instead of tables.", aliases=("--json",))

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

    yes: bool = option(PROCESS, False, "Remove without confirmation. Required when stdin is not a terminal.")
    force: bool = option(
        PROCESS,
        False,
        "Also remove live instances by revoking their leases. A worker that still runs registers again within seconds.",
    )


class ChatConfig(Config):
    """Settings of `python -m dynamo_trtllm.chat`. None selects the server's own default."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.chat
  python -m dynamo_trtllm.chat --url http://gpu-host:8000 --model gpt-oss-120b --reasoning-effort low
  echo "What is KV?" | python -m dynamo_trtllm.chat
"""

    url: str = option(HTTP, "http://localhost:8000", "Address of a frontend.", is_address=True)
    model: Annotated[str, Field(min_length=1)] | None = option(
        MODEL, None, "Model name. Default: the only model of the frontend."
    )
    system: str | None = option(MODEL, None, "System message, sent before the first question.")
    reasoning_effort: Literal["low", "medium", "high"] | None = option(MODEL, None, "Reasoning effort of the model.")
    max_tokens: PositiveInt | None = option(MODEL, None, "Maximum tokens of an answer, reasoning included.")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = option(
        MODEL, None, "Sampling temperature. 0 selects the most likely token; higher values vary more."
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

    deployment: Path = option(PROCESS, ..., "YAML file that lists services, frontend and workers.", positional=True)
    model: str | None = option(MODEL, None, "Model for all workers, instead of the one in the file.")
    engine: EngineName | None = option(
        ENGINE, None, "Engine for all workers, instead of the one in the file. Arguments of another engine are dropped."
    )
    port: Port | None = option(
        HTTP, None, "Port of the OpenAI-compatible API, instead of the one in the file; 0 takes a free one."
    )
    host: Annotated[str, Field(min_length=1)] | None = option(
        HTTP,
        None,
        "Address that the API listens on, instead of the one in the file; 0.0.0.0 accepts connections from "
        "other machines. Default without a value in the file: 127.0.0.1.",
    )
    demo: bool = option(
        PROCESS, False, "Once all processes are ready, send a sample request and print which workers processed it."
    )
    once: bool = option(PROCESS, False, "Stop all processes once they are ready and the demo is done.")
    log_level: LogLevel = option(PROCESS, "info", "Minimum log level.")
    log_format: LogFormat = option(
        PROCESS, "text", "Format of log lines, also of the started processes: text, or json (one object per line)."
    )


class FrontendProcessConfig(FrontendConfig):
    """Settings of one process of a frontend with several `workers`. The frontend starts these processes."""

    number: PositiveInt = option(PROCESS, ..., "Number of this process among the processes of the frontend, from 1.")
