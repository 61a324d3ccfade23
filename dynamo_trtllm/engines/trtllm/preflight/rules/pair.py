"""Rules about a prefill worker and a decode worker that are to transfer KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.preflight_rules import RuleSection, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import BACKEND, BUFFER, RUNTIME, RoleFacts


@dataclass(frozen=True, slots=True)
class PairFacts:
    """Facts about a prefill worker and a decode worker."""

    prefill: RoleFacts
    decode: RoleFacts
    role: None = None  # the rules are about both roles

    @property
    def line(self) -> tuple[int, ...]:
        """The release of the prefill worker."""
        return self.prefill.line

    def value_with_source(self, key: str) -> str:
        """Return prefill's value of an argument and its source as text."""
        return f"prefill: {self.prefill.value_with_source(key)}"


SECTION: RuleSection[PairFacts] = RuleSection("Between prefill and decode")
_KV = "kv_cache_config."
_V2 = f"{_KV}use_kv_cache_manager_v2"
_WINDOW = f"{_KV}max_attention_window"
_BOUNCE = "cache_transceiver_config.kv_cache_bounce_size_mb"
# Attention backends whose KV is not resharded. TensorRT-LLM takes TRTLLM for unknown words.
_OTHER_ATTENTION = ("FLASHINFER", "VANILLA", "FLASHINFER_STAR_ATTENTION")
_SAME = "set it to the same on both sides"
_MODEL = ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "quantization")


@SECTION.rule(
    "error",
    "model-equal",
    field="model",
    why="the KV of one model is invalid for another",
    fix="use the same model folder on both sides",
)
def model_equal(pair: PairFacts) -> Violation | None:
    """Find two models. Only properties that determine the KV are compared."""
    prefill = pair.prefill.model
    decode = pair.decode.model
    if prefill is None or decode is None:
        return None
    for name in _MODEL:
        of_prefill = getattr(prefill, name)
        of_decode = getattr(decode, name)
        if of_prefill != of_decode:
            return Violation(value=f"prefill: {name} {of_prefill}", other=f"decode: {of_decode}")
    return None


@SECTION.rule(
    "warning",
    "release-equal",
    field="release",
    why="the format of the transfer metadata is internal to each release of TensorRT-LLM",
    fix="install the same release on both sides",
)
def release_equal(pair: PairFacts) -> Violation | None:
    """Find two release lines."""
    if pair.prefill.line == pair.decode.line:
        return None
    return _releases(pair)


@SECTION.rule(
    "error",
    "build-equal",
    field="release",
    why="Python transceivers exchange unversioned data, so both sides need the same build",
    fix="install the same build on both sides",
)
def build_equal(pair: PairFacts) -> Violation | None:
    """Find Python transceivers of two builds."""
    if not pair.prefill.runtime == pair.decode.runtime == "PYTHON":
        return None
    if pair.prefill.release == pair.decode.release:
        return None
    return _releases(pair)


@SECTION.rule(
    "error",
    "strategy-equal",
    field="disaggregation_strategy",
    why="prefill and decode would wait for each other",
    fix="use the same --disaggregation-strategy on both sides",
)
def strategy_equal(pair: PairFacts) -> Violation | None:
    """Find two strategies."""
    prefill = pair.prefill.strategy
    decode = pair.decode.strategy
    if prefill == decode:
        return None
    return Violation(value=f"prefill: {prefill}", other=f"decode: {decode}")


@SECTION.rule(
    "error",
    "transceiver-equal",
    field=BACKEND,
    why="different backends cannot connect: decode waits for KV that never arrives",
    fix=_SAME,
)
def transceiver_equal(pair: PairFacts) -> Violation | None:
    """Find two backends. The rule transceiver-missing reports a missing backend."""
    prefill = pair.prefill.transceiver
    decode = pair.decode.transceiver
    if not prefill or not decode or prefill == decode:
        return None
    return _differs(pair, BACKEND)


@SECTION.rule(
    "error",
    "transceiver-runtime-equal",
    field=RUNTIME,
    why="the C++ and the Python transceiver are incompatible",
    fix=_SAME,
)
def transceiver_runtime_equal(pair: PairFacts) -> Violation | None:
    """Find one C++ and one Python transceiver with the same backend."""
    if pair.prefill.transceiver != pair.decode.transceiver:
        return None
    if pair.prefill.runtime == pair.decode.runtime:
        return None
    return _differs(pair, RUNTIME)


@SECTION.rule(
    "error",
    "kv-dtype-equal",
    field=f"{_KV}dtype",
    why="KV blocks are copied without conversion, and their size depends on the type",
    fix=_SAME,
)
def kv_dtype_equal(pair: PairFacts) -> Violation | None:
    """Find two types of KV."""
    if pair.prefill.kv_dtype == pair.decode.kv_dtype:
        return None
    return _differs(pair, f"{_KV}dtype")


