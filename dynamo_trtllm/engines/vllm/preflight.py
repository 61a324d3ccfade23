"""Check a vLLM worker's arguments before loading, against the limits of vLLM, NixlConnector, the GPU and live peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.rules import RoleRule, Violation, evaluate
from dynamo_trtllm.engines.vllm.args import VllmArgs
from dynamo_trtllm.messages import Instance, Role

_HOPPER = 90
_BLACKWELL_KERNELS = ("flashinfer_trtllm", "flashinfer_cutedsl")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What is known about one worker before it loads."""

    role: Role
    args: VllmArgs
    model: Checkpoint
    gpu: Gpu | None  # None: no GPU is visible
    num_gpus: int

    @property
    def tensor_parallel(self) -> int:
        return self.args.count("tensor_parallel_size")

    @property
    def ranks(self) -> int:
        """Return the number of GPUs that the engine needs."""
        return self.tensor_parallel * self.args.count("pipeline_parallel_size") * self.args.count("data_parallel_size")

    def shown(self, key: str) -> str:
        """Return the value of an argument with its source, for messages."""
        leaf = self.args.leaves.get(key)
        return f"{self.args.get(key)} (default)" if leaf is None else f"{leaf.value} ({leaf.source})"


def findings(facts: VllmFacts, peers: Sequence[Instance]) -> list[Finding]:
    """Return the problems of this worker. `peers`: live instances of the same model in the other role."""
    return [*evaluate(RULES, facts), *(problem for peer in peers for problem in _pair(facts, peer))]


# --- one worker ----------------------------------------------------------------------------------------


def _ranks_fit_gpus(facts: VllmFacts) -> Violation | None:
    if facts.gpu is None or facts.ranks <= facts.num_gpus:
        return None
    return Violation(other=f"{facts.num_gpus} visible GPUs for {facts.ranks} ranks")


def _heads_divide(facts: VllmFacts) -> Violation | None:
    heads = facts.model.num_attention_heads
    return Violation(other=f"the model's {heads} attention heads") if heads % facts.tensor_parallel else None


def _context_fits(facts: VllmFacts) -> Violation | None:
    wanted, known = facts.args.get("max_model_len"), facts.model.context_length
    if not isinstance(wanted, int) or not known or wanted <= known:
        return None
    return Violation(other=f"the model's context of {known}", fix=f"set --max-seq-len to {known} or less")


def _prompts_fit_steps(facts: VllmFacts) -> Violation | None:
    tokens, context = facts.args.get("max_num_batched_tokens"), facts.args.get("max_model_len")
    if facts.args.get("enable_chunked_prefill") is not False:
        return None
    if not isinstance(tokens, int) or not isinstance(context, int) or tokens >= context:
        return None
    return Violation(other=f"max_model_len {facts.shown('max_model_len')}")


def _pipeline_has_no_kv_transfer(facts: VllmFacts) -> Violation | None:
    exports_kv = facts.role is not Role.AGGREGATED
    return Violation() if exports_kv and facts.args.count("pipeline_parallel_size") > 1 else None


def _mxfp4_on_hopper(facts: VllmFacts) -> Violation | None:
    backend = facts.args.get("moe_backend")
    if facts.model.quantization != "mxfp4" or facts.gpu is None or facts.gpu.sm != _HOPPER:
        return None
    return Violation(other=facts.gpu.name) if str(backend).startswith(_BLACKWELL_KERNELS) else None


def _mxfp4_dtype(facts: VllmFacts) -> Violation | None:
    if facts.model.quantization != "mxfp4" or facts.args.get("dtype") in (None, "auto", "bfloat16"):
        return None
    return Violation(other="MXFP4 weights")


def _prefix_caching_off(facts: VllmFacts) -> Violation | None:
    return Violation() if facts.args.get("enable_prefix_caching") is False else None


def _dummy_weights(facts: VllmFacts) -> Violation | None:
    return Violation() if facts.args.get("load_format") == "dummy" else None


