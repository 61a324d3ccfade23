"""A deployment of real processes under the launcher, driven from outside: started, signaled, asked over HTTP, ended.

It knows each process by name; it judges nothing. What runs in it is a subclass' to say.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.chaos.scrape import fetch, gauges, total
from benchmarks.chaos.servers import Server
from dynamo_trtllm.subprocesses.child import scratch_folder, spawn
from dynamo_trtllm.subprocesses.ports import free_ports

FRONTEND = "frontend"
NAME_VARIABLE = "CHAOS_PROCESS"
_MARKS = {"dynamo_trtllm.frontend": FRONTEND, "bin/etcd": "etcd", "bin/nats-server": "nats"}  # in a command line
_HELD = ("running", "waiting", "kv_blocks_used", "tickets_held", "ticket_kv_blocks", "legs", "reserved")
_HELD_BY_FRONTEND = ("inflight", "choices", "queued", "body_bytes")
_STOP_S = 45.0


class NotServing(Exception):
    """A deployment that does not come up, or back."""


class Launched(ABC):
    """Start it from the main thread, and always `stop` it. All its processes die with this one.

    `workers`: their names, with NAME_VARIABLE in the environment of each. `is_alone`: etcd and NATS are the launcher's.
    `log`: a file that gets all that the launcher writes, as it comes.
    """

    def __init__(
        self, *, workers: Sequence[str], model: str, ready_s: float, is_alone: bool = False, log: Path | None = None
    ) -> None:
        self.workers = tuple(workers)
        self.model = model
        self.namespace = f"bench-{secrets.token_hex(4)}"
        self.url = f"http://127.0.0.1:{free_ports()}"
        self.servers: dict[str, Server] = {}
        self.lines: list[str] = []  # all that the launcher wrote
        self._ready_s = ready_s
        self._is_alone = is_alone
        self._log = log
        self._exit = ExitStack()
        self._folder = self._exit.enter_context(scratch_folder("dynamo-bench-"))
        self._instances: dict[str, str] = {}
        self._health: dict[str, str] = {}
        self._seen: dict[int, psutil.Process] = {}
        self._launcher: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What the launcher's file says. Asked once, when etcd and NATS run."""

    def _start_nats(self, folder: Path) -> Server:
        """Start the NATS server that the launcher's file names."""
        return Server("nats", folder / "n")

    def services(self) -> dict[str, str]:
        """Of the launcher's file: the servers that run."""
        found = {kind: server.address for kind, server in self.servers.items()}
        return found | {"etcd": f"http://{found['etcd']}"} if found else {}

    @property
    def http_port(self) -> int:
        return int(self.url.rpartition(":")[2])

    # --- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when all serve. Raises NotServing with the end of the log."""
        if not self._is_alone:
            self.servers = {"etcd": Server("etcd", self._folder / "e"), "nats": self._start_nats(self._folder)}
        (self._folder / "tmp").mkdir()
        file = self._folder / "deployment.yaml"
        file.write_bytes(orjson.dumps(self.description()))  # JSON is YAML
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        env |= {"TMPDIR": str(self._folder / "tmp"), "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-m", "dynamo_trtllm.launch", str(file)]
        self._launcher = spawn(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self._read, args=(self._launcher,), name="launcher-log", daemon=True).start()
        self.wait_whole(self._ready_s)

    def stop(self) -> list[str]:
        """Ends everything. What outlived the launcher, or lies in its temporary folder, one line each."""
        launcher = self._launcher
        left: list[str] = []
        if launcher is not None:
            self.note_processes()
            self.resume_all()
            launcher.send_signal(signal.SIGCONT)
            launcher.terminate()
            try:
                launcher.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                left.append(f"the launcher did not end within {_STOP_S:g} s of SIGTERM")
                launcher.kill()
                launcher.wait()
            left += self.left_over()
        for server in self.servers.values():
            server.close()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        self._exit.close()
        return left

    def left_over(self, within_s: float = 5.0) -> list[str]:
        """Once the launcher has ended: processes and files that stayed after it."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=within_s)
        left = [f"process {process.pid} lives on" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        files = [path for path in (self._folder / "tmp").rglob("*") if path.is_file()]
        return left + [f"file {path.relative_to(self._folder)} was left" for path in files]

    def _read(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        with launcher.stdout as output, open(self._log or os.devnull, "w", encoding="utf-8") as log:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                log.write(line + "\n")
                log.flush()
                name, _, text = line.partition("|")
                self._take(name.strip(), text.strip())

    def _take(self, name: str, text: str) -> None:
        if found := re.search(r"health at http://localhost:(\d+)", text):
            self._health[name] = f"http://127.0.0.1:{found[1]}"
        elif name != "launch":
            return
        elif found := re.match(r"(\S+) is ready after .* as instance ([0-9a-f]+)", text):
            self._instances[found[1]] = found[2]
        elif found := re.match(r"(\S+) (?:was killed|exited)", text):
            self._instances.pop(found[1], None)
            self._health.pop(found[1], None)

    # --- processes -------------------------------------------------------------------------------------

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """The launcher and what it has started, by name."""
        if self._launcher is None or self._launcher.poll() is not None:
            return
        launcher = psutil.Process(self._launcher.pid)
        yield "launcher", launcher
        for child in launcher.children(recursive=True):
            try:
                name = child.environ().get(NAME_VARIABLE)
                words = " ".join(child.cmdline())
            except psutil.Error:  # it has just ended
                continue
            if name is None:
                name = next((name for mark, name in _MARKS.items() if mark in words), "another")
            self._seen[child.pid] = child
            yield name, child

    def note_processes(self) -> None:
        """Remembers all that runs now, for the judgment of what is left."""
        for _ in self.processes():
            pass

    def process(self, name: str) -> psutil.Process:
        """The launcher, a worker or the frontend. Raises NotServing when there is none of the name."""
        for found, process in self.processes():
            if found == name:
                return process
        raise NotServing(f"no process {name} runs")

    def send(self, name: str, number: signal.Signals) -> None:
        """Raises as `process`."""
        self.process(name).send_signal(number)

    def resume_all(self) -> None:
        """Whatever a fault has frozen goes on."""
        for _, process in self.processes():
            process.send_signal(signal.SIGCONT)
        for server in self.servers.values():
            server.send(signal.SIGCONT)

    def wait_launcher(self, timeout_s: float) -> bool:
        """Whether the launcher has ended in time."""
        assert self._launcher is not None
        try:
            self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    # --- state -----------------------------------------------------------------------------------------

    def health_url(self, name: str) -> str:
        """Return the root of a worker's health and metrics, or "" when it has none yet."""
        return self._health.get(name, "")

    def instance(self, name: str) -> str | None:
        """A worker's id in hexadecimal, while it serves."""
        return self._instances.get(name)

    def wait_whole(self, timeout_s: float) -> None:
        """Until all serve and the frontend knows exactly them. Raises NotServing saying what is missing."""
        until = time.monotonic() + timeout_s
        while lacking := self._lacking():
            if time.monotonic() > until:
                raise NotServing("\n".join([f"not whole within {timeout_s:g} s: {lacking}", *self.lines[-30:]]))
            time.sleep(0.05)

    def _lacking(self) -> str:
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            raise NotServing("\n".join(["the launcher ended", *self.lines[-30:]]))
        missing = [name for name in self.workers if name not in self._instances]
        if missing:
            return f"{', '.join(missing)} not serving"
        try:
            health = orjson.loads(fetch(f"{self.url}/health"))
            fetch(f"{self.url}/v1/models/{self.model}/ready")
        except OSError as exc:
            return f"the frontend: {exc}"
        known = {instance["instance_id"] for instance in health["instances"]}
        wanted = {int(instance, 16) for instance in self._instances.values()}
        if known != wanted:
            return f"the frontend knows {len(known)} instances, {len(known & wanted)} of them living"
        return ""

    def held(self) -> list[str]:
        """What requests hold at this moment, one line each."""
        where: list[tuple[str, str, Sequence[str]]] = [
            (name, self._health.get(name, ""), _HELD) for name in self.workers
        ]
        where.append((FRONTEND, self.url, _HELD_BY_FRONTEND))
        found = []
        for name, url, keys in where:
            numbers = gauges(url)
            found += [f"{name} {key} {numbers[key]:g}" for key in keys if numbers.get(key)]
        return found

    def total(self, counter: str) -> float:
        """Of one of the frontend's counters, over all its labels."""
        return total(self.url, counter)

    def worker_total(self, name: str, counter: str, label: str = "") -> float:
        """Return the sum of one of a worker's counters over its labels, see `scrape.total`. Raise OSError."""
        return total(self._health.get(name, ""), counter, label)

    def kv_share(self, name: str) -> float:
        """Of a worker's KV blocks that are in use."""
        numbers = gauges(self._health.get(name, ""))
        return numbers.get("kv_blocks_used", 0.0) / numbers.get("kv_blocks_total", 1.0)
