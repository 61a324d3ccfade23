"""Check a vLLM worker's arguments before anything loads: against limits of vLLM, its connector and the GPU."""

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
    """One worker, as far as it is known before it loads."""

    role: Role
    args: VllmArgs
    model: Checkpoint
    gpu: Gpu | None  # None: none is visible, as on CPU
    num_gpus: int

    @property
    def tensor_parallel(self) -> int:
        return self.args.count("tensor_parallel_size")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.args.count("pipeline_parallel_size") * self.args.count("data_parallel_size")

    def shown(self, key: str) -> str:
        """The value and where it comes from, for people."""
        leaf = self.args.leaves.get(key)
        return f"{self.args.get(key)} (default)" if leaf is None else f"{leaf.value} ({leaf.source})"


def findings(facts: VllmFacts, peers: Sequence[Instance]) -> list[Finding]:
    """`peers`: live instances of the same model in the other role."""
    return [*evaluate(RULES, facts), *(found for peer in peers for found in _pair(facts, peer))]


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
    return Violation(other=f"the model's context of {known}", cure=f"give --max-seq-len {known} or less")


def _prompts_fit_steps(facts: VllmFacts) -> Violation | None:
    tokens, context = facts.args.get("max_num_batched_tokens"), facts.args.get("max_model_len")
    if facts.args.get("enable_chunked_prefill") is not False:
        return None
    if not isinstance(tokens, int) or not isinstance(context, int) or tokens >= context:
        return None
    return Violation(other=f"max_model_len {facts.shown('max_model_len')}")


def _pipeline_has_no_handoff(facts: VllmFacts) -> Violation | None:
    exports_kv = facts.role is not Role.AGGREGATED
    return Violation() if exports_kv and facts.args.count("pipeline_parallel_size") > 1 else None


def _mxfp4_on_hopper(facts: VllmFacts) -> Violation | None:
    backend = facts.args.get("moe_backend")
    if facts.model.quantization != "mxfp4" or facts.gpu is None or facts.gpu.sm != _HOPPER:
        return None
    return Violation(other=facts.gpu.name) if str(backend).startswith(_BLACKWELL_KERNELS) else None


def _quarter_precision(facts: VllmFacts) -> Violation | None:
    if facts.model.quantization != "mxfp4" or facts.args.get("dtype") in (None, "auto", "bfloat16"):
        return None
    return Violation(other="MXFP4 weights")


def _prefix_caching_off(facts: VllmFacts) -> Violation | None:
    return Violation() if facts.args.get("enable_prefix_caching") is False else None


def _dummy_weights(facts: VllmFacts) -> Violation | None:
    return Violation() if facts.args.get("load_format") == "dummy" else None


# A rule's name is public: docs/vllm.md and alerts use it.
RULES: Sequence[RoleRule[VllmFacts]] = (
    RoleRule(
        name="vllm-too-few-gpus",
        severity="error",
        field="tensor_parallel_size",
        why="each rank of tensor, pipeline and data parallelism takes a GPU",
        cure="make more GPUs visible (CUDA_VISIBLE_DEVICES), or lower a parallel size",
        test=_ranks_fit_gpus,
    ),
    RoleRule(
        name="vllm-heads-not-divisible",
        severity="error",
        field="tensor_parallel_size",
        why="vLLM gives every rank as many heads",
        cure="choose a tensor_parallel_size that divides the number of heads",
        test=_heads_divide,
    ),
    RoleRule(
        name="vllm-context-too-long",
        severity="error",
        field="max_model_len",
        why="vLLM refuses to start",
        cure="give a --max-seq-len that the model has",
        test=_context_fits,
    ),
    RoleRule(
        name="vllm-prompts-too-long-for-a-step",
        severity="error",
        field="max_num_batched_tokens",
        why="without chunked prefill a prompt must fit one step, and vLLM refuses to start",
        cure="leave enable_chunked_prefill out, or raise --max-num-tokens",
        test=_prompts_fit_steps,
    ),
    RoleRule(
        name="vllm-pipeline-handoff",
        severity="error",
        field="pipeline_parallel_size",
        why="NixlConnector addresses the ranks of one pipeline stage only",
        cure="use --tensor-parallel-size in prefill and decode workers",
        test=_pipeline_has_no_handoff,
    ),
    RoleRule(
        name="vllm-mxfp4-backend",
        severity="error",
        field="moe_backend",
        why="these kernels for MXFP4 experts are for Blackwell",
        cure="leave moe_backend out: on Hopper vLLM takes Triton's kernels",
        test=_mxfp4_on_hopper,
    ),
    RoleRule(
        name="vllm-mxfp4-dtype",
        severity="error",
        field="dtype",
        why="they are multiplied with bfloat16",
        cure="leave dtype out",
        test=_quarter_precision,
    ),
    RoleRule(
        name="vllm-no-prefix-caching",
        severity="warning",
        field="enable_prefix_caching",
        why="every prompt is computed in full, also what was there a moment ago",
        cure="leave it out, except for measuring",
        test=_prefix_caching_off,
    ),
    RoleRule(
        name="vllm-dummy-weights",
        severity="warning",
        field="load_format",
        why="dummy weights are loaded: answers mean nothing",
        cure="leave --load-format out, except for measuring",
        test=_dummy_weights,
    ),
)


# --- against a live peer -------------------------------------------------------------------------------


def _pair(facts: VllmFacts, peer: Instance) -> Iterator[Finding]:
    other = f"{peer.role} worker {peer.id:x}"
    theirs, ours = peer.layout.tensor_parallel_size, facts.tensor_parallel
    if peer.engine != "vllm":
        yield _differs(
            "vllm-engine-differs", "engine", "vllm", f"{peer.engine} at {other}", "start both with one engine"
        )
        return
    if max(theirs, ours) % min(theirs, ours):
        yield _differs(
            "vllm-tp-ratio",
            "tensor_parallel_size",
            facts.shown("tensor_parallel_size"),
            f"{theirs} at {other}",
            "NixlConnector splits heads only where one size divides the other: choose such sizes",
        )
    block = facts.args.get("block_size")
    if isinstance(block, int) and block != peer.layout.block_tokens:
        yield _differs(
            "vllm-block-size-differs",
            "block_size",
            facts.shown("block_size"),
            f"{peer.layout.block_tokens} at {other}",
            "give both workers the same --kv-block-size",
        )
    folder = peer.kv_compat.get("model_folder")
    if folder is not None and folder != str(facts.model.folder):
        yield _differs(
            "vllm-folder-differs",
            "model_path",
            str(facts.model.folder),
            f"{folder} at {other}",
            "NixlConnector compares the folder's name: put the model in the same place on both",
        )


def _differs(rule: str, field: str, value: str, other: str, cure: str) -> Finding:
    return Finding(
        severity="error",
        rule=rule,
        field=field,
        value=value,
        other=other,
        why="the two can't hand KV over to one another",
        cure=cure,
    )
