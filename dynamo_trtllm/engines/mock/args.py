"""Define the arguments of the mock engine, and what it registers with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dynamo_trtllm.engines.base import EngineInfo
from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode
from dynamo_trtllm.messages import KvLayout, Limits

_UNSUPPORTED_FEATURES = (
    "guided",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
)


class MockArgs(BaseModel):
    """All arguments of the mock engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: Annotated[float, Field(ge=0)] = Field(0.005, description="duration of one step in seconds; 0: no delay")
    prefill_tokens_per_step: Annotated[int, Field(gt=0)] = Field(8192, description="maximum prompt tokens per step")
    kv_cache_blocks: Annotated[int, Field(gt=0)] = Field(65536, description="number of KV blocks")
    kv_block_size: Annotated[int, Field(gt=0)] = Field(32, description="tokens per KV block")
    enable_prefix_caching: bool = Field(
        False, description="reuse the KV blocks of earlier requests; only the rest of a prompt takes time"
    )
    max_batch_size: Annotated[int, Field(gt=0)] = Field(4096, description="maximum requests per step")
    max_queue: Annotated[int, Field(gt=0)] = Field(4096, description="maximum queued requests")
    max_seq_len: Annotated[int, Field(gt=0)] = Field(
        131072, description="maximum prompt and output tokens of one request"
    )
    transfer_backend: Literal["tcp", "nixl"] = Field("tcp", description="KV transfer backend for the simulated KV")
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)


def mock_info(args: MockArgs, layout: KvLayout) -> EngineInfo:
    """Return what the engine registers."""
    return EngineInfo(
        engine="mock",
        context_length=args.max_seq_len,
        vocab_size=201088,
        eos_token_ids=(200002, 200012),
        renderer="harmony",
        layout=layout,
        limits=Limits(max_batch_size=args.max_batch_size, kv_blocks=args.kv_cache_blocks),
        unsupported_features=_UNSUPPORTED_FEATURES,
        supported_features=("priority",),
        can_aggregate=True,
    )
