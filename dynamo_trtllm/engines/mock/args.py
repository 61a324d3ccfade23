"""Define the arguments of the mock engine, and what it registers with them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from dynamo_trtllm.config.config_base import NonNegativeFloat
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode
from dynamo_trtllm.protocol.cost_model import (
    DECODE_TERMS,
    PREFILL_TERMS,
    CostModel,
    linear_decode_fit,
    linear_prefill_fit,
    prior_fit,
)
from dynamo_trtllm.protocol.messages import KvLayout, Limits
from dynamo_trtllm.protocol.number_types import MAX_COUNT

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


_Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
KV_WORDS = 64  # 32-bit words of simulated KV per block


class StepCosts(BaseModel):
    """The coefficients of the time of steps, in seconds, in the order of the cost model's terms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decode: Annotated[
        tuple[NonNegativeFloat, ...],
        Field(min_length=len(DECODE_TERMS), max_length=len(DECODE_TERMS)),
    ]
    prefill: Annotated[
        tuple[NonNegativeFloat, ...],
        Field(min_length=len(PREFILL_TERMS), max_length=len(PREFILL_TERMS)),
    ]


class MockArgs(BaseModel):
    """All arguments of the mock engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: NonNegativeFloat = Field(
        0.005, description="duration of one step in seconds; 0: no delay"
    )
    decode_request_s: NonNegativeFloat = Field(
        0.0, description="more seconds per request that decodes"
    )
    context_token_s: NonNegativeFloat = Field(
        0.0, description="more seconds per context token of the requests that decode"
    )
    prefill_token_s: NonNegativeFloat = Field(
        0.0, description="more seconds per prompt token of the step"
    )
    step_costs: StepCosts | None = Field(
        None,
        description="coefficients of the time of steps, as in docs/cost-model.md, in place of the"
        " times above",
    )
    step_noise: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="standard deviation of a step's time: 0.1: 10%"
    )
    prefill_tokens_per_step: _Count = Field(8192, description="maximum prompt tokens per step")
    decodes_take_step_tokens: bool = Field(
        False,
        description="let each decode request of a step take one of these tokens, as in vLLM and"
        " TensorRT-LLM: a prompt of as many tokens then needs a second step",
    )
    splits_prompts: bool = Field(
        True,
        description="compute a part of a prompt in a step that has no place for all of it; false as"
        " in TensorRT-LLM without enable_chunked_prefill",
    )
    prefill_launch_s: NonNegativeFloat = Field(
        0.0,
        description="seconds for which the engine launches a step with more prompt tokens than"
        " `max_graph_tokens`: meanwhile it sends no results of the step before",
    )
    max_graph_tokens: _Count = Field(
        1024, description="most tokens of a step for which there is a CUDA graph"
    )
    kv_cache_blocks: _Count = Field(65536, description="number of KV blocks")
    kv_block_size: _Count = Field(32, description="tokens per KV block")
    enable_prefix_caching: bool = Field(
        False,
        description="reuse the KV blocks of earlier requests; only the rest of a prompt takes time",
    )
    max_batch_size: _Count = Field(4096, description="maximum requests per step")
    max_queue: _Count = Field(4096, description="maximum queued requests")
    max_seq_len: _Count = Field(
        131072, description="maximum prompt and output tokens of one request"
    )
    kv_transfer_s: NonNegativeFloat = Field(
        0.0, description="seconds of a KV transfer, besides those of the transfer backend"
    )
    kv_transfer_block_s: NonNegativeFloat = Field(
        0.0,
        description="more seconds of a KV transfer per KV block, in which transfers to one worker"
        " wait for each other",
    )
    kv_post_block_s: NonNegativeFloat = Field(
        0.0,
        description="seconds per KV block for which the steps of a decode worker pause before a KV"
        " transfer, as in vLLM",
    )
    recompute_last_token: bool = Field(
        False,
        description="let the decode worker begin with a step, as vLLM does: the first token of the"
        " output then waits for this step, and comes with the second one",
    )
    plan_ahead: bool = Field(
        False,
        description="plan each step when the one before begins, as vLLM does: what comes later"
        " waits for one more step",
    )
    transfer_backend: Literal["tcp", "nixl"] = Field(
        "tcp", description="KV transfer backend for the simulated KV"
    )
    kv_checksums: ChecksumMode = Field("auto", description=KV_CHECKSUMS)

    @property
    def cost_prior(self) -> CostModel:
        """The cost model that these arguments describe: the time of steps and of KV transfers."""
        decode = linear_decode_fit(self.step_s, self.decode_request_s, self.context_token_s)
        prefill = linear_prefill_fit(
            self.step_s, self.prefill_token_s, self.decode_request_s, self.context_token_s
        )
        if self.step_costs is not None:
            decode = prior_fit(self.step_costs.decode)
            prefill = prior_fit(self.step_costs.prefill)
        # The cost model counts prompts in Ki (1,024) tokens.
        blocks_per_ki = 1024 / self.kv_block_size
        seconds_per_ki = (self.kv_transfer_block_s + self.kv_post_block_s) * blocks_per_ki
        return CostModel(
            decode,
            prefill,
            step_tokens=self.prefill_tokens_per_step,
            kv_transfer=prior_fit((self.kv_transfer_s, seconds_per_ki, seconds_per_ki)),
        )

    @property
    def is_constant(self) -> bool:
        """True if all steps take `step_s`."""
        extras = (
            self.decode_request_s,
            self.context_token_s,
            self.prefill_token_s,
            self.step_noise,
        )
        return self.step_costs is None and not any(extras)

    @property
    def has_prompt_time(self) -> bool:
        """True if a step takes longer with more prompt tokens."""
        return self.step_costs is not None or self.prefill_token_s > 0

    def kv_post_s(self, num_blocks: int) -> float:
        """Return for how long the steps of a decode worker pause before a KV transfer."""
        return self.kv_post_block_s * num_blocks

    @property
    def layout(self) -> KvLayout:
        """The layout of the simulated KV."""
        return KvLayout(
            dtype="uint32",
            block_tokens=self.kv_block_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=KV_WORDS,
        )


def mock_info(args: MockArgs, layout: KvLayout) -> EngineInfo:
    """Return what the engine registers."""
    return EngineInfo(
        engine="mock",
        context_length=args.max_seq_len,
        vocab_size=201088,
        eos_token_ids=(200002, 200012),
        renderer="harmony",
        layout=layout,
        limits=Limits(
            max_batch_size=args.max_batch_size,
            max_num_tokens=args.prefill_tokens_per_step,
            kv_blocks=args.kv_cache_blocks,
        ),
        unsupported_features=_UNSUPPORTED_FEATURES,
        supported_features=("priority",),
        can_aggregate=True,
        reuses_prefixes=args.enable_prefix_caching,
        cost_prior=args.cost_prior,
    )
