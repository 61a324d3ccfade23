"""Check a vllm worker before it loads.

Its arguments are checked against the model, the GPUs, NixlConnector and live workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.engines import arguments
from dynamo_trtllm.engines.engine_interface import Finding
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.preflight_rules import PeerFacts, RuleSection, Violation, evaluate
from dynamo_trtllm.engines.vllm.args import TRANSFER_BLOCK_TOKENS
from dynamo_trtllm.models.checkpoint import Checkpoint
from dynamo_trtllm.protocol.messages import Instance, KvLayout, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFacts:
    """What is known about one worker before it loads."""

    role: Role
    args: arguments.LibraryArgs
    model: Checkpoint
    gpu: Gpu | None  # None if no GPU is visible
    num_gpus: int

    @property
    def line(self) -> tuple[int, ...]:
        """The release whose manifest checked the arguments: (0, 32, 0)."""
        return tuple(int(part) for part in self.args.release.name.split("."))

    @property
    def tensor_parallel(self) -> int:
        return self.args.count("tensor_parallel_size")

    @property
    def ranks(self) -> int:
        """Number of GPUs that the engine needs."""
        pipeline = self.args.count("pipeline_parallel_size")
        return self.tensor_parallel * pipeline * self.args.count("data_parallel_size")

    @property
    def is_mxfp4(self) -> bool:
        return self.model.quantization == "mxfp4"

    def value_with_source(self, key: str) -> str:
        """Return the value of an argument with its source, for messages."""
        leaf = self.args.leaves.get(key)
        if leaf is None:
            return f"{self.args.get(key)} (default)"
        return f"{leaf.value} ({leaf.source})"


WORKER: RuleSection[VllmFacts] = RuleSection("One worker")
PEERS: RuleSection[PeerFacts[VllmFacts]] = RuleSection("Against live workers")
_DISAGGREGATED = (Role.PREFILL, Role.DECODE, Role.ELASTIC)
_BLACKWELL_ONLY = ("flashinfer_trtllm", "flashinfer_cutedsl")
_NO_TRANSFER = "the two workers can't transfer KV to each other"


def findings(facts: VllmFacts, peers: Sequence[Instance]) -> list[Finding]:
    """Return the problems of this worker.

    Args:
        facts: what is known about the worker.
        peers: live workers of the same model in the other role.
    """
    found = evaluate([WORKER], facts)
    for peer in peers:
        found += evaluate([PEERS], PeerFacts(mine=facts, peer=peer))
    return found


@WORKER.rule(
    "error",
    "vllm-too-few-gpus",
    field="tensor_parallel_size",
    why="each rank of tensor, pipeline and data parallelism needs its own GPU",
    fix="make more GPUs visible (CUDA_VISIBLE_DEVICES), or lower a parallel size",
)
def too_few_gpus(facts: VllmFacts) -> Violation | None:
    """Find more ranks than GPUs."""
    if facts.gpu is None or facts.ranks <= facts.num_gpus:
        return None
    return Violation(other=f"{facts.num_gpus} visible GPUs for {facts.ranks} ranks")


@WORKER.rule(
    "error",
    "vllm-heads-not-divisible",
    field="tensor_parallel_size",
    why="vLLM gives every rank the same number of heads",
    fix="choose a tensor_parallel_size that divides the number of heads",
)
def heads_not_divisible(facts: VllmFacts) -> Violation | None:
    """Find attention heads that can't be spread evenly over the ranks."""
    if facts.model.num_attention_heads % facts.tensor_parallel == 0:
        return None
    return Violation(other=f"the model's {facts.model.num_attention_heads} attention heads")


@WORKER.rule(
    "error",
    "vllm-context-too-long",
    field="max_model_len",
    why="vLLM rejects it and does not start",
    fix="set --max-seq-len to the model's context length or less",
)
def context_too_long(facts: VllmFacts) -> Violation | None:
    """Find a limit above the model's context length. A length of 0 is unknown."""
    wanted = facts.args.get("max_model_len")
    length = facts.model.context_length
    if wanted is None or length == 0 or wanted <= length:
        return None
    return Violation(
        other=f"the model's context of {length}", fix=f"set --max-seq-len to {length} or less"
    )