# Rule names are public: docs/vllm.md and alerts use them.
RULES: Sequence[RoleRule[VllmFacts]] = (
    RoleRule(
        name="vllm-too-few-gpus",
        severity="error",
        field="tensor_parallel_size",
        why="each rank of tensor, pipeline and data parallelism needs its own GPU",
        fix="make more GPUs visible (CUDA_VISIBLE_DEVICES), or lower a parallel size",
        test=_ranks_fit_gpus,
    ),
    RoleRule(
        name="vllm-heads-not-divisible",
        severity="error",
        field="tensor_parallel_size",
        why="vLLM gives every rank the same number of heads",
        fix="choose a tensor_parallel_size that divides the number of heads",
        test=_heads_divide,
    ),
    RoleRule(
        name="vllm-context-too-long",
        severity="error",
        field="max_model_len",
        why="vLLM rejects it and does not start",
        fix="set --max-seq-len to the model's context length or less",
        test=_context_fits,
    ),
    RoleRule(
        name="vllm-prompts-too-long-for-a-step",
        severity="error",
        field="max_num_batched_tokens",
        why="without chunked prefill a prompt must fit into one step, and vLLM does not start",
        fix="remove enable_chunked_prefill, or raise --max-num-tokens",
        test=_prompts_fit_steps,
    ),
    RoleRule(
        name="vllm-pipeline-handoff",
        severity="error",
        field="pipeline_parallel_size",
        why="NixlConnector supports only one pipeline stage",
        fix="use --tensor-parallel-size in prefill and decode workers",
        test=_pipeline_has_no_kv_transfer,
    ),
    RoleRule(
        name="vllm-mxfp4-backend",
        severity="error",
        field="moe_backend",
        why="these kernels for MXFP4 experts need a Blackwell GPU",
        fix="remove moe_backend; vLLM then uses Triton's kernels on Hopper",
        test=_mxfp4_on_hopper,
    ),
    RoleRule(
        name="vllm-mxfp4-dtype",
        severity="error",
        field="dtype",
        why="vLLM supports MXFP4 weights only with bfloat16 activations",
        fix="remove dtype",
        test=_mxfp4_dtype,
    ),
    RoleRule(
        name="vllm-no-prefix-caching",
        severity="warning",
        field="enable_prefix_caching",
        why="every prompt is computed in full, including prefixes that were computed before",
        fix="remove it, except for benchmarks",
        test=_prefix_caching_off,
    ),
    RoleRule(
        name="vllm-dummy-weights",
        severity="warning",
        field="load_format",
        why="the model has random weights, so its output is meaningless",
        fix="remove --load-format, except for benchmarks",
        test=_dummy_weights,
    ),
)


# --- against a live peer -------------------------------------------------------------------------------


def _pair(facts: VllmFacts, peer: Instance) -> Iterator[Finding]:
    other = f"{peer.role} worker {peer.id:x}"
    theirs, ours = peer.layout.tensor_parallel_size, facts.tensor_parallel
    if peer.engine != "vllm":
        yield _differs(
            "vllm-engine-differs", "engine", "vllm", f"{peer.engine} at {other}", "use the same engine for both workers"
        )
        return
    if max(theirs, ours) % min(theirs, ours):
        yield _differs(
            "vllm-tp-ratio",
            "tensor_parallel_size",
            facts.shown("tensor_parallel_size"),
            f"{theirs} at {other}",
            "NixlConnector needs sizes of which one divides the other; choose such sizes",
        )
    block = facts.args.get("block_size")
    if isinstance(block, int) and block != peer.layout.block_tokens:
        yield _differs(
            "vllm-block-size-differs",
            "block_size",
            facts.shown("block_size"),
            f"{peer.layout.block_tokens} at {other}",
            "set the same --kv-block-size for both workers",
        )
    folder = peer.kv_compat.get("model_folder")
    if folder is not None and folder != str(facts.model.folder):
        yield _differs(
            "vllm-folder-differs",
            "model_path",
            str(facts.model.folder),
            f"{folder} at {other}",
            "NixlConnector compares the folder's name; use the same model folder on both workers",
        )


def _differs(rule: str, field: str, value: str, other: str, fix: str) -> Finding:
    return Finding(
        severity="error",
        rule=rule,
        field=field,
        value=value,
        other=other,
        why="the two workers can't transfer KV to each other",
        fix=fix,
    )
