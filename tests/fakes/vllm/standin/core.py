"""The engine process as a task: requests in a batch, KV blocks in a pool, tickets as leases of the connector."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.standin.tokens import logprobs, next_token

engines: dict[str, Core] = {}  # by the connector's engine id; a dead one is not in it
_ids = itertools.count()


@dataclass(slots=True)
class Job:
    id: str
    prompt: list[int]
    sampling: Any
    queue: asyncio.Queue[Any]
    output: list[int] = field(default_factory=list)
    blocks: int = 0
    fetched: bool = False

    @property
    def transfer(self) -> dict[str, Any]:
        return (self.sampling.extra_args or {}).get("kv_transfer_params") or {}


class Core:
    """One step per turn of the loop while there is work. `connector_worker` is what the extension looks for."""

    def __init__(self, config: Any, record: Any) -> None:
        self.config, self.record = config, record
        self.engine_id = f"standin-{next(_ids)}"
        self.free = config.cache_config.num_gpu_blocks - 1
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.leases: dict[str, int] = {}  # finished prefills -> blocks
        self.connector_worker = SimpleNamespace(_reqs_to_send={})
        self.connector = _connector(config)
        self.dead = False
        self.stuck = False  # no KV ever comes
        self.task = asyncio.get_running_loop().create_task(self._run(), name="standin-core")
        self.wake = asyncio.Event()
        engines[self.engine_id] = self

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        self.wake.set()

    def abort(self, external_id: str) -> None:
        for job in [*self.waiting, *self.running]:
            if job.id.rpartition("-")[0] == external_id:
                self._end(job, "abort")
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
        self._free_leases()
        for job in list(self.waiting):
            if len(self.running) < self.config.scheduler_config.max_num_seqs:
                self._admit(job)
        for job in list(self.running):
            self._advance(job)

    def _free_leases(self) -> None:
        held = self.connector_worker._reqs_to_send
        for job_id, expires in list(held.items()):
            if time.monotonic() >= expires:
                del held[job_id]
                self.free += self.leases.pop(job_id)

    def _admit(self, job: Job) -> None:
        needed = -(-(len(job.prompt) + job.sampling.max_tokens) // self.config.cache_config.block_size)
        if job.transfer.get("do_remote_decode"):
            needed = -(-len(job.prompt) // self.config.cache_config.block_size)
        if needed > self.free:
            return
        if job.transfer.get("do_remote_prefill") and not job.fetched:
            if self.stuck or not self._fetch(job):
                return
        self.waiting.remove(job)
        self.running.append(job)
        job.blocks, self.free = needed, self.free - needed

    def _fetch(self, job: Job) -> bool:
        """Reads without asking whether the KV is still there, as NixlConnector does; then frees it over there."""
        other = engines.get(job.transfer["remote_engine_id"])
        size = self.config.cache_config.block_size
        theirs = len(job.transfer["remote_block_ids"][0])
        request = SimpleNamespace(kv_transfer_params=job.transfer, prompt_token_ids=job.prompt)
        count, _ = self.connector.get_num_new_matched_tokens(request, 0)
        assert -(-count // size) == theirs, "blocks of both sides are paired from the end"
        if other is None:
            self._end(job, "error")
            return False
        expiry = other.connector_worker._reqs_to_send
        if job.transfer["remote_request_id"] in expiry:
            expiry[job.transfer["remote_request_id"]] = 0.0
        job.fetched = True
        return True

    def _advance(self, job: Job) -> None:
        sampling = job.sampling
        token = next_token(job.prompt, job.output, sampling, self.config.vocab_size)
        job.output.append(token)
        finish = None
        if token in sampling.stop_token_ids and len(job.output) >= sampling.min_tokens:
            finish = "stop"
        elif len(job.output) == sampling.max_tokens:
            finish = "length"
        told = None if sampling.logprobs is None else [logprobs(token, sampling.logprobs)]
        params = self._lease(job) if finish and job.transfer.get("do_remote_decode") else None
        job.queue.put_nowait(self._output([token], told, finish, params))
        if finish:
            self._end(job, None, keep=params is not None)

    def _lease(self, job: Job) -> dict[str, Any]:
        seconds = self.config.kv_transfer_config.kv_connector_extra_config["kv_lease_duration"]
        self.connector_worker._reqs_to_send[job.id] = time.monotonic() + seconds
        self.leases[job.id] = job.blocks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": (list(range(job.blocks)),),
            "remote_engine_id": self.engine_id,
            "remote_request_id": job.id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(job.prompt),
        }

    def _end(self, job: Job, finish: str | None, *, keep: bool = False) -> None:
        for group in (self.waiting, self.running):
            if job in group:
                group.remove(job)
        if not keep:
            self.free += job.blocks
        if finish is not None:
            job.queue.put_nowait(self._output([], None, finish, None))

    def _output(self, tokens: list[int], told: Any, finish: str | None, params: Any) -> Any:
        completion = SimpleNamespace(token_ids=tokens, logprobs=told, finish_reason=finish)
        return SimpleNamespace(
            outputs=[completion], finished=finish is not None, kv_transfer_params=params, num_cached_tokens=0
        )

    def die(self) -> None:
        """As when the process is killed: every request hears of it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self.dead = True
        engines.pop(self.engine_id, None)
        self.task.cancel()
        for job in [*self.waiting, *self.running]:
            job.queue.put_nowait(EngineDeadError())
        self.waiting.clear()
        self.running.clear()


def _connector(config: Any) -> Any:
    """As vLLM finds it: by its name in a module. None: whole requests only."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    found = getattr(importlib.import_module(transfer.kv_connector_module_path), transfer.kv_connector)
    return found(config, "scheduler", None)