@WORKER.rule(
    "error",
    "vllm-prompts-too-long-for-a-step",
    field="max_num_batched_tokens",
    why="without chunked prefill a prompt must fit into one step, and vLLM does not start",
    fix="remove enable_chunked_prefill, or raise --max-num-tokens",
)
def prompts_too_long_for_a_step(facts: VllmFacts) -> Violation | None:
    """Find prompts that do not fit one step."""
    if facts.args.get("enable_chunked_prefill") is not False:
        return None
    step = facts.args.get("max_num_batched_tokens")
    longest = facts.args.get("max_model_len")
    if step is None or longest is None or step >= longest:
        return None
    return Violation(other=f"max_model_len {facts.value_with_source('max_model_len')}")


@WORKER.rule(
    "error",
    "vllm-pipeline-kv-transfer",
    roles=_DISAGGREGATED,
    field="pipeline_parallel_size",
    why="NixlConnector supports only one pipeline stage",
    fix="use --tensor-parallel-size in prefill and decode workers",
)
def pipeline_kv_transfer(facts: VllmFacts) -> Violation | None:
    """Find a pipeline that is to transfer KV."""
    return Violation() if facts.args.count("pipeline_parallel_size") > 1 else None


@WORKER.rule(
    "error",
    "vllm-mxfp4-backend",
    field="moe_backend",
    why="these kernels for MXFP4 experts need a Blackwell GPU",
    fix="remove moe_backend; vLLM then uses Triton's kernels on Hopper",
)
def mxfp4_backend(facts: VllmFacts) -> Violation | None:
    """Find kernels that Hopper does not have."""
    if facts.gpu is None or facts.gpu.sm != 90 or not facts.is_mxfp4:
        return None
    if not str(facts.args.get("moe_backend")).startswith(_BLACKWELL_ONLY):
        return None
    return Violation(other=facts.gpu.name)


@WORKER.rule(
    "error",
    "vllm-mxfp4-dtype",
    field="dtype",
    why="vLLM supports MXFP4 weights only with bfloat16 activations",
    fix="remove dtype",
)
def mxfp4_dtype(facts: VllmFacts) -> Violation | None:
    """Find activations that MXFP4 weights can't have."""
    if not facts.is_mxfp4 or facts.args.get("dtype") in (None, "auto", "bfloat16"):
        return None
    return Violation(other="MXFP4 weights")


@WORKER.rule(
    "warning",
    "vllm-no-prefix-caching",
    field="enable_prefix_caching",
    why="every prompt is computed in full, including prefixes that were computed before",
    fix="remove it, except for benchmarks",
)
def no_prefix_caching(facts: VllmFacts) -> Violation | None:
    """Find a worker without prefix caching."""
    return Violation() if facts.args.get("enable_prefix_caching") is False else None


@WORKER.rule(
    "warning",
    "vllm-dummy-weights",
    field="load_format",
    why="the model has random weights, so its output is meaningless",
    fix="remove --load-format, except for benchmarks",
)
def dummy_weights(facts: VllmFacts) -> Violation | None:
    """Find random weights."""
    return Violation() if facts.args.get("load_format") == "dummy" else None


_CROSS_LAYERS = "kv_transfer_config.kv_connector_extra_config.enable_cross_layers_blocks"


def _wants_cross_layers(facts: VllmFacts) -> bool:
    """Return whether the option is on. As vLLM reads it, true or the text "true" means on."""
    return str(facts.args.get(_CROSS_LAYERS)).lower() == "true"


@WORKER.rule(
    "error",
    "vllm-half-kv",
    roles=_DISAGGREGATED,
    field=_CROSS_LAYERS,
    why=(
        "vLLM 0.24 and 0.25 then transfer half of the KV of models with several kinds of layers,"
        " without an error"
    ),
    fix="remove it, or install vLLM 0.26 to 0.28, which read whole rows with it",
)
def half_kv(facts: VllmFacts) -> Violation | None:
    """Find the option in the releases that transfer half of the KV with it."""
    sliding = facts.model.num_sliding_layers
    has_one_kind = sliding in (0, facts.model.num_layers) and not facts.model.has_recurrent_layers
    transfers_all_kv = facts.line >= (0, 26)
    if transfers_all_kv or has_one_kind or not _wants_cross_layers(facts):
        return None
    return Violation(other=f"{sliding} of {facts.model.num_layers} layers with a sliding window")


