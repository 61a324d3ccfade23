"""Rules about single values that TensorRT-LLM refuses or that make an engine useless, whatever else is set. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_trtllm.engine.trtllm.preflight.facts import RoleFacts
from dynamo_trtllm.engine.trtllm.preflight.rule import Clash, RoleRule
from dynamo_trtllm.messages import Role

_RAY = ("ray_worker_extension_cls", "ray_placement_config", "ray_worker_nsight_options")


def _fraction(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _above_zero(value: Any) -> bool:
    return _number(value) and value > 0


def _from_zero(value: Any) -> bool:
    return _number(value) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _windows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_above_zero(each) for each in value)


# What TensorRT-LLM's own validators hold: (field, whether it may be so, in words).
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("kv_cache_config.free_gpu_memory_fraction", _fraction, "from 0 to 1"),
    ("kv_cache_config.max_gpu_total_bytes", _from_zero, "0 or more"),
    ("kv_cache_config.max_attention_window", _windows, "a list of lengths above 0"),
    ("kv_cache_config.tokens_per_block", _above_zero, "above 0"),
    ("cuda_graph_config.max_batch_size", _from_zero, "0 or more"),
    ("cache_transceiver_config.max_tokens_in_buffer", _above_zero, "above 0"),
    ("cache_transceiver_config.kv_transfer_timeout_ms", _above_zero, "above 0, or null"),
    ("cache_transceiver_config.kv_transfer_sender_future_timeout_ms", _above_zero, "above 0, or null"),
    ("batch_wait_timeout_ms", _from_zero, "0 or more"),
    ("batch_wait_timeout_iters", _from_zero, "0 or more"),
    ("batch_wait_max_tokens_ratio", _fraction, "from 0 to 1"),
    ("stream_interval", _above_zero, "above 0"),
    ("tensor_parallel_size", _above_zero, "above 0"),
    ("max_batch_size", _above_zero, "above 0"),
    ("max_num_tokens", _above_zero, "above 0"),
    ("max_seq_len", _above_zero, "above 0"),
)


def _out_of_range(facts: RoleFacts) -> Clash | None:
    for key, fits, words in _RANGES:
        leaf = facts.args.leaves.get(key)
        if leaf is not None and leaf.value is not None and not fits(leaf.value):
            return Clash(field=key, other=words, cure=f"give a value {words}")
    return None


def _ray_without_ray(facts: RoleFacts) -> Clash | None:
    if facts.args.get("orchestrator_type") == "ray":
        return None
    for key in _RAY:
        if facts.section(key):
            return Clash(field=key, value="set", other=f"orchestrator_type {facts.shown('orchestrator_type')}")
    return None


def _dummy_weights(facts: RoleFacts) -> Clash | None:
    return Clash() if str(facts.args.get("load_format")).rpartition(".")[2].upper() == "DUMMY" else None


def _idle_postprocessing(facts: RoleFacts) -> Clash | None:
    if (facts.number("num_postprocess_workers") or 0) <= 0:
        return None
    return Clash(other="workers here stream token ids; text is made in the frontend")


def _interval_on_prefill(facts: RoleFacts) -> Clash | None:
    key = "stream_interval"
    if facts.role is not Role.PREFILL or key not in facts.args.leaves or (facts.number(key) or 1) <= 1:
        return None
    return Clash(other="a prefill worker streams nothing")


RULES = (
    RoleRule(
        name="value-range",
        severity="error",
        field="kv_cache_config.free_gpu_memory_fraction",
        why="TensorRT-LLM refuses the value, after it has taken the time to start",
        cure="give a value in the range that is shown",
        test=_out_of_range,
    ),
    RoleRule(
        name="ray-without-ray",
        severity="error",
        field="ray_placement_config",
        why="TensorRT-LLM refuses settings of Ray when another launcher starts the ranks",
        cure="set orchestrator_type: ray, or leave it out",
        test=_ray_without_ray,
    ),
    RoleRule(
        name="dummy-weights",
        severity="warning",
        field="load_format",
        why="the weights are random numbers: answers have no meaning",
        cure="leave load_format out, except for measuring",
        test=_dummy_weights,
    ),
    RoleRule(
        name="postprocess-workers-idle",
        severity="note",
        field="num_postprocess_workers",
        why="there is no text to make in the engine, so these processes have nothing to do",
        cure="leave it out",
        test=_idle_postprocessing,
    ),
    RoleRule(
        name="stream-interval-prefill",
        severity="note",
        field="stream_interval",
        why="the one token of a prefill leg travels in the ticket",
        cure="leave it out on prefill",
        test=_interval_on_prefill,
    ),
)
