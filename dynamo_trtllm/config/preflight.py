"""The settings of `python -m dynamo_trtllm.preflight`: which files to judge, for which GPU, model, release and load."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from dynamo_trtllm.config.base import ENGINE, LOAD, MODEL, PROCESS, ROLE, Config, PositiveInt, option


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
        default=None, description="YAML of a prefill worker's engine arguments", json_schema_extra=option(ROLE)
    )
    decode: Path | None = Field(
        default=None,
        description="YAML of a decode worker's engine arguments; with --prefill the two are judged as a pair too",
        json_schema_extra=option(ROLE),
    )
    agg: Path | None = Field(
        default=None,
        description="YAML of the engine arguments of a worker for whole requests",
        json_schema_extra=option(ROLE),
    )
    prefill_args: str | None = Field(
        default=None,
        description="further flags of the prefill worker, in one text: '--max-num-tokens 20000 --max-batch-size 32'",
        json_schema_extra=option(ROLE),
    )
    decode_args: str | None = Field(
        default=None, description="further flags of the decode worker", json_schema_extra=option(ROLE)
    )
    agg_args: str | None = Field(
        default=None, description="further flags of the worker for whole requests", json_schema_extra=option(ROLE)
    )
    gpu: str | None = Field(
        default=None,
        description="kind of GPU, such as b200, gb200, b300, h100, h200, rtx-pro-6000; without it this machine's",
        json_schema_extra=option(ENGINE),
    )
    release: str = Field(
        default="1.2.1", description="release of TensorRT-LLM to judge for", json_schema_extra=option(ENGINE)
    )
    model_path: str | None = Field(
        default=None,
        description="model folder, of which only the JSON files are read, or gpt-oss-120b or gpt-oss-20b for their "
        "published shape; without it nothing about model and memory is said",
        json_schema_extra=option(MODEL, "--model"),
    )
    isl: PositiveInt | None = Field(
        default=None,
        description="tokens of the longest prompt; without it the smaller of max_seq_len and the transfer buffer",
        json_schema_extra=option(LOAD),
    )
    osl: PositiveInt | None = Field(
        default=None, description="tokens of the longest answer", json_schema_extra=option(LOAD)
    )
    concurrency: PositiveInt | None = Field(
        default=None, description="requests at once", json_schema_extra=option(LOAD)
    )
    json_output: bool = Field(
        default=False, description="print JSON instead of tables", json_schema_extra=option(PROCESS, "--json")
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
