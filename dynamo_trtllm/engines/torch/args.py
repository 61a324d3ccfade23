"""Define the arguments of the torch engine that a YAML file, flags and override JSON may set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from dynamo_trtllm.config.config_base import PositiveFloat, matching
from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode
from dynamo_trtllm.protocol.number_types import MAX_COUNT

_Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]


class TorchArgs(BaseModel):
    """All arguments of the torch engine.

    None means that the engine derives the value from device and model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Annotated[
        str, matching(r"auto|cpu|cuda(:\d+)?", "must be auto, cpu, cuda or cuda:N")
    ] = Field("auto", description="auto, cpu, cuda or cuda:N; auto: cuda if a GPU is visible")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="data type of weights and KV; default float32 on CPU, bfloat16 on a GPU"
    )
    num_threads: _Count | None = Field(
        None, description="number of CPU threads; default 1 on CPU, PyTorch's choice on a GPU"
    )
    transfer_backend: Literal["auto", "nixl", "tcp"] = Field(
        "auto", description="KV transfer backend; auto: nixl if it is installed, otherwise tcp"
    )
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)
    max_batch_size: _Count = Field(16, description="maximum requests per step")
    max_num_tokens: _Count | None = Field(
        None,
        description=(
            "maximum tokens per step, at least max_batch_size; default prefill_chunk_tokens +"
            " max_batch_size"
        ),
    )
    max_seq_len: _Count | None = Field(
        None,
        description="maximum prompt and output tokens of one request; default the model's context",
    )
    max_queue: _Count = Field(
        256, description="maximum queued requests; further requests are rejected"
    )
    prefill_chunk_tokens: _Count = Field(512, description="maximum tokens of one prompt per step")
    kv_block_size: _Count = Field(32, description="tokens per KV block")
    kv_cache_blocks: _Count | None = Field(
        None, description="number of KV blocks; overrides kv_cache_gib"
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description=(
            "KV memory in GiB; default at most 0.5 on CPU, free_gpu_memory_fraction on a GPU"
        ),
    )
    enable_prefix_caching: bool = Field(
        True,
        description=(
            "reuse the KV blocks of earlier requests whose prompts begin with the same tokens"
        ),
    )
    kv_staging_gib: PositiveFloat | None = Field(
        None,
        description=(
            "transfer buffer for KV that is sent or received, in GiB; default the larger of the"
            " longest request's KV and an eighth of the KV memory"
        ),
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description=(
            "auto: read the weights; dummy: random weights from config.json alone, the same in"
            " every worker"
        ),
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description=(
            "share for KV of the GPU memory that is free after loading the weights; default 0.5"
        ),
    )

    @field_validator("max_num_tokens")
    @classmethod
    def _has_a_token_for_each_request(cls, value: int | None, info: ValidationInfo) -> int | None:
        # max_batch_size is missing here if its own value is invalid.
        batch_size = info.data.get("max_batch_size", 0)
        if value is not None and value < batch_size:
            raise ValueError(
                f"{value} is less than max_batch_size {batch_size}: in each step, some requests"
                " would get no token; raise it, or lower max_batch_size"
            )
        return value

    @property
    def max_step_tokens(self) -> int:
        """The most tokens in one step."""
        if self.max_num_tokens is not None:
            return self.max_num_tokens
        return self.prefill_chunk_tokens + self.max_batch_size
