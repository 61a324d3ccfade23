"""Rules between prefill and decode, from both sides' arguments. Pure."""

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
    """A missing one is a role's own error."""
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
    """Different backends are another rule's."""
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
    return _differs(decode, "max_seq_len", cure=f"set it to at most {theirs} on prefill")


def _buffers(prefill: RoleFacts, decode: RoleFacts) -> Violation | None:
    mine, theirs = prefill.number(BUFFER), decode.number(BUFFER)
    if mine is None or theirs is None or mine == theirs:
        return None
    return _differs(decode, BUFFER, cure=f"set it to {max(mine, theirs)} on both sides")


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


def _differs(decode: RoleFacts, field: str, *, cure: str = "") -> Violation:
    return Violation(field=field, other=f"decode: {decode.shown(field)}", cure=cure)


PAIR_RULES = (
    PairRule(
        name="model-equal",
        severity="error",
        field="model",
        why="KV of one model means nothing to another",
        cure="give both the same model folder",
        test=_models,
    ),
    PairRule(
        name="release-equal",
        severity="warning",
        field="release",
        why="how KV is described is a private matter of each release of TensorRT-LLM",
        cure="install the same release on both sides",
        test=_releases,
    ),
    PairRule(
        name="strategy-equal",
        severity="error",
        field="disaggregation_strategy",
        why="prefill and decode would wait for one another",
        cure="give both the same --disaggregation-strategy",
        test=_strategies,
    ),
    PairRule(
        name="transceiver-equal",
        severity="error",
        field=BACKEND,
        why="the two sides do not speak to one another: decode waits for KV that does not come",
        cure="set it to the same on both sides",
        test=_transceivers,
    ),
    PairRule(
        name="transceiver-runtime-equal",
        severity="error",
        field="cache_transceiver_config.transceiver_runtime",
        why="the C++ and the Python transceiver do not speak to one another",
        cure="set it to the same on both sides",
        test=_runtimes,
    ),
    PairRule(
        name="kv-dtype-equal",
        severity="error",
        field="kv_cache_config.dtype",
        why="blocks are copied as they are: of another type they are of another size",
        cure="set it to the same on both sides",
        test=_kv_dtypes,
    ),
    PairRule(
        name="block-size-equal",
        severity="error",
        field="kv_cache_config.tokens_per_block",
        why="blocks are copied as they are",
        cure="set it to the same on both sides",
        test=_blocks,
    ),
    PairRule(
        name="attention-backend-equal",
        severity="error",
        field=_ATTENTION,
        why="attention kernels lay KV out in their own way, which a copy does not translate",
        cure="set it to TRTLLM on both sides",
        test=_attention,
    ),
    PairRule(
        name="parallel-needs-trtllm-attention",
        severity="error",
        field=_ATTENTION,
        why="between different tensor parallelism only TRTLLM's KV layout is re-cut: others gave wrong text",
        cure="set it to TRTLLM on both sides, or give both the same parallel sizes",
        test=_parallel_needs_trtllm,
    ),
    PairRule(
        name="pipeline-to-tensor",
        severity="warning",
        field="pipeline_parallel_size",
        why="pipeline parallelism on prefill towards tensor parallelism on decode may hang (1.2's known issues)",
        cure="use the same parallelism on both sides",
        test=_pipeline_to_tensor,
    ),
    PairRule(
        name="seq-len-order",
        severity="error",
        field="max_seq_len",
        why="prefill would take prompts whose request does not fit decode",
        cure="set prefill's to at most decode's",
        test=_lengths,
    ),
    PairRule(
        name="buffer-differs",
        severity="warning",
        field=BUFFER,
        why="the smaller buffer limits which prompts can be transferred",
        cure="set it to the same on both sides",
        test=_buffers,
    ),
    PairRule(
        name="attention-window-equal",
        severity="error",
        field=_WINDOWS,
        why="the sides would keep different blocks of the same prompt",
        cure="set it to the same on both sides",
        test=_windows,
    ),
    PairRule(
        name="speculative-equal",
        severity="error",
        field=_SPECULATIVE,
        why="draft tokens and the draft model's KV travel with the hand-off: both sides must have them",
        cure="give both the same speculative_config, or leave it out",
        test=_speculative,
    ),
)


_OPPOSITE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_SAME = (
    "start both workers with the same model and settings (one that was killed stays registered for --lease-ttl-s; "
    "roll changed settings out under another --namespace)"
)


def evaluate_peers(
    mine: RoleFacts, peers: Sequence[Instance], kv_compat: Mapping[str, str] | None
) -> Iterator[Finding]:
    """A difference keeps the two from pairing: an error if no peer of the other role is left, else a warning."""
    others = [peer for peer in peers if peer.role is _OPPOSITE.get(mine.role)]
    found = {peer.id: list(_differences(mine, peer, kv_compat)) for peer in others}
    alone = all(found.values())
    for peer in others:
        for difference in found[peer.id]:
            yield _finding(difference, peer, "error" if alone else "warning")


class _Difference(NamedTuple):
    rule: str
    field: str
    ours: str
    theirs: str


def _differences(mine: RoleFacts, peer: Instance, kv_compat: Mapping[str, str] | None) -> Iterator[_Difference]:
    """Everything that must fit and does not."""
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
    """Decode must take what prefill lets in."""
    ours, theirs = mine.max_seq_len, peer.card.context_length
    if ours is None or not theirs:
        return True
    return ours <= theirs if mine.role is Role.PREFILL else theirs <= ours


def _finding(difference: _Difference, peer: Instance, severity: Literal["error", "warning"]) -> Finding:
    why, cure = PEER_RULES[difference.rule]
    return Finding(
        severity=severity,
        rule=difference.rule,
        field=difference.field,
        value=difference.ours,
        other=f"{_name(peer)}: {difference.theirs}",
        why=why,
        cure=cure,
    )


def _name(peer: Instance) -> str:
    return f"{peer.role} worker {peer.id:x}"


# Why and cure, by rule.
PEER_RULES: Mapping[str, tuple[str, str]] = {
    "peer-engine": ("KV of one engine means nothing to another", "start both workers with the same --engine"),
    "peer-strategy": ("prefill and decode would wait for one another", "give both the same --disaggregation-strategy"),
    "peer-layout": ("blocks are copied as they are, so both sides must lay KV out alike", _SAME),
    "peer-pairing": ("both sides must share this to hand KV over", _SAME),
    "peer-context": (
        "prefill would take prompts whose request does not fit decode",
        "set prefill's max_seq_len to at most decode's",
    ),
}
