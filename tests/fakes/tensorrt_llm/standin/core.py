"""The torch engine in a thread of its own, through its public class: what computes for the
stand-in.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import EngineInfo, EngineStats
from dynamo_trtllm.engines.torch.engine import TorchEngine
from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend

T = TypeVar("T")

_FOR_EVER_MS = 10_000_000_000
_BATCH = 64  # as the engine under the stand-in runs on a CPU

_live: weakref.WeakSet[Core] = weakref.WeakSet()


class Core:
    """The engine. Its constructor starts it and blocks, and its loop runs until `close`."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stand-in", daemon=True)
        self._thread.start()
        self.engine: TorchEngine
        self.engine_model: str
        self.die: Callable[[str], None] | None = None  # of the executor
        self._closing = threading.Lock()
        try:
            self.info: EngineInfo = self.call(self._open(args))
        except BaseException:
            self.close()
            raise
        _live.add(self)

    async def _open(self, args: Mapping[str, Any]) -> EngineInfo:
        self.engine_model = Path(args["model"]).name
        transceiver = args["cache_transceiver_config"] or {}
        timeout_ms = transceiver.get("kv_transfer_timeout_ms") or _FOR_EVER_MS
        config = WorkerConfig(
            model_path=str(args["model"]),
            served_model_name=self.engine_model,
            kv_transfer_ttl_s=timeout_ms / 1000,
            # else it reads the tokenizer for output formats, which few tests use: 1.5 s of CPU time
            warm_up_budget_s=0.0,
            override_engine_args=_engine_args(args),
        )
        backend = _backend(transceiver.get("backend"))
        self.engine = TorchEngine(config, instance_id=secrets.randbits(63), backend=backend)
        return await self.engine.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the engine's loop and waits. Not from that loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def post(self, message: Callable[[], object]) -> None:
        """Runs it on the engine's loop, soon; nothing after `close`."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(message)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Idempotent."""
        with self._closing:
            if self.loop.is_closed():
                return
            if hasattr(self, "engine"):
                self.call(self.engine.aclose())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


def live_stats() -> list[EngineStats]:
    """Of every engine that runs under a stand-in in this process: for tests that ask what is
    left.
    """
    return [core.stats() for core in _live if not core.loop.is_closed()]


def kill_all(reason: str) -> None:
    """As when a rank is lost: the executors of this process answer nothing any more."""
    for core in _live:
        if core.die is not None and not core.loop.is_closed():
            core.die(reason)


def _backend(backend: str | None) -> TransferBackend | None:
    """UCX and NIXL are nixl where it runs, otherwise tcp; STANDIN_BACKEND names one."""
    return None if backend is None else create_backend(os.environ.get("STANDIN_BACKEND"))


def _engine_args(args: Mapping[str, Any]) -> dict[str, Any]:
    kv = args["kv_cache_config"] or {}
    block = kv.get("tokens_per_block") or 32
    chosen = {
        "max_batch_size": min(args["max_batch_size"] or _BATCH, _BATCH),
        "max_seq_len": args["max_seq_len"],
        "kv_block_size": block,
        "kv_cache_blocks": kv["max_tokens"] // block if kv.get("max_tokens") else None,
        "max_queue": 1 << 30,
        "enable_prefix_caching": False,  # blocks that requests share are counted once
    }
    return {name: value for name, value in chosen.items() if value is not None}
