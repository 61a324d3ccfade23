"""Every setting of the terminal client."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from dynamo_trtllm.config.base import HTTP, MODEL, Config, PositiveInt, option


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
        json_schema_extra=option(HTTP, is_address=True),
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="name of the model; without it the only one that is served",
        json_schema_extra=option(MODEL),
    )
    system: str | None = Field(
        default=None, description="system message, sent before the first question", json_schema_extra=option(MODEL)
    )
    reasoning_effort: Literal["low", "medium", "high"] | None = Field(
        default=None, description="how much the model thinks before it answers", json_schema_extra=option(MODEL)
    )
    max_tokens: PositiveInt | None = Field(
        default=None, description="longest answer in tokens, reasoning included", json_schema_extra=option(MODEL)
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None, description="0 takes the likeliest token, more is more varied", json_schema_extra=option(MODEL)
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