@WORKER.rule(
    "warning",
    "vllm-cross-layers-ignored",
    roles=_DISAGGREGATED,
    field=_CROSS_LAYERS,
    why="vLLM ignores this option from 0.29 on",
    fix=(
        "remove it; the environment variable VLLM_KV_CACHE_LAYOUT=BHLNC does the same with"
        " attention backends that have this layout, such as FlashAttention"
    ),
)
def cross_layers_ignored(facts: VllmFacts) -> Violation | None:
    """Find the option in the releases that no longer read it."""
    if facts.line < (0, 29) or not _wants_cross_layers(facts):
        return None
    return Violation()


@WORKER.rule(
    "note",
    "vllm-small-blocks",
    roles=_DISAGGREGATED,
    field="block_size",
    why=(
        "NixlConnector reads each block of each layer as a piece of its own, and all running"
        " streams wait meanwhile"
    ),
    fix=(
        f"remove it, or set --kv-block-size {TRANSFER_BLOCK_TOKENS}, except where shorter prefixes"
        " must be reused"
    ),
)
def small_blocks(facts: VllmFacts) -> Violation | None:
    """Find KV blocks that make transfers slow."""
    size = facts.args.get("block_size")
    if size is None or size >= TRANSFER_BLOCK_TOKENS // 2:
        return None
    return Violation()


def _layout(facts: PeerFacts[VllmFacts]) -> KvLayout | None:
    """Return the peer's layout; None for a worker of another engine, which `engine_differs`
    reports.
    """
    return facts.peer.layout if facts.peer.engine == "vllm" else None


@PEERS.rule(
    "error",
    "vllm-engine-differs",
    field="engine",
    why=_NO_TRANSFER,
    fix="use the same engine for both workers",
)
def engine_differs(facts: PeerFacts[VllmFacts]) -> Violation | None:
    """Find a worker of another engine."""
    if facts.peer.engine == "vllm":
        return None
    return Violation(value="vllm", other=f"{facts.peer.engine} at {facts.name}")


@PEERS.rule(
    "error",
    "vllm-tp-ratio",
    field="tensor_parallel_size",
    why=_NO_TRANSFER,
    fix="NixlConnector needs sizes of which one divides the other; choose such sizes",
)
def tp_ratio(facts: PeerFacts[VllmFacts]) -> Violation | None:
    """Find tensor-parallel sizes of which neither divides the other."""
    layout = _layout(facts)
    if layout is None:
        return None
    mine = facts.mine.tensor_parallel
    theirs = layout.tensor_parallel_size
    if max(mine, theirs) % min(mine, theirs) == 0:
        return None
    return Violation(other=f"{theirs} at {facts.name}")


@PEERS.rule(
    "error",
    "vllm-block-size-differs",
    field="block_size",
    why=_NO_TRANSFER,
    fix=(
        "set the same --kv-block-size for both workers (docs/scaling.md says how to change it while"
        " they serve)"
    ),
)
def block_size_differs(facts: PeerFacts[VllmFacts]) -> Violation | None:
    """Find another block size."""
    layout = _layout(facts)
    mine = facts.mine.args.get("block_size")
    if layout is None or mine is None or mine == layout.block_tokens:
        return None
    return Violation(other=f"{layout.block_tokens} at {facts.name}")


@PEERS.rule(
    "error",
    "vllm-folder-differs",
    field="model_path",
    why=_NO_TRANSFER,
    fix="NixlConnector compares the folder's name; use the same model folder on both workers",
)
def folder_differs(facts: PeerFacts[VllmFacts]) -> Violation | None:
    """Find another model folder."""
    mine = str(facts.mine.model.folder)
    theirs = facts.peer.kv_compat.get("model_folder")
    if _layout(facts) is None or theirs is None or theirs == mine:
        return None
    return Violation(value=mine, other=f"{theirs} at {facts.name}")
