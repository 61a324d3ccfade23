"""Measures what routing costs a frontend, in CPU time of one core, and what it gains.

    python -m benchmarks.routing index --blocks 1000000 --instances 1000
    python -m benchmarks.routing select --instances 10 100 1000
    python -m benchmarks.routing modes --rate 8 --requests 400
    python -m benchmarks.routing frontends
    python -m benchmarks.routing replay --trace conversation_trace.jsonl.gz
    python -m benchmarks.routing indexes

index: the index of prefix caches. How many blocks per second it takes from encoded updates, and how
long the look-up of a prompt takes: one that no instance has, one that shares a system prompt with
all instances, and one that also shares a conversation with one instance. The prefix hashes of the
prompt are measured separately.

select: how long the selection of a pair takes with --router-mode round-robin, least-loaded and kv,
and that of a path with slo. The prefix hashes of the prompt, which kv and slo need, have a column
of their own. Prompts have 8,192 tokens; each is a conversation that one instance has in its cache.
The last column is how long a report of a worker's load takes.

modes: the time to first token with each --router-mode, of prompts of 50 to 1,500 words. It starts a
deployment of mock workers: four for prefill, one of which has a quarter of the speed of the others,
and two for decode. With --documents N, all have the same speed, prompts begin with one of N
documents of 1,000 words, and a worker can cache a quarter of them.

frontends: the same for several frontends, each of which knows the requests of the others only from
the reports of the workers. Simulated, with prefill workers that compute one prompt after the other
and are busy for 80% of the time. "held" is least-loaded with frontends that hold their prompts
while each worker has 0.4 s to compute, and send them in the order of arrival to a worker that has
less. It shows what a later selection would gain.

replay: prefix hits and the time to first token with each --router-mode, of the requests of a trace
in Mooncake's format, scaled down, or of a generated one. It starts mock workers, as many for decode
as for prefill. The modes dynamo-round-robin and dynamo-kv are routers of Dynamo, with its own mock
workers; its wheels are installed from PyPI into --dynamo-folder if they are not there. "of oracle"
compares the cached tokens with those of an oracle that knows each worker's cache and sends each
prompt to the one that has most of it. "of one cache" compares them with one cache as large as those
of all workers together. In both, each prompt is computed at once. Answers of Dynamo do not say what
prefill workers found. A run without Dynamo fails unless `cached_tokens` of every answer equals what
the engine found in its cache, and prompts with other salts found nothing.

indexes: how long it takes after bursts of requests until two frontends know the same of the
workers' prefix caches. The second one loses some updates, and then asks for snapshots.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes, PromptHashes
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement
from dynamo_trtllm.frontend.routing.worker_selection import select_round_robin
from dynamo_trtllm.protocol import kv_events
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    linear_decode_fit,
    linear_prefill_fit,
    prior_fit,
)
from dynamo_trtllm.protocol.messages import (
    LoadReport,
    Role,
    TokenIds,
    decode,
    encode,
    token_ids,
)
from dynamo_trtllm.support.garbage_collection import tune_gc

from .plane import dynamo
from .routing_fleet import new_instance, new_request, percentile
from .routing_frontends import measure_frontends
from .routing_modes import measure_modes
from .routing_replay import measure_indexes, measure_replay

_LOOKUPS = 2000
_HASHED_PROMPTS = 100
_SELECTIONS = 10_000
# Calls that are not counted: the interpreter specializes the code, and memory is mapped.
_WARM_UP = 500
_CONVERSATIONS = 100  # each is in the cache of another instance
_VOCABULARY = 1 << 17
_SYSTEM_TOKENS = 2048
_CANDIDATES = 16
# The costs of the workers in `select`, all of which can run whole requests.
_COST = CostModel(
    linear_decode_fit(0.005, 1e-4, 1e-8),
    linear_prefill_fit(0.02, 2e-5, 1e-4, 1e-8),
    first_token=prior_fit((0.0, 0.0, 0.5, 1.0)),
    step_tokens=8192,
    kv_transfer=prior_fit((0.01, 0.001, 0.001)),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    index = commands.add_parser("index", help="look-ups and updates of the index of prefix caches")
    index.add_argument(
        "--blocks", type=int, default=1_000_000, help="blocks of all instances together"
    )
    index.add_argument("--instances", type=int, default=1000)
    index.add_argument("--prompt-tokens", type=int, default=8192)
    index.add_argument("--block-tokens", type=int, nargs="+", default=[16, 32, 64])
    index.set_defaults(run=measure_index)
    selection = commands.add_parser("select", help="the selection of workers")
    selection.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000, 2500])
    selection.add_argument(
        "--blocks", type=int, default=1_000_000, help="in the caches of all instances together"
    )
    selection.set_defaults(run=measure_select)
    modes = commands.add_parser(
        "modes", help="the time to first token, with workers of different speed"
    )
    modes.add_argument("--rate", type=float, default=8.0, help="requests per second (Poisson)")
    modes.add_argument("--requests", type=int, default=400)
    modes.add_argument("--modes", nargs="+", default=["round-robin", "random", "least-loaded"])
    modes.add_argument(
        "--documents",
        type=int,
        default=0,
        help="with which prompts begin; 0: none, and unequal workers",
    )
    modes.set_defaults(run=measure_modes)
    frontends = commands.add_parser(
        "frontends", help="the time to first token with several frontends, simulated"
    )
    frontends.add_argument("--seconds", type=float, default=60.0, help="simulated time per cell")
    frontends.set_defaults(run=measure_frontends)
    _add_replay(
        commands.add_parser("replay", help="prefix hits and the time to first token of a trace"),
        commands.add_parser(
            "indexes", help="how soon two frontends know the same of the workers' prefix caches"
        ),
    )
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_replay(replay: argparse.ArgumentParser, indexes: argparse.ArgumentParser) -> None:
    replay.add_argument(
        "--trace", type=Path, help="JSON lines, may end with .gz; default: a generated trace"
    )
    replay.add_argument(
        "--modes",
        nargs="+",
        default=["kv", "least-loaded", "round-robin"],
        help="router modes, and those of Dynamo",
    )
    replay.add_argument("--rounds", type=int, default=1, help="how often each mode runs, in turn")
    replay.add_argument(
        "--dynamo-folder", type=Path, default=dynamo.default_folder(), help="for Dynamo's wheels"
    )
    replay.add_argument(
        "--records", type=Path, help="append one JSON line per request to this file"
    )
    indexes.add_argument("--bursts", type=int, default=10)
    num_requests = "of a trace: about so many, of all its time"
    replay.add_argument("--requests", type=int, default=1200, help=num_requests)
    indexes.add_argument("--requests", type=int, default=400, help=num_requests)
    for parser in (replay, indexes):
        parser.add_argument("--rate", type=float, default=16.0, help="requests per second")
        parser.add_argument("--workers", type=int, default=4, help="of each role")
        parser.add_argument(
            "--prefill-tokens", type=int, default=80, help="that a worker computes in 20 ms"
        )
        parser.add_argument(
            "--cache-blocks", type=int, default=1000, help="of 32 tokens, of each prefill worker"
        )
    replay.set_defaults(run=measure_replay)
    indexes.set_defaults(run=measure_indexes)


def measure_select(arguments: argparse.Namespace) -> None:
    """Print a row per number of instances, half of them for prefill."""
    tune_gc()  # as in a frontend
    names = "round-robin", "least-loaded", "kv", "slo", "hashes", "report"
    print("instances", "".join(f"{name:>16} p50    p95    p99 us" for name in names))
    for count in arguments.instances:
        fleet = CachingFleet(count, arguments.blocks, 32, 8192)
        cells: list[str] = []
        for times in _selection_times(fleet, count):
            p50 = percentile(times, 50)
            p95 = percentile(times, 95)
            p99 = percentile(times, 99)
            cells.append(f"{p50:20.1f} {p95:6.1f} {p99:9.1f}")
        print(f"{count:9}", "".join(cells), flush=True)


def _selection_times(fleet: CachingFleet, count: int) -> list[list[float]]:
    """Return the sorted times in us of each column."""
    fleet.read_updates()
    breakers = PairBreakers()
    view = fleet.view.model("model")
    prompts = _prompts(fleet.conversations)
    least_loaded = Placement("least-loaded")
    kv = Placement("kv", fleet.known)
    slo = SloPlacement(2.0, 0.1, fleet.known)
    reports = _random_reports(count, count + _WARM_UP + _SELECTIONS - 1)
    for report in reports[:count]:
        least_loaded.loads.on_report(report, 1.0)
        kv.loads.on_report(report, 1.0)
        slo.loads.on_report(msgspec.structs.replace(report, cost=_COST), 1.0)

    def select_in_turn(turn: int) -> None:
        select_round_robin(view, "model", turn, breakers)

    def select_least_loaded(turn: int) -> None:
        least_loaded.select(view, prompts[turn % len(prompts)], breakers, 1.0)

    def select_kv(turn: int) -> None:
        kv.select(view, prompts[turn % len(prompts)], breakers, 1.0)

    def select_path(turn: int) -> None:
        slo.select(view, prompts[turn % len(prompts)], breakers, 1.0)

    def hash_prompt(turn: int) -> None:
        PromptHashes(prompts[turn % len(prompts)].request).of(32)

    def take_report(turn: int) -> None:
        least_loaded.loads.on_report(reports[turn], 1.0)

    columns = (select_in_turn, select_least_loaded, select_kv, select_path, hash_prompt)
    times = [_times(column, _SELECTIONS) for column in columns]
    return [*times, _times(take_report, len(reports) - _WARM_UP)]


def _random_reports(num_instances: int, count: int) -> list[LoadReport]:
    """Return reports of all instances in turn."""
    rnd = random.Random(1)
    return [
        LoadReport(
            instance_id=number % num_instances,
            number=number,
            running=rnd.randrange(9),
            waiting=0,
            queued_prefill_tokens=rnd.randrange(9999),
            kv_blocks_used=rnd.randrange(99),
            kv_blocks_total=999,
            context_tokens=0,
        )
        for number in range(1, count + 1)
    ]


class CachingFleet:
    """Instances whose caches have the same system prompt.

    The caches of the first _CONVERSATIONS instances also have a conversation each: these are the
    prompts in `conversations`. After `read_updates`, the index `known` has all blocks.
    """

    def __init__(self, instances: int, blocks: int, block_tokens: int, prompt_tokens: int) -> None:
        """Create the instances. `blocks` is the number of all their blocks together."""
        rnd = random.Random(block_tokens)
        self.system = _random_tokens(rnd, min(_SYSTEM_TOKENS, prompt_tokens // 2))
        shared = kv_events.prefix_hashes(self.system, block_tokens, 0)
        num_own_blocks = prompt_tokens // block_tokens - len(shared)
        chats = [
            _random_tokens(rnd, block_tokens * num_own_blocks)
            for _ in range(min(instances, _CONVERSATIONS))
        ]
        self.conversations = [(self.system + chat)[:prompt_tokens] for chat in chats]
        self.known = ClusterPrefixes()
        self.view = ClusterView()
        self.num_blocks = 0
        self._updates: list[bytes] = []
        for number in range(instances):
            instance = new_instance(number, block_tokens)
            self.known.add_instance(instance)
            self.view.add(instance)
            hashes = list(shared)
            if number < len(chats):
                hashes += kv_events.prefix_hashes(chats[number], block_tokens, shared[-1])
            num_others = blocks // instances - len(hashes)
            hashes += [rnd.getrandbits(64) for _ in range(num_others)]
            self._updates += _snapshot(number, hashes, block_tokens)
            self.num_blocks += len(hashes)

    def read_updates(self) -> None:
        for data in self._updates:
            self.known.on_update(decode(data, kv_events.KvCacheUpdate))


def measure_index(arguments: argparse.Namespace) -> None:
    """Print a row per block size."""
    print("block  ingest blocks/s  bytes/block  hashes us  ", end="")
    print("".join(f"{name:>12} p50  p99 us" for name in ("unknown", "system", "conversation")))
    for block_tokens in arguments.block_tokens:
        _measure_block_size(block_tokens, arguments)


def _measure_block_size(block_tokens: int, arguments: argparse.Namespace) -> None:
    fleet = CachingFleet(
        arguments.instances, arguments.blocks, block_tokens, arguments.prompt_tokens
    )
    bytes_before = _resident_bytes()
    begun_s = time.process_time()
    fleet.read_updates()
    blocks_per_s = fleet.num_blocks / (time.process_time() - begun_s)
    block_bytes = (_resident_bytes() - bytes_before) / fleet.num_blocks
    rnd = random.Random(1)
    unknown = [_random_tokens(rnd, arguments.prompt_tokens) for _ in range(_HASHED_PROMPTS)]
    # The prompts are copied before the measurement, because a copy takes as long as its hashes.
    unhashed = _prompts(unknown)

    def hash_prompt(turn: int) -> None:
        unhashed[turn].of(block_tokens)

    hashing_us = percentile(_times(hash_prompt, _HASHED_PROMPTS, warm_up=0), 50)
    print(
        f"{block_tokens:5} {blocks_per_s:16,.0f} {block_bytes:12.0f} {hashing_us:10.1f}  ", end=""
    )
    num_system_tokens = len(fleet.system)
    with_system_prompt = [fleet.system + ids[num_system_tokens:] for ids in unknown]
    for prompts in (unknown, with_system_prompt, fleet.conversations):
        times = _lookups(fleet.known, _prompts(prompts), block_tokens)
        print(f"{percentile(times, 50):16.1f} {percentile(times, 99):7.1f}", end="")
    print(flush=True)


def _lookups(
    known: ClusterPrefixes, prompts: Sequence[PromptHashes], block_tokens: int
) -> list[float]:
    """Return the sorted times in us of look-ups that find candidates and read their overlaps."""
    for prompt in prompts:
        prompt.of(block_tokens)

    def look_up(turn: int) -> None:
        found = known.overlaps(prompts[turn % len(prompts)], 0.0)
        for role in (Role.PREFILL, Role.DECODE):
            found.of(found.deepest(role, _CANDIDATES))

    return _times(look_up, _LOOKUPS)


def _times(call: Callable[[int], object], count: int, *, warm_up: int = _WARM_UP) -> list[float]:
    """Return the sorted CPU times of calls in us.

    Args:
        call: what is measured. It gets the number of the call.
        count: how many calls are measured.
        warm_up: how many calls come before these, and are not measured.
    """
    times: list[float] = []
    for turn in range(warm_up + count):
        begun_ns = time.thread_time_ns()
        call(turn)
        times.append((time.thread_time_ns() - begun_ns) / 1000)
    return sorted(times[warm_up:])


def _prompts(prompts: Iterable[Sequence[int]]) -> list[PromptHashes]:
    # The last token is never in a cache.
    return [PromptHashes(new_request([*ids, 0])) for ids in prompts]


def _random_tokens(rnd: random.Random, count: int) -> TokenIds:
    return token_ids(rnd.randrange(_VOCABULARY) for _ in range(count))


def _snapshot(number: int, hashes: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return encoded updates with all blocks of an instance."""
    parts = [
        hashes[begin : begin + kv_events.MAX_UPDATE_BLOCKS]
        for begin in range(0, len(hashes), kv_events.MAX_UPDATE_BLOCKS)
    ]
    updates: list[bytes] = []
    for index, part in enumerate(parts):
        update = kv_events.KvCacheUpdate(
            instance_id=number,
            number=index,
            block_tokens=block_tokens,
            cleared=index == 0,
            stored=kv_events.pack_hashes(part),
            snapshot=len(parts) - index,
        )
        updates.append(encode(update))
    return updates


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    num_pages = int(fields[1])
    return num_pages * 4096


if __name__ == "__main__":
    main()
