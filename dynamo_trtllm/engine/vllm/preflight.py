"""What can be told of a vLLM worker's arguments before anything loads: limits of vLLM, its connector and the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynamo_trtllm.engine.base import Finding
from dynamo_trtllm.engine.checkpoint import Checkpoint
from dynamo_trtllm.engine.gpu import Gpu
from dynamo_trtllm.engine.vllm.args import VllmArgs
from dynamo_trtllm.messages import Instance, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
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

    def value_of(self, key: str) -> str:
        """The value and where it comes from, for people."""
        leaf = self.args.leaves.get(key)
        return f"{self.args.get(key)} (default)" if leaf is None else f"{leaf.value} ({leaf.source})"


def findings(facts: Facts, peers: Sequence[Instance]) -> list[Finding]:
    """`peers`: live instances of the same model in the other role."""
    alone = [found for rule in _RULES for found in rule(facts)]
    return alone + [found for peer in peers for found in _pair(facts, peer)]


def _ranks_fit_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.gpu is not None and facts.ranks > facts.num_gpus:
        yield Finding(
            severity="error",
            rule="vllm-too-few-gpus",
            field="tensor_parallel_size",
            value=facts.value_of("tensor_parallel_size"),
            other=f"{facts.num_gpus} visible GPUs",
            why=f"tensor, pipeline and data parallel ranks make {facts.ranks}",
            cure="make more GPUs visible (CUDA_VISIBLE_DEVICES), or lower a parallel size",
        )


def _heads_divide(facts: Facts) -> Iterator[Finding]:
    if facts.model.num_attention_heads % facts.tensor_parallel:
        yield Finding(
            severity="error",
            rule="vllm-heads-not-divisible",
            field="tensor_parallel_size",
            value=facts.value_of("tensor_parallel_size"),
            other=f"the model's {facts.model.num_attention_heads} attention heads",
            why="vLLM gives every rank as many heads",
            cure="choose a tensor_parallel_size that divides the number of heads",
        )


def _context_fits(facts: Facts) -> Iterator[Finding]:
    wanted, known = facts.args.get("max_model_len"), facts.model.context_length
    if isinstance(wanted, int) and known and wanted > known:
        yield Finding(
            severity="error",
            rule="vllm-context-too-long",
            field="max_model_len",
            value=facts.value_of("max_model_len"),
            other=f"the model's context of {known}",
            why="vLLM refuses to start",
            cure=f"give --max-seq-len {known} or less",
        )


def _chunks_prompts(facts: Facts) -> Iterator[Finding]:
    tokens, context = facts.args.get("max_num_batched_tokens"), facts.args.get("max_model_len")
    if facts.args.get("enable_chunked_prefill") is False and isinstance(tokens, int) and isinstance(context, int):
        if tokens < context:
            yield Finding(
                severity="error",
                rule="vllm-prompts-too-long-for-a-step",
                field="max_num_batched_tokens",
                value=facts.value_of("max_num_batched_tokens"),
                other=f"max_model_len {facts.value_of('max_model_len')}",
                why="without chunked prefill a prompt must fit one step, and vLLM refuses to start",
                cure="leave enable_chunked_prefill out, or raise --max-num-tokens",
            )


def _pipeline_has_no_handoff(facts: Facts) -> Iterator[Finding]:
    if facts.role is not Role.AGGREGATED and facts.args.count("pipeline_parallel_size") > 1:
        yield Finding(
            severity="error",
            rule="vllm-pipeline-handoff",
            field="pipeline_parallel_size",
            value=facts.value_of("pipeline_parallel_size"),
            why="NixlConnector addresses the ranks of one pipeline stage only",
            cure="use --tensor-parallel-size in prefill and decode workers",
        )


def _prefix_caching_off(facts: Facts) -> Iterator[Finding]:
    if facts.args.get("enable_prefix_caching") is False:
        yield Finding(
            severity="warning",
            rule="vllm-no-prefix-caching",
            field="enable_prefix_caching",
            value=facts.value_of("enable_prefix_caching"),
            why="every prompt is computed in full, also what was there a moment ago",
            cure="leave it out, except for measuring",
        )


def _dummy_weights(facts: Facts) -> Iterator[Finding]:
    if facts.args.get("load_format") == "dummy":
        yield Finding(
            severity="warning",
            rule="vllm-dummy-weights",
            field="load_format",
            value=facts.value_of("load_format"),
            why="weights are made up: answers mean nothing",
            cure="leave --load-format out, except for measuring",
        )


_HOPPER = 90


def _mxfp4_on_hopper(facts: Facts) -> Iterator[Finding]:
    backend = facts.args.get("moe_backend")
    if facts.model.quantization != "mxfp4" or facts.gpu is None or facts.gpu.sm != _HOPPER:
        return
    if isinstance(backend, str) and backend.startswith(("flashinfer_trtllm", "flashinfer_cutedsl")):
        yield Finding(
            severity="error",
            rule="vllm-mxfp4-backend",
            field="moe_backend",
            value=facts.value_of("moe_backend"),
            other=facts.gpu.name,
            why="these kernels for MXFP4 experts are for Blackwell",
            cure="leave moe_backend out: on Hopper vLLM takes Triton's kernels",
        )


def _quarter_precision(facts: Facts) -> Iterator[Finding]:
    dtype = facts.args.get("dtype")
    if facts.model.quantization == "mxfp4" and dtype not in (None, "auto", "bfloat16"):
        yield Finding(
            severity="error",
            rule="vllm-mxfp4-dtype",
            field="dtype",
            value=facts.value_of("dtype"),
            other="MXFP4 weights",
            why="they are multiplied with bfloat16",
            cure="leave dtype out",
        )


_RULES: Sequence[Callable[[Facts], Iterator[Finding]]] = (
    _ranks_fit_gpus,
    _heads_divide,
    _context_fits,
    _chunks_prompts,
    _pipeline_has_no_handoff,
    _prefix_caching_off,
    _dummy_weights,
    _mxfp4_on_hopper,
    _quarter_precision,
)


def _pair(facts: Facts, peer: Instance) -> Iterator[Finding]:
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
            facts.value_of("tensor_parallel_size"),
            f"{theirs} at {other}",
            "NixlConnector splits heads only where one size divides the other: choose such sizes",
        )
    block = facts.args.get("block_size")
    if isinstance(block, int) and block != peer.layout.block_tokens:
        yield _differs(
            "vllm-block-size-differs",
            "block_size",
            facts.value_of("block_size"),
            f"{peer.layout.block_tokens} at {other}",
            "give both workers the same --kv-block-size",
        )
    folder = peer.pairing.get("model_folder")
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
