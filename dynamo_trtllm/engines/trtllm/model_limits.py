"""Derive the limits of all requests from the arguments, the release and the model."""

from __future__ import annotations

from dynamo_trtllm.engines.engine_interface import EngineInfo, PromptLimit
from dynamo_trtllm.engines.manifests import Presence
from dynamo_trtllm.engines.trtllm.args import TrtllmArgs
from dynamo_trtllm.engines.trtllm.preflight.facts import BUFFER, RoleFacts
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Phase

# The first candidate of 1.3 that surely supports penalties. The changes were merged one to three
# candidates earlier.
PENALTIES_SINCE = 24


def has_torch_sampler(args: TrtllmArgs) -> bool:
    """Return True if the PyTorch sampler runs, and not the TRTLLM sampler.

    From 1.3 on, the PyTorch sampler is the only one.
    """
    if args.release.presence("TorchLlmArgs", "sampler_type") is not Presence.PRESENT:
        return True
    # The value may be an enum, whose text begins with its class.
    _, _, sampler = str(args.get("sampler_type")).rpartition(".")
    return sampler != "TRTLLMSampler"


def dp_ranks(facts: RoleFacts) -> int:
    """Return the number of attention-DP ranks among which requests can choose; 0 without attention
    DP.
    """
    return facts.tensor_parallel if facts.is_enabled("enable_attention_dp") else 0


def context_length(facts: RoleFacts) -> int:
    """Return the longest request in tokens, prompt and output together.

    Raises:
        ConfigError: neither the arguments nor the model set a context length.
    """
    if not facts.max_seq_len:
        raise ConfigError(
            "config.json has no context length. Pass --max-seq-len.", field="max_seq_len"
        )
    return facts.max_seq_len


def prompt_limit(facts: RoleFacts, phase: Phase) -> PromptLimit:
    """Return the longest prompt of a call in this phase, and the argument that sets it."""
    context = context_length(facts)
    candidates = [PromptLimit(context - 1, f"max_seq_len {context}")]
    # For prompts that are longer than the transfer buffer, TensorRT-LLM uses a fallback that fails
    # with NIXL.
    if facts.buffer_tokens and phase is not Phase.AGGREGATED:
        candidates.append(PromptLimit(facts.buffer_tokens, BUFFER))
    if phase is not Phase.DECODE and not facts.is_enabled("enable_chunked_prefill"):
        candidates.append(
            PromptLimit(facts.max_num_tokens, "max_num_tokens without enable_chunked_prefill")
        )
    return min(candidates)


class TrtllmModelLimits:
    """Limits for all requests, from the model, the arguments and the release.

    See `TrtllmBindings.is_since_1_2` for `is_since_1_2`.
    """

    def __init__(self, facts: RoleFacts, info: EngineInfo, *, is_since_1_2: bool) -> None:
        self.role = facts.role
        self.info = info  # the model's own stop tokens in it have the main one first
        # Each limit leaves space for one output token in the context.
        self.prompt_limits = {phase: prompt_limit(facts, phase) for phase in Phase}
        # The guided-decoding backend supports structural tags in the form {"format": …}.
        guided_backend = facts.args.get("guided_decoding_backend")
        self.has_structural_tags = guided_backend == "xgrammar" and is_since_1_2
        # True if `min_tokens` works for all prompts.
        has_old_sampler = not has_torch_sampler(facts.args)
        self.has_min_tokens = has_old_sampler or facts.is_at_least_candidate(PENALTIES_SINCE)
        # Attention-DP ranks among which a request can choose; 0 if it can't choose.
        self.dp_ranks = dp_ranks(facts)
        # The executor looks at conversation ids to choose a rank or to keep KV blocks.
        has_affinity = facts.is_enabled(
            "attention_dp_config.kv_cache_routing_conversation_affinity"
        )
        chooses_rank = has_affinity and self.dp_ranks > 0
        block_reuse = facts.section_values("kv_cache_config.block_reuse_config")
        keeps_blocks = block_reuse.get("policy") == "per_conversation"
        self.uses_conversations = chooses_rank or keeps_blocks
