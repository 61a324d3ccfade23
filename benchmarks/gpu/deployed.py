"""What is measured: a deployment of ours under the launcher, at a URL."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import wait_free
from benchmarks.gpu.plan import MODEL_NAME, Plan
from benchmarks.launched import NAME_VARIABLE, Launched


class Deployed(Launched):
    """These workers, a frontend, etcd and NATS. `start` blocks until all serve."""

    def __init__(self, plan: Plan, workers: Sequence[dict[str, Any]], log: Path | None = None) -> None:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        names = [worker["name"] for worker in workers]
        super().__init__(workers=names, model=MODEL_NAME, ready_s=plan.ready_s, log=log)
        self._plan = plan
        self._workers = workers
        self.started_s: float = 0.0

    def description(self) -> dict[str, Any]:
        named = [worker | {"env": worker["env"] | {NAME_VARIABLE: worker["name"]}} for worker in self._workers]
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": {"http-host": "127.0.0.1", "http-port": self.http_port, "canary-timeout-s": 30},
            "workers": named,
            "restart": {"max_restarts": 2, "window_s": 600},
            "ready_timeout_s": self._plan.ready_s,
        }

    def start(self) -> None:
        wait_free({gpu for worker in self._workers if worker["devices"] != "cpu" for gpu in worker["devices"]})
        begun_s = time.monotonic()
        try:
            super().start()
        finally:
            self.started_s = time.monotonic() - begun_s


_PHASES = {
    "imports, until the engine begins": r"Initializing a V1 LLM engine",
    "weights loaded": r"(?:Loading weights took|Model loading took)",
    "torch.compile": r"torch\.compile (?:takes|took)",
    "KV cache sized": r"GPU KV cache size",
    "CUDA graphs captured": r"Graph capturing finished",
    "engine ready": r"init engine .* took",
}


def phases(lines: Sequence[str]) -> dict[str, str]:
    """What vLLM says of its own start, by phase: the last line of each."""
    found = {}
    for line in lines:
        for name, pattern in _PHASES.items():
            if match := re.search(rf"{pattern}.*", line):
                found[name] = match[0][:160]
    return found
