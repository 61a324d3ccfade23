"""The engine process as a task: requests in a batch, KV blocks in a pool, KV transfers as leases of the
connector.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from bisect import insort
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.standin.release import REPORTS_FAILED_READS
from vllm.standin.tokens import logprobs, next_token
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import RequestStateStats
from vllm.v1.request import RequestStatus

engines: dict[str, Core] = {}  # by the connector's engine id; a dead one is not in it
_ids = itertools.count()


@dataclass(slots=True)
class Job:
    id: str
    prompt: list[int]
    sampling: Any
    collector: RequestOutputCollector
    salt: str | None = None
    priority: int = 0
    context: list[int] = field(default_factory=list)  # the prompt as its KV has it
    output: list[int] = field(default_factory=list)
    blocks: int = 0
    status: RequestStatus = RequestStatus.WAITING
    is_garbled: bool = False  # its KV was never written
    cached_tokens: int = 0
    client_index: int = 0
    metrics: RequestStateStats = field(default_factory=RequestStateStats)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        return (self.sampling.extra_args or {}).get("kv_transfer_params") or {}

    def is_finished(self) -> bool:
        return self.status > RequestStatus.RUNNING

    def get_finished_reason(self) -> str:
        return self.status.name.removeprefix("FINISHED_").lower()


class Core:
    """The engine, which runs one step per turn of the loop while there is work.

    `connector_worker` is what the extension looks for.

    A read that fails garbles its request, and the request's prompt in the prefix cache, unless
    somebody ends it first.
    """

    def __init__(self, config: Any, record: Any) -> None:
        self.config = config
        self.record = record
        self.engine_id = f"standin-{next(_ids)}"
        self.free = config.cache_config.num_gpu_blocks - 1
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.leases: dict[str, int] = {}  # finished prefills -> blocks
        self.scheduler = Scheduler(self._drop)
        self.connector = _connector(config, "scheduler")
        self.worker_half = _connector(config, "worker")
        self.connector_worker = (
            None if self.worker_half is None else self.worker_half.connector_worker
        )
        # first blocks of prompts whose cached KV was never written
        self.garbled: set[tuple[int, ...]] = set()
        self.dead = False
        self.stuck = False  # no KV ever comes
        self.reads_wrongly = False  # other KV comes
        self.kv: dict[str, list[int]] = {}  # finished prefills -> what their KV holds
        # prefix cache, of whole prompts
        self.cached: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
        self.task = asyncio.get_running_loop().create_task(self._run(), name="standin-core")
        self.wake = asyncio.Event()
        engines[self.engine_id] = self

    def add(self, job: Job) -> None:
        self.scheduler.requests[job.id] = job
        job.metrics.queued_ts = time.monotonic()
        if self.config.scheduler_config.policy == "priority":
            insort(self.waiting, job, key=lambda job: job.priority)
        else:
            self.waiting.append(job)
        self.wake.set()

    def abort(self, external_id: str) -> None:
        for job in [*self.waiting, *self.running]:
            if job.id.rpartition("-")[0] == external_id:
                self._end(job, RequestStatus.FINISHED_ABORTED)
        self.wake.set()

    async def _run(self) -> None:
        while True:
            if not (self.waiting or self.running or self.leases):
                self.wake.clear()
                self._tell()
                await self.wake.wait()
            self._step()
            self._tell()
            await asyncio.sleep(0.001)

    def _tell(self) -> None:
        usable = self.config.cache_config.num_gpu_blocks - 1
        self.record(
            scheduler_stats=SimpleNamespace(
                num_waiting_reqs=len(self.waiting),
                num_skipped_waiting_reqs=0,
                kv_cache_usage=1 - self.free / usable,
            ),
            iteration_stats=None,
        )

    def _step(self) -> None:
        self._end_reads()
        for job in list(self.waiting):
            if len(self.running) < self.config.scheduler_config.max_num_seqs:
                self._admit(job)
        for job in list(self.running):
            self._advance(job)

    def _end_reads(self) -> None:
        """Pass what the workers report of the last step to the scheduler."""
        if self.worker_half is None:
            return
        failed: set[str] = set()
        if REPORTS_FAILED_READS:
            results = self.worker_half.get_transfer_results(set())
            received = results.finished_recving
            failed = results.failed_recving
        else:
            received = self.worker_half.get_finished(set())[1]
        report = SimpleNamespace(
            finished_recving=received & set(self.scheduler.requests),
            failed_recving=failed & set(self.scheduler.requests),
            kv_connector_worker_meta=self.worker_half.build_connector_worker_meta(),
        )
        jobs = dict(self.scheduler.requests)
        outputs = self.scheduler.update_from_output(
            None, SimpleNamespace(kv_connector_output=report)
        )
        self._free_leases()
        for output in [pending for client in outputs.values() for pending in client.outputs]:
            _send(jobs[output.request_id], self._output([], None, output.finish_reason, None))

    def _free_leases(self) -> None:
        held = self.connector_worker._reqs_to_send
        for job_id, expires in list(held.items()):
            if time.monotonic() >= expires:
                del held[job_id]
                self.free += self.leases.pop(job_id)
                del self.kv[job_id]

    def _admit(self, job: Job) -> None:
        if job.status is RequestStatus.WAITING and not self._allocate(job):
            return
        if job.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            received = self.scheduler.finished_recving_kv_req_ids
            if job.id not in received:
                return
            received.remove(job.id)
            if job.is_garbled:
                self.garbled.add(self._first_block(job))
        self.waiting.remove(job)
        self.running.append(job)
        job.metrics.scheduled_ts = time.monotonic()  # after its KV was read
        job.status = RequestStatus.RUNNING

    def _allocate(self, job: Job) -> bool:
        """Takes the blocks it needs, and begins to read its KV if it has a transfer.

        False: there are too few.
        """
        needed = -(
            -(len(job.prompt) + job.sampling.max_tokens) // self.config.cache_config.block_size
        )
        if job.kv_transfer_params.get("do_remote_decode"):
            needed = -(-len(job.prompt) // self.config.cache_config.block_size)
        if needed > self.free:
            return False
        job.blocks = needed
        self.free = self.free - needed
        if job.kv_transfer_params.get("do_remote_prefill"):
            job.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            if not self.stuck:
                self._fetch(job)
            return True
        self._compute(job)
        if self._first_block(job) in self.garbled:
            job.is_garbled = True
            job.cached_tokens = self.config.cache_config.block_size
        return True

    def _first_block(self, job: Job) -> tuple[int, ...]:
        """By which the prefix cache finds a prompt again."""
        return tuple(job.prompt[: self.config.cache_config.block_size])

    def _fetch(self, job: Job) -> None:
        """Reads without asking whether the KV is still there, as NixlConnector does; then frees it
        over there.
        """
        other = engines.get(job.kv_transfer_params["remote_engine_id"])
        size = self.config.cache_config.block_size
        theirs = len(job.kv_transfer_params["remote_block_ids"][0])
        request = SimpleNamespace(
            kv_transfer_params=job.kv_transfer_params, prompt_token_ids=job.prompt
        )
        count, _ = self.connector.get_num_new_matched_tokens(request, 0)
        assert -(-count // size) == theirs, "blocks of both sides are paired from the end"
        self.connector.update_state_after_alloc(request, None, count)
        self.connector_worker._read_blocks_for_req(job.id, SimpleNamespace(local_block_ids=([1],)))
        if (
            other is None
            or max(job.kv_transfer_params["remote_block_ids"][0])
            > other.config.cache_config.num_gpu_blocks
        ):
            job.context = job.prompt
            job.is_garbled = True
            self.connector_worker.read_failed(job.id)
            return
        expiry = other.connector_worker._reqs_to_send
        if job.kv_transfer_params["remote_request_id"] in expiry:
            expiry[job.kv_transfer_params["remote_request_id"]] = 0.0
        self._take(job, other)
        self.connector_worker.received(job.id)

    def _take(self, job: Job, other: Core) -> None:
        """What the prefix cache has is not read."""
        # freed: what is there now
        held = other.kv.get(job.kv_transfer_params["remote_request_id"], job.prompt[::-1])
        prefix = job.salt, tuple(job.prompt[: len(held)])
        read = [token + 1 for token in held] if self.reads_wrongly else held
        job.context = self.cached.setdefault(prefix, read) + job.prompt[len(held) :]

    def _compute(self, job: Job) -> None:
        job.context = self.cached.setdefault((job.salt, tuple(job.prompt)), job.prompt)

    def _advance(self, job: Job) -> None:
        sampling = job.sampling
        context = job.context[::-1] if job.is_garbled else job.context
        token = next_token(context, job.output, sampling, self.config.vocab_size)
        job.output.append(token)
        job.metrics.last_token_ts = time.monotonic()
        job.metrics.first_token_ts = job.metrics.first_token_ts or job.metrics.last_token_ts
        finish = None
        if token in sampling.stop_token_ids and len(job.output) >= sampling.min_tokens:
            finish = "stop"
        elif len(job.output) == sampling.max_tokens:
            finish = "length"
        entries = None if sampling.logprobs is None else [logprobs(token, sampling.logprobs)]
        params = None
        if finish and job.kv_transfer_params:
            leases = job.kv_transfer_params.get("do_remote_decode")
            params = (
                self._lease(job)
                if leases
                else self.connector.request_finished_all_groups(job, ())[1]
            )
        output = self._output([token], entries, finish, params, job)
        if len(job.output) == 1 and sampling.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None,
                *(
                    logprobs(prompt_token, sampling.prompt_logprobs)
                    for prompt_token in job.prompt[1:]
                ),
            ]
        _send(job, output)
        if finish:
            job.blocks = 0 if job.id in self.leases else job.blocks  # they are the lease's
            self._end(job, RequestStatus.FINISHED_STOPPED)

    def _lease(self, job: Job) -> dict[str, Any]:
        extra = self.config.kv_transfer_config.kv_connector_extra_config
        seconds = extra["kv_lease_duration"]
        self.connector_worker._reqs_to_send[job.id] = time.monotonic() + seconds
        self.leases[job.id] = job.blocks
        self.kv[job.id] = job.context
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            # full attention, window
            "remote_block_ids": (list(range(job.blocks)), list(range(job.blocks))[-2:]),
            "remote_engine_id": self.engine_id,
            "remote_request_id": job.id,
            "remote_host": extra["side_channel_host"],
            "remote_port": extra["side_channel_port"],
            "tp_size": 1,
            "remote_num_tokens": len(job.prompt),
        }

    def _end(self, job: Job, status: RequestStatus) -> None:
        self.scheduler.finish_requests(job.id, status)
        if status is not RequestStatus.FINISHED_STOPPED:
            _send(job, self._output([], None, job.get_finished_reason(), None))

    def _drop(self, job: Job) -> None:
        for group in (self.waiting, self.running):
            if job in group:
                group.remove(job)
        self.free += job.blocks

    def _output(
        self,
        tokens: list[int],
        entries: Any,
        finish: str | None,
        params: Any,
        job: Job | None = None,
    ) -> Any:
        completion = SimpleNamespace(token_ids=tokens, logprobs=entries, finish_reason=finish)
        return SimpleNamespace(
            outputs=[completion],
            finished=finish is not None,
            kv_transfer_params=params,
            prompt_logprobs=None,
            num_cached_tokens=0 if job is None else job.cached_tokens,
            metrics=None if job is None else job.metrics,
        )

    def die(self) -> None:
        """As when the process is killed: every request hears of it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.dead = True
        engines.pop(self.engine_id, None)
        self.task.cancel()
        for job in [*self.waiting, *self.running]:
            _send(job, EngineDeadError())
        self.waiting.clear()
        self.running.clear()


def _send(job: Job, output: Any) -> None:
    """Pass an output on as vLLM does: another task receives it, after the step."""
    asyncio.get_running_loop().call_soon(lambda: job.collector.put(output))


def _connector(config: Any, role: str) -> Any:
    """As vLLM finds it: by its name in a module. None: aggregated requests only."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    found = getattr(
        importlib.import_module(transfer.kv_connector_module_path), transfer.kv_connector
    )
    return found(config, role, None)
