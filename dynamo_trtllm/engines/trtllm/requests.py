"""Convert a prefill, decode or aggregated call to plain arguments of `LLM.generate_async`.

Requests with unsupported fields are rejected before TensorRT-LLM receives them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from dynamo_trtllm.engines.engine_interface import check_request, stop_token_ids
from dynamo_trtllm.engines.external.library import guided_params, is_plain, queue_priority
from dynamo_trtllm.engines.trtllm.model_limits import TrtllmModelLimits
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import GenerateRequest, Phase, Role, Sampling

NO_END = -1  # TensorRT-LLM's own value for "no end token"


class TrtllmRequest:
    """A checked request as arguments of one call of `generate_async`. TensorRT-LLM modifies them.

    Raises:
        ContextTooLong: the prompt is longer than the limit of this worker.
        RequestRejected: names the unsupported field.
    """

    def __init__(self, request: GenerateRequest, model_limits: TrtllmModelLimits) -> None:
        _check(request, model_limits)
        sampling = request.sampling
        # Output limit of the request, over all phases.
        self.max_tokens = min(
            sampling.max_tokens, model_limits.info.context_length - len(request.token_ids)
        )
        self.stop_ids = stop_token_ids(sampling, model_limits.info)
        # True if the KV of this prefill call is held for a decode worker. A request for one token
        # ends in prefill. No decode worker would fetch its KV, so its KV must not be held.
        self.exports_kv = request.phase is Phase.PREFILL and self.max_tokens > 1
        max_tokens = 1 if self.exports_kv else self.max_tokens
        # Arguments of SamplingParams.
        self.sampling = _sampling(sampling, model_limits, self.stop_ids, max_tokens)
        # Arguments of GuidedDecodingParams.
        self.guided = None if sampling.guided is None else guided_params(sampling.guided)
        self.bias = sampling.logit_bias  # (token id, value); `bindings` converts it to a tensor
        # Arguments of SchedulingParams.
        self.dp_rank = _dp_rank(request, model_limits)
        self.conversation_id: str | None = None
        if model_limits.uses_conversations:
            self.conversation_id = request.conversation_id
        # Headers for TensorRT-LLM's own spans. TensorRT-LLM sends spans if its argument
        # `otlp_traces_endpoint` is set.
        self.trace_headers: dict[str, str] | None = None
        if request.traceparent is not None:
            self.trace_headers = {"traceparent": request.traceparent}
        # Arguments of `generate_async` that are plain values.
        self.keywords: dict[str, Any] = {
            "inputs": list(request.token_ids),
            "streaming": request.phase is not Phase.PREFILL,
        }
        if request.cache_salt is not None:
            self.keywords["cache_salt"] = request.cache_salt
        priority = queue_priority(request, model_limits.info)
        if priority:
            self.keywords["priority"] = _trtllm_priority(priority)


def _trtllm_priority(priority: int) -> float:
    """Convert a priority from `queue_priority` to TensorRT-LLM's scale.

    For `queue_priority`, 0 is the default, and lower values come first. For TensorRT-LLM, 0.5 is
    the default, and 1 comes first. The executor stores the value in 32 bits, in which multiples of
    1 / 2**22 stay distinct.
    """
    return min(1.0, max(0.0, 0.5 - priority / (1 << 22)))


def _dp_rank(request: GenerateRequest, model_limits: TrtllmModelLimits) -> dict[str, Any] | None:
    """Return the arguments of SchedulingParams; None if any attention-DP rank may run the request.

    A rank that does not exist would end the executor: its scheduler uses the number as an index
    (`_can_process_attention_dp_request` in _torch/pyexecutor/executor_request_queue.py, 1.2).
    `attention_dp_relax` is always given, because some releases fail for None (pull request 14276).
    """
    name = "prefill_dp_rank" if request.phase is Phase.PREFILL else "dp_rank"
    rank = getattr(request, name)
    if rank is None:
        return None
    if not 0 <= rank < model_limits.dp_ranks:
        advice = "it runs without attention DP; omit it"
        if model_limits.dp_ranks > 0:
            advice = f"0 to {model_limits.dp_ranks - 1} are valid"
        raise RequestRejected(f"this worker has no attention-DP rank {rank}: {advice}", field=name)
    return {"attention_dp_rank": rank, "attention_dp_relax": request.relax_dp_rank}


def _check(request: GenerateRequest, model_limits: TrtllmModelLimits) -> None:
    check_request(
        request,
        model_limits.info,
        transfers_kv=model_limits.role is not Role.AGGREGATED,
        engine="TensorRT-LLM",
        limit=model_limits.prompt_limits[request.phase],
        priority_argument="scheduler_config.waiting_queue_policy",
    )
    sampling = request.sampling
    needs_min_tokens = sampling.min_tokens > 0 and not sampling.ignore_eos
    if needs_min_tokens and not model_limits.has_min_tokens:
        # In some releases the PyTorch sampler ignores min_tokens, in others it counts the prompt as
        # output (pull requests 7808 and 12166).
        raise RequestRejected(
            "min_tokens has no effect on this worker's TensorRT-LLM; omit it, or set ignore_eos",
            field="min_tokens",
        )
    needs_tags = sampling.guided is not None and not is_plain(sampling.guided)
    if needs_tags and not model_limits.has_structural_tags:
        raise RequestRejected(
            "structured output for part of the answer needs TensorRT-LLM 1.2 with"
            " guided_decoding_backend: xgrammar",
            field="guided",
        )


def _sampling(
    sampling: Sampling, model_limits: TrtllmModelLimits, stop_ids: frozenset[int], max_tokens: int
) -> dict[str, Any]:
    # Without an end id TensorRT-LLM would look for a tokenizer, and some releases would add the
    # checkpoint's stop tokens to this object.
    end_id = next(iter(model_limits.info.eos_token_ids), NO_END)
    values: dict[str, Any] = {
        "end_id": end_id,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": max_tokens,
        "stop_token_ids": sorted(stop_ids - {end_id}) or None,
        # The frontend needs the stop token: Harmony ends tool calls with one.
        "include_stop_str_in_output": True,
        "detokenize": False,
        "seed": sampling.seed,
        # To TensorRT-LLM, 0 means no log-probabilities. If the client wants no alternatives, 1 is
        # passed, and `token_logprob` drops the alternative.
        "logprobs": None if sampling.logprobs is None else max(1, sampling.logprobs),
    }
    if sampling.ignore_eos and stop_ids:
        # From 1.3 on, ignore_eos drops all stop tokens (`_enqueue_request` in
        # executor/base_worker.py).
        values |= {"end_id": NO_END, "ignore_eos": False}
    if sampling.min_tokens > 0 and not sampling.ignore_eos:
        # The engine suppresses only the end id. Other stop tokens still end the output, and without
        # an end id the field has no effect.
        values["min_tokens"] = sampling.min_tokens
    if sampling.min_p > 0:
        values["min_p"] = sampling.min_p
    if sampling.temperature == 0:
        # temperature 0 is greedy only from 1.2 on; top_k 1 is greedy in every release.
        values["top_k"] = 1
    else:
        # TensorRT-LLM would decode greedily if none of these three were passed.
        values |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
        }
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, without_effect in neutral.items():
        value = getattr(sampling, name)
        if value != without_effect:
            values[name] = value
    return values


def reported_phases(times: object, *, fetches_kv: bool) -> dict[str, float]:
    """Return the seconds of each phase until the first token, by the executor's clock.

    The result is empty if a time is missing, or if the times are not in order.

    Args:
        times: a `TimingMetrics` (perf_metrics of trtllm-serve, main at 00043967). No manifest
            covers this C++ class, so any of its attributes may be missing.
        fetches_kv: the call is a decode call.
    """
    # The attribute with the time at which each phase ends, in the order of the phases.
    if fetches_kv:
        ends = {
            "queue": "kv_cache_transfer_start",
            "kv_transfer": "kv_cache_transfer_end",
            "first_token": "first_token_time",
        }
    else:
        ends = {"queue": "first_scheduled_time", "prefill": "first_token_time"}
    moments = [getattr(times, name, None) for name in ("arrival_time", *ends.values())]
    # The time of an event that has not happened is 0.
    times_s = [
        moment.total_seconds() if isinstance(moment, timedelta) else 0.0 for moment in moments
    ]
    if times_s[0] <= 0 or times_s != sorted(times_s):
        return {}
    return {
        phase: end_s - begin_s
        for phase, begin_s, end_s in zip(ends, times_s, times_s[1:], strict=False)
    }
