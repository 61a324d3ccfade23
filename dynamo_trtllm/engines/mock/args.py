"""Define the arguments of the mock engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode


class MockArgs(BaseModel):
    """All arguments of the mock engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: Annotated[float, Field(ge=0)] = Field(0.005, description="duration of one step in seconds; 0: no delay")
    prefill_tokens_per_step: Annotated[int, Field(gt=0)] = Field(8192, description="maximum prompt tokens per step")
    kv_cache_blocks: Annotated[int, Field(gt=0)] = Field(65536, description="number of KV blocks")
    kv_block_size: Annotated[int, Field(gt=0)] = Field(32, description="tokens per KV block")
    max_batch_size: Annotated[int, Field(gt=0)] = Field(4096, description="maximum requests per step")
    max_queue: Annotated[int, Field(gt=0)] = Field(4096, description="maximum queued requests")
    max_seq_len: Annotated[int, Field(gt=0)] = Field(
        131072, description="maximum prompt and output tokens of one request"
    )
    transfer_backend: Literal["tcp", "nixl"] = Field("tcp", description="KV transfer backend for the simulated KV")
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)
