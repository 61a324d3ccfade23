"""The mock engine's own arguments. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode


class MockArgs(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: Annotated[float, Field(ge=0)] = Field(0.005, description="time of one step; 0: as fast as the loop turns")
    prefill_tokens_per_step: Annotated[int, Field(gt=0)] = Field(8192, description="prompt tokens one step takes")
    kv_cache_blocks: Annotated[int, Field(gt=0)] = Field(65536, description="blocks of KV memory")
    kv_block_size: Annotated[int, Field(gt=0)] = Field(32, description="tokens in one KV block")
    max_batch_size: Annotated[int, Field(gt=0)] = Field(4096, description="requests in one step")
    max_queue: Annotated[int, Field(gt=0)] = Field(4096, description="requests that may wait for a slot")
    max_seq_len: Annotated[int, Field(gt=0)] = Field(131072, description="prompt and output tokens of a request")
    transfer_backend: Literal["tcp", "loopback", "nixl"] = Field("tcp", description="what moves the simulated KV")
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)
