from __future__ import annotations

import asyncio
import importlib
import itertools
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed import kv_transfer
from vllm.sampling_params import SamplingParams
from vllm.standin.core import Core, Job
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import PrometheusStatLogger


class AsyncLLM:
    def __init__(self, vllm_config: VllmConfig, logger: Any) -> None:
        self.vllm_config = vllm_config
        self._logger = logger
        self._core: Core | None = None
        self._closed = False
        # numbers of tokens of the model runner's passes without requests
        self.passes: list[int] = []
        self.output_handler = None
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        *,
        stat_loggers: list[Any],
        enable_log_requests: bool,
        disable_log_stats: bool,
    ) -> AsyncLLM:
        (made,) = stat_loggers
        assert issubclass(made, PrometheusStatLogger)
        return cls(vllm_config, made(vllm_config, [0]))

    @property
    def core(self) -> Core:
        """Built at the first request: only then there is a loop."""
        if self._core is None:
            self._loop = asyncio.get_running_loop()
            self._core = Core(self.vllm_config, self._logger.record)
        return self._core

    @property
    def errored(self) -> bool:
        return self._closed or (self._core is not None and self._core.dead)

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0
    ) -> RequestOutputCollector:
        if self.errored:
            raise EngineDeadError
        assert prompt["type"] == "token"
        ids = list(prompt["prompt_token_ids"])
        if len(ids) >= self.vllm_config.model_config.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(ids)}) is too long")
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise ValueError(f"Got priority {priority} but Priority scheduling is not enabled.")
        collector = RequestOutputCollector(params.output_kind, request_id)
        job_id = f"{request_id}-{next(self._numbers):08x}"
        salt = prompt.get("cache_salt")
        self.core.add(Job(job_id, ids, params, collector, salt, priority))
        # vLLM sends the request to its engine process here: outputs may come before this ends
        await asyncio.sleep(0)
        return collector

    async def abort(self, request_id: str) -> None:
        self.core.abort(request_id)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        if method == "dynamo_bind_lifetime":
            return [True]  # it has no process of its own
        extension = importlib.import_module(
            "dynamo_trtllm.engines.vllm.extension"
        ).WorkerExtension()
        extension.model_runner = self
        kv_transfer.current = self.core
        try:
            return [getattr(extension, method)(*args)]
        finally:
            kv_transfer.current = None

    def _dummy_run(self, num_tokens: int, *, skip_eplb: bool) -> None:
        """Of vLLM's GPUModelRunner."""
        assert num_tokens <= self.vllm_config.scheduler_config.max_num_batched_tokens
        self.passes.append(num_tokens)

    def shutdown(self, timeout: float | None = None) -> None:
        self._closed = True
        if self._core is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._core.die)
