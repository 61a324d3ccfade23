"""Starts this project's frontend, and prefill and decode workers with a simulated engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from .points import IDLE_STEP_S
from .stack import HOST, MODEL

_KV_BLOCKS = 1 << 20
_SLOTS = 4096


class Ours:
    """This project as a `Recipe`. Its engine makes one Harmony token per step and stream.

    By default, workers run a simulated library behind the runner that vLLM and TensorRT-LLM use;
    see `runner_worker`. With `uses_mock`, they run the mock engine, which commits without that
    runner have, too. `num_frontends` processes share the frontend's port.
    """

    python = sys.executable
    framing_tokens = 3  # <|channel|>final<|message|>

    def __init__(
        self, checkout: Path | None = None, *, uses_mock: bool = False, num_frontends: int = 1
    ) -> None:
        """Use this checkout. `checkout` is a folder with another commit to use instead."""
        self._worker_module = "dynamo_trtllm" if uses_mock else f"{__package__}.runner_worker"
        self.name = "ours" if checkout is None else "beside"
        if num_frontends > 1:
            self.name += f" x{num_frontends}"
        self._num_frontends = num_frontends
        self._checkout = checkout

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        servers = {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
        if self._checkout is None:
            return servers
        # `python -m` looks in the working directory first, which may be this checkout
        return servers | {"PYTHONPATH": str(self._checkout), "PYTHONSAFEPATH": "1"}

    def frontend(self, port: int) -> Sequence[str]:
        processes = ("--workers", str(self._num_frontends))
        return (
            "-m",
            "dynamo_trtllm.frontend",
            "--http-host",
            HOST,
            "--http-port",
            str(port),
            *processes,
        )

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        # The prompt of an idle stream takes no time; only its decode worker waits
        step_s = 0.0 if pace_s == IDLE_STEP_S and role == "prefill" else pace_s
        engine = {"step_s": step_s, "max_batch_size": _SLOTS, "kv_cache_blocks": _KV_BLOCKS}
        engine["prefill_tokens_per_step"] = 1 << 20
        flags = ("--engine", "mock", "--model", MODEL, "--served-model-name", MODEL)
        arguments = ("--override-engine-args", orjson.dumps(engine).decode())
        return ("-m", self._worker_module, *flags, "--disaggregation-mode", role, *arguments)
