"""The torch engine's own arguments: what a YAML file, the flags and override JSON may set, and what they may not.

Reads no environment and loads no model.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode

_Count = Annotated[int, Field(gt=0)]


class TorchArgs(BaseModel):
    """Every argument of the torch engine; None means: chosen from the device and the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="type of weights and KV; default float32 on CPU, bfloat16 on a GPU"
    )
    num_threads: _Count | None = Field(None, description="CPU threads; default 1 on CPU, untouched on a GPU")
    transfer_backend: Literal["auto", "nixl", "tcp", "loopback"] = Field(
        "auto", description="what moves KV between workers"
    )
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)
    max_num_tokens: _Count | None = Field(None, description="tokens in one step; default chunk plus batch size")
    max_batch_size: _Count = Field(16, description="requests in one step")
    max_seq_len: _Count | None = Field(None, description="prompt and output tokens of one request")
    max_queue: _Count = Field(256, description="requests that wait for a place; one more is refused")
    prefill_chunk_tokens: _Count = Field(512, description="tokens of one prompt in one step")
    kv_block_size: _Count = Field(32, description="tokens in one KV block")
    kv_cache_blocks: _Count | None = Field(None, description="KV blocks; overrides kv_cache_gib")
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="KV memory; default at most 0.5 on CPU, free_gpu_memory_fraction on a GPU"
    )
    kv_staging_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="memory for KV on its way to another worker; default one request of the longest, or an eighth of "
        "the KV memory if that is more",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="auto reads the weights, dummy makes random ones up from config.json alone, equal in every worker",
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share of the GPU memory left after weights that KV takes; default 0.5"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return value


def torch_args(config: WorkerConfig) -> TorchArgs:
    """YAML, then flags, then override JSON. Raises ConfigError naming the key at fault."""
    return engine_arguments(config, TorchArgs, "torch")