@SECTION.rule(
    "warning",
    "cache-manager-equal",
    field=_V2,
    why=(
        "each KV cache manager has its own pools of blocks: whether KV moves between v1 and v2 is"
        " unverified"
    ),
    fix=_SAME,
)
def cache_manager_equal(pair: PairFacts) -> Violation | None:
    """Find two cache managers."""
    if pair.prefill.args.get(_V2) == pair.decode.args.get(_V2):
        return None
    return _differs(pair, _V2)


@SECTION.rule(
    "error",
    "block-size-equal",
    field=f"{_KV}tokens_per_block",
    why="KV blocks are copied without conversion",
    fix=_SAME,
)
def block_size_equal(pair: PairFacts) -> Violation | None:
    """Find two block sizes."""
    if pair.prefill.block_tokens == pair.decode.block_tokens:
        return None
    return _differs(pair, f"{_KV}tokens_per_block")


@SECTION.rule(
    "error",
    "attention-backend-equal",
    field="attn_backend",
    why="each attention backend has its own KV layout, and blocks are copied without conversion",
    fix="set it to TRTLLM on both sides",
)
def attention_backend_equal(pair: PairFacts) -> Violation | None:
    """Find two attention backends."""
    if pair.prefill.attention == pair.decode.attention:
        return None
    return _differs(pair, "attn_backend")


@SECTION.rule(
    "error",
    "parallel-needs-trtllm-attention",
    field="attn_backend",
    why=(
        "only TRTLLM's KV is resharded between different tensor-parallel sizes; other backends"
        " returned wrong text"
    ),
    fix="set it to TRTLLM on both sides, or use the same parallel sizes",
)
def parallel_needs_trtllm_attention(pair: PairFacts) -> Violation | None:
    """Find two parallel sizes with an attention backend that can't reshard.

    The rule attention-backend-equal reports two backends.
    """
    prefill = pair.prefill
    decode = pair.decode
    if prefill.attention != decode.attention or prefill.attention not in _OTHER_ATTENTION:
        return None
    if prefill.sharding == decode.sharding:
        return None
    return Violation(other=f"prefill has {prefill.sharding}, decode {decode.sharding}")


@SECTION.rule(
    "warning",
    "pipeline-to-tensor",
    field="pipeline_parallel_size",
    why=(
        "pipeline parallelism on prefill with tensor parallelism on decode may hang (known issue of"
        " 1.2)"
    ),
    fix="use the same parallelism on both sides",
)
def pipeline_to_tensor(pair: PairFacts) -> Violation | None:
    """Find a prefill worker with a pipeline of another size than the decode worker's."""
    size = pair.prefill.size("pipeline_parallel_size")
    if size in (1, pair.decode.size("pipeline_parallel_size")):
        return None
    return _differs(pair, "pipeline_parallel_size")


@SECTION.rule(
    "error",
    "seq-len-order",
    field="max_seq_len",
    why="prefill would accept requests that are too long for decode",
    fix="set it on prefill to at most decode's value",
)
def seq_len_order(pair: PairFacts) -> Violation | None:
    """Find a prefill worker that accepts longer requests than decode."""
    prefill = pair.prefill.max_seq_len
    decode = pair.decode.max_seq_len
    if prefill is None or decode is None or prefill <= decode:
        return None
    return Violation(
        other=_decode_value(pair, "max_seq_len"), fix=f"set it to at most {decode} on prefill"
    )


@SECTION.rule(
    "warning",
    "buffer-differs",
    field=BUFFER,
    why="the smaller buffer limits which prompts can be transferred",
    fix=_SAME,
)
def buffer_differs(pair: PairFacts) -> Violation | None:
    """Find two sizes of the transfer buffer."""
    prefill = pair.prefill.buffer_tokens
    decode = pair.decode.buffer_tokens
    if prefill is None or decode is None or prefill == decode:
        return None
    return Violation(
        other=_decode_value(pair, BUFFER), fix=f"set it to {max(prefill, decode)} on both sides"
    )


@SECTION.rule(
    "error",
    "attention-window-equal",
    field=_WINDOW,
    why="the two sides would store different blocks of the same prompt",
    fix=_SAME,
)
def attention_window_equal(pair: PairFacts) -> Violation | None:
    """Find two attention windows."""
    if _windows(pair.prefill) == _windows(pair.decode):
        return None
    return _differs(pair, _WINDOW)


@SECTION.rule(
    "error",
    "speculative-equal",
    field="speculative_config",
    why=(
        "draft tokens and the KV of the draft layers are part of the transfer, so both sides must"
        " have the same method"
    ),
    fix="set it to the same on both sides, or remove it",
)
def speculative_equal(pair: PairFacts) -> Violation | None:
    """Find draft layers that only one side has.

    The Python transceiver transfers the prompt's KV alone, so decode may have drafts for itself.
    The C++ transceiver compares the states of both sides.
    """
    prefill, decode = _speculative(pair)
    has_same_method = prefill.get("decoding_type") == decode.get("decoding_type")
    both_or_none = bool(prefill) == bool(decode)
    if has_same_method and both_or_none:
        return None
    if not prefill and pair.prefill.runtime == "PYTHON":
        return None
    return _speculative_violation(pair)


