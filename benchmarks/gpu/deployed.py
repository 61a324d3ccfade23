"""The two things that are measured, each at a URL: a deployment of ours under the launcher, and vLLM's own server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.scrape import fetch
from benchmarks.chaos.servers import free_port
from benchmarks.gpu.machine import wait_free
from benchmarks.gpu.plan import ENVIRONMENT, MODEL_NAME, Plan, server_arguments
from benchmarks.launched import NAME_VARIABLE, Launched, NotServing
from dynamo_trtllm.children.spawn import spawn

_STOP_S = 30.0


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
            "restart": {"max_restarts": 20, "window_s": 60},
            "ready_timeout_s": self._plan.ready_s,
        }

    def start(self) -> None:
        wait_free({gpu for worker in self._workers if worker["devices"] != "cpu" for gpu in worker["devices"]})
        begun_s = time.monotonic()
        try:
            super().start()
        finally:
            self.started_s = time.monotonic() - begun_s


class VllmServer:
    """vLLM's OpenAI-compatible server on some of the GPUs. Start it from the main thread, and always `stop` it."""

    def __init__(self, plan: Plan, half: int, log: Path, more: Sequence[str] = ()) -> None:
        self._plan = plan
        self._half = half
        self._log = log
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self.lines: list[str] = []
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.started_s = 0.0

    def begin(self) -> None:
        """Returns at once; `wait` blocks until it serves."""
        from dynamo_trtllm.render.vocabulary import o200k_ranks_path

        wait_free(self._plan.halves[self._half])
        gpus = ",".join(str(gpu) for gpu in self._plan.halves[self._half])
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        env |= ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": gpus, "TIKTOKEN_ENCODINGS_BASE": str(o200k_ranks_path().parent)}
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *server_arguments(self._plan, self._port)]
        self._process = spawn([*argv, *self._more], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._begun_s = time.monotonic()
        threading.Thread(target=self._read, args=(self._process,), name="vllm-server-log", daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with process.stdout as output, self._log.open("w") as log:
            for raw in output:
                self.lines.append(raw.decode(errors="replace").rstrip())
                log.write(self.lines[-1] + "\n")
                log.flush()

    def wait(self) -> None:
        """Raises NotServing with the end of its log."""
        assert self._process is not None
        while True:
            if self._process.poll() is not None:
                raise NotServing("\n".join(["vLLM's server ended", *self.lines[-30:]]))
            try:
                fetch(f"{self.url}/health")
                break
            except OSError as exc:
                if time.monotonic() - self._begun_s > self._plan.ready_s:
                    raise NotServing("\n".join([f"vLLM's server: {exc}", *self.lines[-30:]])) from exc
            time.sleep(0.2)
        self.started_s = time.monotonic() - self._begun_s

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, to it and what it has started."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
