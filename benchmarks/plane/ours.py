"""How this project's processes are started: its frontend and its mock engine as a prefill and a decode worker."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from benchmarks.plane.points import IDLE_STEP_S
from benchmarks.plane.stack import HOST, MODEL

_KV_BLOCKS = 1 << 20
_SLOTS = 4096


class Ours:
    """A `Recipe`. The mock engine makes Harmony tokens, one a step and stream."""

    python = sys.executable
    framing_tokens = 3  # <|channel|>final<|message|>

    def __init__(self, checkout: Path | None = None) -> None:
        """`checkout`: folder of another commit, whose package runs instead."""
        self.name = "ours" if checkout is None else "beside"
        self._checkout = checkout

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        servers = {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats}
        if self._checkout is None:
            return servers
        # the working directory, from which `python -m` takes a package first, may be this checkout
        return servers | {"PYTHONPATH": str(self._checkout), "PYTHONSAFEPATH": "1"}

    def frontend(self, port: int) -> Sequence[str]:
        return ("-m", "dynamo_trtllm.frontend", "--http-host", HOST, "--http-port", str(port))

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        # A prompt of an idle stream is read at once: only then it waits for ever
        step_s = 0.0 if pace_s == IDLE_STEP_S and role == "prefill" else pace_s
        engine = {"step_s": step_s, "max_batch_size": _SLOTS, "kv_cache_blocks": _KV_BLOCKS}
        engine["prefill_tokens_per_step"] = 1 << 20
        flags = ("--engine", "mock", "--model", MODEL, "--served-model-name", MODEL)
        arguments = ("--override-engine-args", orjson.dumps(engine).decode())
        return ("-m", "dynamo_trtllm", *flags, "--disaggregation-mode", role, *arguments)
