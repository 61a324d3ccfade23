"""Measures what routing costs a frontend, in CPU time of one core.

    python -m benchmarks.routing index --blocks 1000000 --instances 1000
    python -m benchmarks.routing select --instances 10 100 1000 2500

index: the index of prefix caches. How many blocks per second it takes from encoded updates, and how long the look-up of
a prompt takes: one that no instance has, one that shares a system prompt with all instances, and one that also shares
a conversation with one instance. The prefix hashes of the prompt are measured separately.

select: the selection of a pair by round robin, and the change of the view when an instance joins and leaves.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dynamo_trtllm.kv_events import MAX_UPDATE_BLOCKS, KvCacheUpdate, pack_hashes, prefix_hashes
from dynamo_trtllm.messages import (
    GenerateRequest,
    Instance,
    KvLayout,
    ModelDeploymentCard,
    Role,
    Sampling,
    decode,
    encode,
    token_ids,
)
from dynamo_trtllm.router.policy import PairBreakers, select
from dynamo_trtllm.router.prefix_index import KnownPrefixes, PromptHashes
from dynamo_trtllm.router.view import ClusterView

_LOOKUPS = 2000
_SYSTEM_TOKENS = 2048
_CANDIDATES = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    index = commands.add_parser("index", help="look-ups and updates of the index of prefix caches")
    index.add_argument("--blocks", type=int, default=1_000_000, help="blocks of all instances together")
    index.add_argument("--instances", type=int, default=1000)
    index.add_argument("--prompt-tokens", type=int, default=8192)
    index.add_argument("--block-tokens", type=int, nargs="+", default=[16, 32, 64])
    index.set_defaults(run=measure_index)
    choice = commands.add_parser("select", help="the selection of a pair of workers")
    choice.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000, 2500])
    choice.add_argument("--count", type=int, default=5000, help="selections that are measured")
    choice.set_defaults(run=measure_select)
    arguments = parser.parse_args()
    arguments.run(arguments)


def measure_index(arguments: argparse.Namespace) -> None:
    """Print a row per block size."""
    print("block  ingest blocks/s  bytes/block  hashes us  ", end="")
    print("".join(f"{name:>12} p50  p99 us" for name in ("unknown", "system", "conversation")))
    for block_tokens in arguments.block_tokens:
        _measure_block_size(block_tokens, arguments)


def measure_select(arguments: argparse.Namespace) -> None:
    """Print a row per number of instances and situation. Half of the instances are prefill and half decode workers."""
    print(f"instances  {'situation':38} p50 us  p99 us")
    for count in arguments.instances:
        for name, times in _selections(count, arguments.count).items():
            times.sort()
            print(
                f"{count:9}  {name:38} {times[len(times) // 2]:6.1f}  {times[len(times) * 99 // 100]:6.1f}", flush=True
            )


def _selections(num_instances: int, count: int) -> dict[str, list[float]]:
    cluster, breakers = ClusterView(), PairBreakers()
    for number, instance_id in enumerate(random.Random(num_instances).sample(range(1 << 62), num_instances)):
        cluster.add(_worker(instance_id, Role.DECODE if number % 2 else Role.PREFILL))
    view, joining = cluster.model("model"), _worker(1 << 62, Role.DECODE)
    first, prefills = view.decode[0].id, [prefill.id for prefill in view.prefill]

    def join_and_leave(_: int) -> None:
        cluster.add(joining)
        cluster.remove(joining.id)

    times = {
        "all pairs work": _times(lambda turn: select(view, "model", turn, breakers), count),
        "a worker does not answer": _times(
            lambda turn: select(view.excluding(frozenset((first,))), "model", turn, breakers), count
        ),
        "an instance joins and leaves": _times(join_and_leave, count // 10),
    }
    for prefill in prefills:
        breakers.record_failure((prefill, first), "measured", 0.0, is_wrong=True)
    times["all pairs of a worker are quarantined"] = _times(lambda turn: select(view, "model", turn, breakers), count)
    times["and a failed transfer is retried"] = _times(
        lambda turn: select(view, "model", turn, breakers, avoid=prefills[turn % len(prefills)]), count
    )
    return times


def _worker(instance_id: int, role: Role) -> Instance:
    return msgspec.structs.replace(_instance(instance_id, 16), role=role)


def _measure_block_size(block_tokens: int, arguments: argparse.Namespace) -> None:
    rnd, prompt_blocks = random.Random(block_tokens), arguments.prompt_tokens // block_tokens
    system = token_ids(rnd.randrange(1 << 17) for _ in range(min(_SYSTEM_TOKENS, arguments.prompt_tokens // 2)))
    shared = prefix_hashes(system, block_tokens, 0)
    per_instance = max(1, arguments.blocks // arguments.instances)
    conversations = [
        token_ids(rnd.randrange(1 << 17) for _ in range(block_tokens * (prompt_blocks - len(shared))))
        for _ in range(min(arguments.instances, 100))
    ]
    known, updates = KnownPrefixes(), []
    for number in range(arguments.instances):
        known.add_instance(_instance(number, block_tokens))
        own = prefix_hashes(conversations[number % 100], block_tokens, shared[-1]) if number < 100 else []
        rest = max(0, per_instance - len(own))
        updates += _snapshot(number, [*shared, *own, *(rnd.getrandbits(64) for _ in range(rest))], block_tokens)
    before, begun_s = _resident_bytes(), time.process_time()
    for data in updates:
        known.on_update(decode(data, KvCacheUpdate))
    spent_s = time.process_time() - begun_s
    count = arguments.instances * (per_instance + len(shared))
    size = (_resident_bytes() - before) / max(1, count)
    unknown = [token_ids(rnd.randrange(1 << 17) for _ in range(arguments.prompt_tokens)) for _ in range(100)]
    prompts = {
        "unknown": unknown,
        "system": [system + each[len(system) :] for each in unknown],
        "conversation": [(system + each)[: arguments.prompt_tokens] for each in conversations],
    }
    hashing = sorted(_times(lambda turn: _prompt(unknown[turn % 100]).of(block_tokens), 200))
    print(f"{block_tokens:5} {count / spent_s:16,.0f} {size:12.0f} {hashing[100]:10.1f}  ", end="")
    for each in prompts.values():
        times = _lookups(known, [_prompt(ids) for ids in each], block_tokens)
        print(f"{times[len(times) // 2]:16.1f} {times[len(times) * 99 // 100]:7.1f}", end="")
    print()


def _lookups(known: KnownPrefixes, prompts: Sequence[PromptHashes], block_tokens: int) -> list[float]:
    """Return the times of look-ups that find the candidates and read their overlaps, in us, sorted."""
    for prompt in prompts:
        prompt.of(block_tokens)

    def look_up(turn: int) -> None:
        for found in known.overlaps(prompts[turn % len(prompts)]).values():
            for instance_id in found.deepest(_CANDIDATES):
                found.get(instance_id)

    return sorted(_times(look_up, _LOOKUPS))


def _times(call: Callable[[int], object], count: int) -> list[float]:
    """Return the CPU times of calls with the numbers below `count`, in us."""
    times = []
    for turn in range(count):
        begun_ns = time.thread_time_ns()
        call(turn)
        times.append((time.thread_time_ns() - begun_ns) / 1000)
    return times


def _prompt(ids: Sequence[int]) -> PromptHashes:
    sampling = Sampling(max_tokens=1)
    # The last token is never in a cache.
    return PromptHashes(
        GenerateRequest(request_id="r", model="model", token_ids=token_ids([*ids, 0]), sampling=sampling, deadline=0.0)
    )


def _instance(number: int, block_tokens: int) -> Instance:
    return Instance(
        id=number,
        namespace="n",
        component="c",
        endpoint="e",
        subject=f"s{number}",
        role=Role.DECODE,
        engine="mock",
        card=ModelDeploymentCard(name="model", context_length=1, vocab_size=1, eos_token_ids=(), renderer="harmony"),
        layout=KvLayout(dtype="fp8", block_tokens=block_tokens, num_layers=1, num_kv_heads=1, head_dim=1),
        publishes_kv_events=True,
    )


def _snapshot(number: int, hashes: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return encoded updates with all blocks of an instance."""
    parts = [hashes[begin : begin + MAX_UPDATE_BLOCKS] for begin in range(0, len(hashes), MAX_UPDATE_BLOCKS)]
    first = KvCacheUpdate(instance_id=number, number=0, block_tokens=block_tokens, cleared=True)
    return [
        encode(
            msgspec.structs.replace(
                first, number=index, cleared=not index, stored=pack_hashes(part), snapshot=len(parts) - index
            )
        )
        for index, part in enumerate(parts)
    ]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
