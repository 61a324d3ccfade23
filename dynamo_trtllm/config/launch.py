"""The settings of the launcher, `python -m dynamo_trtllm.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from dynamo_trtllm.config.base import (
    ENGINE,
    HTTP,
    MODEL,
    PROCESS,
    Config,
    EngineName,
    LogFormat,
    LogLevel,
    Port,
    option,
)


class LaunchConfig(Config):
    """`python -m dynamo_trtllm.launch`."""

    deployment: Path = Field(
        description="YAML file that lists services, frontend and workers",
        json_schema_extra=option(PROCESS, positional=True),
    )
    model: str | None = Field(
        default=None,
        description="serve this model instead of the one in the file, with every worker",
        json_schema_extra=option(MODEL),
    )
    engine: EngineName | None = Field(
        default=None,
        description="engine for all workers, instead of the one in the file; drops the other engine's arguments",
        json_schema_extra=option(ENGINE),
    )
    port: Port | None = Field(
        default=None,
        description="port of the OpenAI-compatible API, instead of the one in the file; 0 takes a free one",
        json_schema_extra=option(HTTP),
    )
    host: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="address that the API listens on, instead of the one in the file; 0.0.0.0 accepts connections from "
        "other machines. Default, where the file has none: 127.0.0.1",
        json_schema_extra=option(HTTP),
    )
    demo: bool = Field(
        default=False,
        description="once all processes are ready, send a sample request and print which workers served it",
        json_schema_extra=option(PROCESS),
    )
    once: bool = Field(
        default=False,
        description="stop all processes once they are ready and the demo is done",
        json_schema_extra=option(PROCESS),
    )
    log_level: LogLevel = Field(
        default="info", description="least severe level logged", json_schema_extra=option(PROCESS)
    )
    log_format: LogFormat = Field(
        default="text",
        description="format of log lines, also for the started processes: text, or json (one object per line)",
        json_schema_extra=option(PROCESS),
    )
