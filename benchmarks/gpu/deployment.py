"""The measured deployment: workers, a frontend, etcd and NATS under the launcher."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..deployment import NAME_VARIABLE, LaunchedDeployment
from .machine import wait_free
from .plan import MODEL_NAME, Plan


class GpuDeployment(LaunchedDeployment):
    """A deployment with these workers. `start` blocks until all processes are ready.

    `frontend` are further settings of the frontend.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[dict[str, Any]],
        log: Path | None = None,
        frontend: Mapping[str, Any] = {},
    ) -> None:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        names = [worker["name"] for worker in workers]
        super().__init__(workers=names, model=MODEL_NAME, ready_s=plan.ready_s, log=log)
        self._plan = plan
        self._workers = workers
        self._frontend = frontend
        self.started_s: float = 0.0

    def description(self) -> dict[str, Any]:
        workers = [
            worker | {"env": worker["env"] | {NAME_VARIABLE: worker["name"]}}
            for worker in self._workers
        ]
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": {
                "http-host": "127.0.0.1",
                "http-port": self.http_port,
                "probe-timeout-s": 30,
                **self._frontend,
            },
            "workers": workers,
            "restart": {"max_restarts": 2, "window_s": 600},
            "ready_timeout_s": self._plan.ready_s,
        }

    def start(self) -> None:
        wait_free(
            {
                gpu
                for worker in self._workers
                if worker["devices"] != "cpu"
                for gpu in worker["devices"]
            }
        )
        begun_s = time.monotonic()
        try:
            super().start()
        finally:
            self.started_s = time.monotonic() - begun_s


_PHASES = {
    "imports, until the engine starts": r"Initializing a V1 LLM engine",
    "weights loaded": r"(?:Loading weights took|Model loading took)",
    "torch.compile": r"torch\.compile (?:takes|took)",
    "KV cache sized": r"GPU KV cache size",
    "CUDA graphs captured": r"Graph capturing finished",
    "engine ready": r"init engine .* took",
}


def phases(lines: Sequence[str]) -> dict[str, str]:
    """Return the last log line of each start-up phase of vLLM, by phase."""
    found = {}
    for line in lines:
        for name, pattern in _PHASES.items():
            if match := re.search(rf"{pattern}.*", line):
                found[name] = match[0][:160]
    return found