@SECTION.rule(
    "warning",
    "speculative-decode-only",
    field="speculative_config",
    why=(
        "it is in use with the Python transceiver, which transfers the prompt's KV without draft"
        " layers; this project has not tried it"
    ),
    fix="check output and acceptance rate first",
)
def speculative_decode_only(pair: PairFacts) -> Violation | None:
    """Find a decode worker that has drafts while the prefill worker has none, as in TensorRT-LLM's
    files for Qwen3.8 (examples/configs/curated).
    """
    prefill, decode = _speculative(pair)
    if prefill or not decode or pair.prefill.runtime != "PYTHON":
        return None
    return _speculative_violation(pair)


@SECTION.rule(
    "warning",
    "speculative-differs",
    field="speculative_config",
    why=(
        "draft tokens are part of the transfer: whether other settings of the same method fit is"
        " not established"
    ),
    fix="set it to the same on both sides",
)
def speculative_differs(pair: PairFacts) -> Violation | None:
    """Find one method with two settings."""
    prefill, decode = _speculative(pair)
    if not prefill or not decode or prefill == decode:
        return None
    if prefill.get("decoding_type") != decode.get("decoding_type"):
        return None
    return _speculative_violation(pair)


@SECTION.rule(
    "note",
    "bounce-buffer-unset",
    since=(1, 3),
    field=_BOUNCE,
    why=(
        "if the numbers of ranks differ, each block is split by KV heads into many small pieces,"
        " and a transfer took seconds (pull requests 16832 and 17518)"
    ),
    fix=(
        "set cache_transceiver_config.kv_cache_bounce_size_mb on both sides; TensorRT-LLM's own"
        " files have 512"
    ),
)
def bounce_buffer_unset(pair: PairFacts) -> Violation | None:
    """Find the Python transceiver with different numbers of ranks and without a bounce buffer.

    The reports of slow transfers are of GB200 and GB300, and of models with groups of attention
    heads. Latent KV has no heads, so its blocks are not split.
    """
    prefill = pair.prefill
    decode = pair.decode
    if not prefill.runtime == decode.runtime == "PYTHON" or prefill.sharding == decode.sharding:
        return None
    if prefill.number(_BOUNCE) or decode.number(_BOUNCE):
        return None
    model = prefill.model
    if not prefill.has_multi_node_nvlink or model is None:
        return None
    if not 1 < model.num_kv_heads < model.num_attention_heads:
        return None
    return Violation(
        value=f"prefill: unset, {prefill.sharding}", other=f"decode: unset, {decode.sharding}"
    )


def _windows(facts: RoleFacts) -> list[int] | None:
    """Return the windows of all layers; None if all layers see the whole sequence.

    A list that is shorter than the number of layers repeats. A window is at most max_seq_len,
    because a sequence is never longer. Without the number of layers, return the part that repeats.
    """
    given = facts.args.get(_WINDOW)
    longest = facts.max_seq_len
    if not isinstance(given, list) or not given:
        return None
    windows = [window if longest is None else min(window, longest) for window in given]
    if longest is not None and set(windows) == {longest}:
        # All layers see as much as without windows.
        return None
    if facts.model is None:
        return _shortest_period(windows)
    return [windows[layer % len(windows)] for layer in range(facts.model.num_layers)]


def _shortest_period(windows: list[int]) -> list[int]:
    """Return the shortest list that is the same as these windows when both repeat."""
    count = len(windows)
    for size in range(1, count):
        period = windows[:size]
        if period * (count // size) == windows:
            return period
    return windows


def _speculative(pair: PairFacts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of drafts of the prefill and of the decode worker."""
    prefill = pair.prefill.section_values("speculative_config")
    decode = pair.decode.section_values("speculative_config")
    return prefill, decode


def _speculative_violation(pair: PairFacts) -> Violation:
    prefill, decode = _speculative(pair)
    return Violation(value=f"prefill: {prefill or 'unset'}", other=f"decode: {decode or 'unset'}")


def _differs(pair: PairFacts, key: str) -> Violation:
    """Return the violation of a rule for which an argument must be equal on both sides."""
    return Violation(other=_decode_value(pair, key))


def _decode_value(pair: PairFacts, key: str) -> str:
    return f"decode: {pair.decode.value_with_source(key)}"


def _releases(pair: PairFacts) -> Violation:
    return Violation(
        value=f"prefill: {pair.prefill.release}", other=f"decode: {pair.decode.release}"
    )
