"""Rules between prefill and decode, from the arguments of both sides and from registered workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.rules import PairRule, Violation
from dynamo_trtllm.engines.trtllm.preflight.facts import BACKEND, BUFFER, RoleFacts
from dynamo_trtllm.kv_transfer.params import EQUAL_LAYOUT
from dynamo_trtllm.messages import Instance, Role

_ATTENTION = "attn_backend"
_WINDOWS = "kv_cache_config.max_attention_window"
_SPECULATIVE = "speculative_config"


def _transceivers(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    """Compare the backends. A missing one is reported by transceiver-missing."""
    if prefill.transceiver is None or decode.transceiver is None or prefill.transceiver == decode.transceiver:
        return None
    return _differs(decode, BACKEND)


def _runtimes(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    key = "cache_transceiver_config.transceiver_runtime"
    return None if prefill.args.get(key) == decode.args.get(key) else _differs(decode, key)


def _kv_dtypes(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    return None if prefill.kv_dtype == decode.kv_dtype else _differs(decode, "kv_cache_config.dtype")


def _blocks(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    if prefill.block_tokens == decode.block_tokens:
        return None
    return _differs(decode, "kv_cache_config.tokens_per_block")


def _attention(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    same = _attention_name(prefill) == _attention_name(decode)
    return None if same else _differs(decode, _ATTENTION)


def _parallel_needs_trtllm(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    """Report different parallel sizes. Different backends are reported by attention-backend-equal."""
    name = _attention_name(prefill)
    if _ranks(prefill) == _ranks(decode) or name == "TRTLLM" or name != _attention_name(decode):
        return None
    return Violation(other=f"prefill has {_spread(prefill)}, decode {_spread(decode)}")


def _attention_name(facts: RoleFacts) -> str:
    return str(facts.args.get(_ATTENTION) or "TRTLLM").upper()


def _ranks(facts: RoleFacts) -> tuple[int, bool]:
    return facts.tensor_parallel, facts.on("enable_attention_dp")


def _spread(facts: RoleFacts) -> str:
    return f"tensor_parallel_size {facts.tensor_parallel}" + (
        " with attention DP" if facts.on("enable_attention_dp") else ""
    )


def _pipeline_to_tensor(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    key = "pipeline_parallel_size"
    if prefill.size(key) == 1 or prefill.size(key) == decode.size(key):
        return None
    return _differs(decode, key)


def _lengths(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    mine, theirs = prefill.max_seq_len, decode.max_seq_len
    if theirs is None or (mine is not None and mine <= theirs):
        return None
    return _differs(decode, "max_seq_len", fix=f"set it to at most {theirs} on prefill")


def _buffers(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    mine, theirs = prefill.number(BUFFER), decode.number(BUFFER)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _differs(decode, BUFFER, fix=f"set it to {max(mine, theirs)} on both sides")


def _windows(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    return None if prefill.args.get(_WINDOWS) == decode.args.get(_WINDOWS) else _differs(decode, _WINDOWS)


def _models(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    mine, theirs = prefill.model, decode.model
    if mine is None or theirs is None:
        return None
    for name in ("model_type", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "quantization"):
        if getattr(mine, name) != getattr(theirs, name):
            return Violation(value=f"prefill: {name} {getattr(mine, name)}", other=f"decode: {getattr(theirs, name)}")
    return None


def _releases(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    if prefill.line == decode.line:
        return None
    return Violation(value=f"prefill: {prefill.release}", other=f"decode: {decode.release}")


def _strategies(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    if prefill.strategy == decode.strategy:
        return None
    return Violation(value=f"prefill: {prefill.strategy}", other=f"decode: {decode.strategy}")


def _speculative(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    mine, theirs = (_leaves(facts, _SPECULATIVE) for facts in (prefill, decode))
    if mine == theirs:
        return None
    return Violation(value=f"prefill: {mine or 'unset'}", other=f"decode: {theirs or 'unset'}")


def _leaves(facts: RoleFacts, section: str) -> dict[str, object]:
    inside = f"{section}."
    return {key.removeprefix(inside): leaf.value for key, leaf in facts.args.leaves.items() if key.startswith(inside)}


def _differs(decode: RoleFacts, field: str, *, fix: str = "") -> Violation:
    return Violation(field=field, other=f"decode: {decode.shown(field)}", fix=fix)


PAIR_RULES = (
    PairRule(
        name="model-equal",
        severity="error",
        field="model",
        why="the KV of one model is invalid for another",
        fix="use the same model folder on both sides",
        test=_models,
    ),
    PairRule(
        name="release-equal",
        severity="warning",
        field="release",
        why="the format of the transfer metadata is internal to each release of TensorRT-LLM",
        fix="install the same release on both sides",
        test=_releases,
    ),
    PairRule(
        name="strategy-equal",
        severity="error",
        field="disaggregation_strategy",
        why="prefill and decode would wait for each other",
        fix="use the same --disaggregation-strategy on both sides",
        test=_strategies,
    ),
    PairRule(
        name="transceiver-equal",
        severity="error",
        field=BACKEND,
        why="different backends cannot connect: decode waits for KV that never arrives",
        fix="set it to the same on both sides",
        test=_transceivers,
    ),
    PairRule(
        name="transceiver-runtime-equal",
        severity="error",
        field="cache_transceiver_config.transceiver_runtime",
        why="the C++ and the Python transceiver are incompatible",
        fix="set it to the same on both sides",
        test=_runtimes,
    ),
    PairRule(
        name="kv-dtype-equal",
        severity="error",
        field="kv_cache_config.dtype",
        why="KV blocks are copied without conversion, and their size depends on the type",
        fix="set it to the same on both sides",
        test=_kv_dtypes,
    ),
    PairRule(
        name="block-size-equal",
        severity="error",
        field="kv_cache_config.tokens_per_block",
        why="KV blocks are copied without conversion",
        fix="set it to the same on both sides",
        test=_blocks,
    ),
    PairRule(
        name="attention-backend-equal",
        severity="error",
        field=_ATTENTION,
        why="each attention backend has its own KV layout, and blocks are copied without conversion",
        fix="set it to TRTLLM on both sides",
        test=_attention,
    ),
    PairRule(
        name="parallel-needs-trtllm-attention",
        severity="error",
        field=_ATTENTION,
        why="only TRTLLM's KV is resharded between different tensor-parallel sizes; other backends returned wrong text",
        fix="set it to TRTLLM on both sides, or use the same parallel sizes",
        test=_parallel_needs_trtllm,
    ),
    PairRule(
        name="pipeline-to-tensor",
        severity="warning",
        field="pipeline_parallel_size",
        why="pipeline parallelism on prefill with tensor parallelism on decode may hang (known issue of 1.2)",
        fix="use the same parallelism on both sides",
        test=_pipeline_to_tensor,
    ),
    PairRule(
        name="seq-len-order",
        severity="error",
        field="max_seq_len",
        why="prefill would accept requests that are too long for decode",
        fix="set it on prefill to at most decode's value",
        test=_lengths,
    ),
    PairRule(
        name="buffer-differs",
        severity="warning",
        field=BUFFER,
        why="the smaller buffer limits which prompts can be transferred",
        fix="set it to the same on both sides",
        test=_buffers,
    ),
    PairRule(
        name="attention-window-equal",
        severity="error",
        field=_WINDOWS,
        why="the two sides would store different blocks of the same prompt",
        fix="set it to the same on both sides",
        test=_windows,
    ),
    PairRule(
        name="speculative-equal",
        severity="error",
        field=_SPECULATIVE,
        why="draft tokens and the draft model's KV are part of the transfer, so both sides must have them",
        fix="set it to the same on both sides, or remove it",
        test=_speculative,
    ),
)


_OPPOSITE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_SAME = (
    "start both workers with the same model and settings (a killed worker stays registered for --lease-ttl-s; roll "
    "out changed settings under another --namespace)"
)


def evaluate_peers(
    mine: RoleFacts, peers: Sequence[Instance], kv_compat: Mapping[str, str] | None
) -> Iterator[Finding]:
    """Yield a finding for each difference to a peer: an error if no peer of the other role matches, else a warning.

    Args:
        mine: facts about this worker.
        peers: registered workers; those of the same role are ignored.
        kv_compat: values that this worker will register besides its layout; None: they are not compared.
    """
    others = [peer for peer in peers if peer.role is _OPPOSITE.get(mine.role)]
    differences = {peer.id: list(_differences(mine, peer, kv_compat)) for peer in others}
    has_no_match = all(differences.values())
    for peer in others:
        for difference in differences[peer.id]:
            yield _finding(difference, peer, "error" if has_no_match else "warning")


class _Difference(NamedTuple):
    rule: str
    field: str
    ours: str
    theirs: str


def _differences(mine: RoleFacts, peer: Instance, kv_compat: Mapping[str, str] | None) -> Iterator[_Difference]:
    """Yield each field that must match and does not."""
    if peer.engine != "trtllm":
        yield _Difference("peer-engine", "engine", "trtllm", peer.engine)
        return
    if peer.strategy != mine.strategy:
        yield _Difference("peer-strategy", "disaggregation_strategy", mine.strategy, peer.strategy)
    layout = mine.layout()
    for name in EQUAL_LAYOUT if layout is not None else ():
        ours, theirs = getattr(layout, name), getattr(peer.layout, name)
        if ours != theirs:
            yield _Difference("peer-layout", f"layout.{name}", str(ours), str(theirs))
    if kv_compat is not None:
        for name in sorted({*kv_compat, *peer.kv_compat}):
            if kv_compat.get(name) != peer.kv_compat.get(name):
                texts = (str(side.get(name, "unset")) for side in (kv_compat, peer.kv_compat))
                yield _Difference("peer-pairing", name, *texts)
    if not _lengths_fit(mine, peer):
        yield _Difference("peer-context", "max_seq_len", mine.shown("max_seq_len"), str(peer.card.context_length))


def _lengths_fit(mine: RoleFacts, peer: Instance) -> bool:
    """Return True if decode accepts requests as long as prefill's."""
    ours, theirs = mine.max_seq_len, peer.card.context_length
    if ours is None or not theirs:
        return True
    return ours <= theirs if mine.role is Role.PREFILL else theirs <= ours


def _finding(difference: _Difference, peer: Instance, severity: Literal["error", "warning"]) -> Finding:
    why, fix = PEER_RULES[difference.rule]
    return Finding(
        severity=severity,
        rule=difference.rule,
        field=difference.field,
        value=difference.ours,
        other=f"{_name(peer)}: {difference.theirs}",
        why=why,
        fix=fix,
    )


def _name(peer: Instance) -> str:
    return f"{peer.role} worker {peer.id:x}"


# Why and fix, by rule.
PEER_RULES: Mapping[str, tuple[str, str]] = {
    "peer-engine": ("the KV of one engine is invalid for another", "start both workers with the same --engine"),
    "peer-strategy": (
        "prefill and decode would wait for each other",
        "use the same --disaggregation-strategy on both sides",
    ),
    "peer-layout": ("KV blocks are copied without conversion, so both sides need the same layout", _SAME),
    "peer-pairing": ("both sides must have the same value for KV transfers", _SAME),
    "peer-context": (
        "prefill would accept requests that are too long for decode",
        "set prefill's max_seq_len to at most decode's",
    ),
}
