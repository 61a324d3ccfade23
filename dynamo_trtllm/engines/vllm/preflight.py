"""Check a vLLM worker's arguments before loading, against the limits of vLLM, NixlConnector, the GPU and live peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_trtllm.engines.base import Finding
from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.rules import PeerFacts, RuleSet
from dynamo_trtllm.engines.vllm.args import VllmArgs
from dynamo_trtllm.messages import Instance, Role


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
    live = (PeerFacts(mine=facts, peer=peer) for peer in peers)
    return [*WORKER_RULES.evaluate(facts), *(problem for each in live for problem in PEER_RULES.evaluate(each))]


_FOLDER = Path(__file__).parent
WORKER_RULES = RuleSet(
    _FOLDER / "worker_rules.yaml",
    VllmFacts,
    max_model_len=lambda facts: facts.args.get("max_model_len"),
    max_num_batched_tokens=lambda facts: facts.args.get("max_num_batched_tokens"),
)
PEER_RULES = RuleSet(
    _FOLDER / "peer_rules.yaml",
    PeerFacts[VllmFacts],
    block_size=lambda facts: facts.mine.args.get("block_size"),
    folder=lambda facts: facts.peer.kv_compat.get("model_folder"),
    layout=lambda facts: facts.peer.layout if facts.peer.engine == "vllm" else None,  # others are not compared
)
