"""Simulates several frontends, each of which learns of the requests of the others by reports.

Part of `benchmarks.routing`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.cost_placement import Placement
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.pairs import WorkerSelection
from dynamo_trtllm.frontend.routing.prefix_index import PromptHashes
from dynamo_trtllm.frontend.routing.worker_load import PlacedCall
from dynamo_trtllm.frontend.routing.worker_selection import select_round_robin
from dynamo_trtllm.protocol.messages import GenerateRequest, LoadReport, Role

from .routing_fleet import new_instance, new_request, percentile

_REPORT_S = 0.05  # between two reports of a worker to one frontend
_BROADCAST_S = 0.25  # between two broadcasts of a worker
_TOKENS_PER_S = 20_000.0  # of a simulated worker
_BUSY_SHARE = 0.8  # share of the time in which simulated workers compute
# A simulated worker that has this many prompt tokens to compute gets no prompt that was held. To
# compute them takes two steps of 0.2 s.
_FULL_TOKENS = 8000


class _Event(NamedTuple):
    """What happens at a simulated time."""

    time_s: float
    number: int  # orders events of the same time
    run: Callable[[float], None]


class SimulatedFrontends:
    """Frontends that send prompts to prefill workers, in simulated time.

    A frontend gets a worker's load when the worker has computed a prompt of it, at most every 50
    ms, and with the broadcasts of the worker.
    """

    def __init__(
        self, count: int, rates: Mapping[int, float], *, by_load: bool, holds: bool = False
    ) -> None:
        """Start without requests.

        Args:
            count: number of frontends.
            rates: tokens per second of each worker.
            by_load: select as least-loaded does. Otherwise, select as round-robin does.
            holds: a prompt waits in its frontend while each worker has _FULL_TOKENS to compute.
        """
        self._rates = rates
        self._by_load = by_load
        self._holds = holds
        self._frontends = [Placement("least-loaded", seed=seed) for seed in range(count)]
        # By frontend, the prompts that it holds, with the times of their arrival.
        self._waiting = [deque[tuple[float, GenerateRequest]]() for _ in range(count)]
        self._num_sent = [0] * count
        self._view = ModelView().including(new_instance(1 << 20, 32))
        for worker in rates:
            instance = msgspec.structs.replace(new_instance(worker, 32), role=Role.PREFILL)
            self._view = self._view.including(instance)
        self._breakers = PairBreakers()
        self._free_at = dict.fromkeys(rates, 0.0)  # by worker
        self._num_reports = 0
        self._reported_at: dict[tuple[int, int], float] = {}  # by frontend and worker
        self._events: list[_Event] = []
        self._num_events = 0
        self._ttfts: list[float] = []

    def _at(self, time_s: float, run: Callable[[float], None]) -> None:
        """Run something at a simulated time, which it gets."""
        self._num_events += 1
        heapq.heappush(self._events, _Event(time_s, self._num_events, run))

    def ttfts(self, lengths: Sequence[int], seconds: float) -> list[float]:
        """Return the sorted times to first token."""
        rnd = random.Random(1)
        requests = {length: new_request(range(length)) for length in lengths}
        mean_length = sum(lengths) / len(lengths)
        rate = _BUSY_SHARE * sum(self._rates.values()) / mean_length
        arrives_at = rnd.expovariate(rate)
        while arrives_at < seconds:
            frontend = rnd.randrange(len(self._frontends))
            request = requests[rnd.choice(lengths)]
            self._at(arrives_at, partial(self._arrived, frontend, request))
            arrives_at += rnd.expovariate(rate)
        for worker in self._rates:
            self._at(rnd.random() * _BROADCAST_S, partial(self._broadcast, worker, seconds))
        while self._events:
            event = heapq.heappop(self._events)
            event.run(event.time_s)
        return sorted(self._ttfts)

    def _arrived(self, frontend: int, request: GenerateRequest, now: float) -> None:
        self._waiting[frontend].append((now, request))
        self._send_waiting(frontend, now)

    def _send_waiting(self, frontend: int, now: float) -> None:
        """Send the prompts that wait in a frontend, as long as a worker may get them."""
        waiting = self._waiting[frontend]
        while waiting:
            view = self._view
            if self._holds:
                view = view.excluding(self._full_workers(frontend))
            if not view.prefill:
                return
            arrived_at, request = waiting.popleft()
            self._send(frontend, view, request, arrived_at, now)

    def _full_workers(self, frontend: int) -> frozenset[int]:
        """Return the workers that have enough to compute, as far as a frontend knows."""
        full = set[int]()
        for worker in self._rates:
            load = self._frontends[frontend].loads.get(worker)
            tokens = load.unseen_prefill_tokens
            if load.report is not None:
                tokens += load.report.queued_prefill_tokens
            if tokens >= _FULL_TOKENS:
                full.add(worker)
        return frozenset(full)

    def _send(
        self,
        frontend: int,
        view: ModelView,
        request: GenerateRequest,
        arrived_at: float,
        now: float,
    ) -> None:
        placement = self._frontends[frontend]
        prompt_tokens = len(request.token_ids)
        selection: WorkerSelection | None = None
        if self._by_load:
            selection = placement.select(view, PromptHashes(request), self._breakers, now)
        if selection is None:
            self._num_sent[frontend] += 1
            selection = select_round_robin(view, "model", self._num_sent[frontend], self._breakers)
        assert selection.prefill is not None
        worker = selection.prefill.id
        call = placement.loads.of(worker).place(prompt_tokens, 0)
        call.on_sent(now)
        begins_at = max(now, self._free_at[worker])
        ends_at = begins_at + prompt_tokens / self._rates[worker]
        self._free_at[worker] = ends_at
        self._ttfts.append(ends_at - arrived_at)
        self._at(ends_at, partial(self._computed, frontend, worker, call))

    def _computed(self, frontend: int, worker: int, call: PlacedCall, now: float) -> None:
        call.end()
        if now - self._reported_at.get((frontend, worker), -1.0) >= _REPORT_S:
            self._reported_at[frontend, worker] = now
            self._report(frontend, worker, now)
        else:
            self._at(now + 2 * _REPORT_S, partial(self._report, frontend, worker))

    def _broadcast(self, worker: int, until_s: float, now: float) -> None:
        for frontend in range(len(self._frontends)):
            self._report(frontend, worker, now)
        if now + _BROADCAST_S < until_s or any(self._waiting):
            self._at(now + _BROADCAST_S, partial(self._broadcast, worker, until_s))

    def _report(self, frontend: int, worker: int, now: float) -> None:
        self._num_reports += 1
        busy_s = max(0.0, self._free_at[worker] - now)
        report = LoadReport(
            instance_id=worker,
            number=self._num_reports,
            running=0,
            waiting=0,
            queued_prefill_tokens=int(busy_s * self._rates[worker]),
            kv_blocks_used=0,
            kv_blocks_total=0,
            context_tokens=0,
        )
        self._frontends[frontend].loads.on_report(report, now)
        self._send_waiting(frontend, now)


def measure_frontends(arguments: argparse.Namespace) -> None:
    """Print a row per number of frontends, workers and lengths of prompts."""
    columns = "round-robin p50    p99  least-loaded p50    p99   held p50    p99"
    print(f"frontends  workers  prompts  TTFT ms: {columns}")
    frontends = (1, 4, 16)
    workers = (1, 2, 4, 8, 16)
    prompts = {"equal": (1000,), "mixed": (200, 500, 1000, 6000)}
    row = "{:9} {:8}  {:7} {:24.0f} {:6.0f} {:17.0f} {:6.0f} {:10.0f} {:6.0f}"
    for num_frontends, num_workers, kind in itertools.product(frontends, workers, prompts):
        rates = dict.fromkeys(range(1, num_workers + 1), _TOKENS_PER_S)
        cells: list[float] = []
        for by_load, holds in ((False, False), (True, False), (True, True)):
            simulated = SimulatedFrontends(num_frontends, rates, by_load=by_load, holds=holds)
            ttfts = simulated.ttfts(prompts[kind], arguments.seconds)
            cells += [1000 * percentile(ttfts, 50), 1000 * percentile(ttfts, 99)]
        print(row.format(num_frontends, num_workers, kind, *cells), flush=True)
