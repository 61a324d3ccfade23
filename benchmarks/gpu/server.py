"""Runs vLLM's own server as a child process, for comparison."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.support.subprocesses import spawn

from ..deployment import NotReady
from ..scrape import fetch
from .plan import ENVIRONMENT, Plan, server_arguments

_STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`python -m module argv`, which listens on `port` and answers `GET /health`."""

    module: str
    argv: Sequence[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's environment
    ready_s: float = 30.0


class Server:
    """One server.

    Call `begin` from the main thread and always call `stop`. It ends with this process.
    """

    def __init__(self, command: Command, log: Path, lines: list[str] | None = None) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_s = 0.0
        # of the log, or of the logs of several servers
        self.lines: list[str] = [] if lines is None else lines
        self.url = f"http://127.0.0.1:{command.port}"
        self.started_s = 0.0

    def begin(self) -> None:
        """Start it. `wait` blocks until it is ready."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("DYN_")
        }
        argv = [sys.executable, "-m", self._command.module, *self._command.argv]
        env = inherited | dict(self._command.env)
        self._process = spawn(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._begun_s = time.monotonic()
        threading.Thread(
            target=self._read, args=(self._process,), name="server-log", daemon=True
        ).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with process.stdout as output, self._log.open("w") as log:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                log.write(line + "\n")
                log.flush()

    def wait(self) -> None:
        """Wait until the server is ready. Raise NotReady with the end of its log."""
        assert self._process is not None
        while reason := self._not_ready_reason():
            has_ended = self._process.poll() is not None
            if has_ended or time.monotonic() - self._begun_s > self._command.ready_s:
                reason = "the process exited" if has_ended else reason
                raise NotReady("\n".join([f"{self._command.module}: {reason}", *self.lines[-30:]]))
            time.sleep(0.2)
        self.started_s = time.monotonic() - self._begun_s

    def _not_ready_reason(self) -> str:
        try:
            fetch(f"{self.url}/health")
        except OSError as exc:
            return str(exc)
        return ""

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after a timeout. Idempotent."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def vllm_server(
    plan: Plan,
    gpus: Sequence[int],
    log: Path,
    more: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    lines: list[str] | None = None,
) -> Server:
    """Return vLLM's OpenAI-compatible server.

    Args:
        plan: engine arguments and model.
        gpus: that it uses; none: the CPU.
        log: file for the output.
        more: arguments in addition to those of the plan.
        env: environment variables in addition to those of the plan.
        lines: list for the output of several servers.
    """
    from dynamo_trtllm.engines.warm_up import cache_folders
    from dynamo_trtllm.models.vocabulary import o200k_ranks_path

    port = free_ports()
    own = {"TIKTOKEN_ENCODINGS_BASE": str(o200k_ranks_path().parent)}  # avoids a download
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    if plan.compile_cache is not None:  # the folders that our workers use
        root = Path(plan.compile_cache)
        own |= {"VLLM_CACHE_ROOT": str(root / "vllm"), **cache_folders(root)}
    command = Command(
        module="vllm.entrypoints.openai.api_server",
        argv=[*server_arguments(plan, port, max(1, len(gpus))), *more],
        port=port,
        env=ENVIRONMENT | own | dict(env or {}),
        ready_s=plan.ready_s,
    )
    return Server(command, log, lines)
