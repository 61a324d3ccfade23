"""A deployment of real processes under the launcher, for chaos runs and GPU benchmarks.

Starts and stops it, signals its processes by name, and reads their state over HTTP. A subclass
defines the workers.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.support.subprocesses import module_command, scratch_folder, spawn

from .scrape import fetch, gauges, total
from .servers import Server

# Imported only where it is used, so that `chaos --list` needs no extra.
if TYPE_CHECKING:
    import psutil

FRONTEND = "frontend"
PLANNER = "planner"
NAME_VARIABLE = "CHAOS_PROCESS"
# The name of a process by a text in its command line.
_COMMANDS = {
    "dynamo_trtllm.frontend": FRONTEND,
    "dynamo_trtllm.planner": PLANNER,
    "bin/etcd": "etcd",
    "bin/nats-server": "nats",
}
# Gauges that are 0 when no request holds anything: of workers, and of frontends.
_HELD = (
    "running",
    "waiting",
    "kv_blocks_used",
    "pending_kv_transfers",
    "pending_kv_blocks",
    "active_calls",
    "reserved",
)
_HELD_BY_FRONTEND = ("inflight", "choices", "queued", "body_bytes")
_STOP_S = 45.0  # the longest wait for the launcher after SIGTERM


class NotReady(Exception):
    """A deployment or server did not become ready, or did not recover."""


class LaunchedDeployment(ABC):
    """A deployment under the launcher. Start it from the main thread and always call `stop`.

    All its processes end with this one.

    Args:
        workers: names of the workers. Each worker must have its name in NAME_VARIABLE of its
            environment.
        model: served model name.
        ready_s: longest wait in `start`, in seconds.
        starts_servers: the launcher starts its own etcd and NATS servers.
        log: file for the output of the launcher.
    """

    def __init__(
        self,
        *,
        workers: Sequence[str],
        model: str,
        ready_s: float,
        starts_servers: bool = False,
        log: Path | None = None,
    ) -> None:
        self.workers = tuple(workers)
        self.model = model
        self.namespace = f"bench-{secrets.token_hex(4)}"
        self.url = f"http://127.0.0.1:{free_ports()}"
        self.servers: dict[str, Server] = {}
        self.lines: list[str] = []  # output of the launcher
        self._ready_s = ready_s
        self._starts_servers = starts_servers
        self._log = log
        self._exit = ExitStack()
        self._folder = self._exit.enter_context(scratch_folder("dynamo-bench-"))
        self._instances: dict[str, str] = {}  # instance ids of ready workers, by name
        self._health: dict[str, str] = {}  # URLs of health and metrics, by name of the worker
        self._seen: dict[int, psutil.Process] = {}  # all processes so far, by process id
        self._launcher: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Return the content of the launcher's file.

        Called once, after etcd and NATS have started.
        """

    def _start_nats(self, folder: Path) -> Server:
        """Start the NATS server for the launcher's file."""
        return Server("nats", folder / "n")

    def services(self) -> dict[str, str]:
        """Return the addresses of the running servers for the launcher's file."""
        addresses = {kind: server.address for kind, server in self.servers.items()}
        return addresses | {"etcd": f"http://{addresses['etcd']}"} if addresses else {}

    @property
    def http_port(self) -> int:
        return int(self.url.rpartition(":")[2])

    # --- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raise NotReady with the end of the log.
        """
        if not self._starts_servers:
            self.servers = {
                "etcd": Server("etcd", self._folder / "e"),
                "nats": self._start_nats(self._folder),
            }
        (self._folder / "tmp").mkdir()
        file = self._folder / "deployment.yaml"
        file.write_bytes(orjson.dumps(self.description()))  # JSON is YAML
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        env |= {"TMPDIR": str(self._folder / "tmp"), "PYTHONUNBUFFERED": "1"}
        argv = module_command("dynamo_trtllm.launch", str(file))
        self._launcher = spawn(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(
            target=self._read, args=(self._launcher,), name="launcher-log", daemon=True
        ).start()
        self.wait_ready(self._ready_s)

    def stop(self) -> list[str]:
        """Stop everything.

        Return a line for each process and temporary file that the launcher left.
        """
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
                left.append(f"the launcher did not exit within {_STOP_S:g} s of SIGTERM")
                launcher.kill()
                launcher.wait()
            left += self.leftovers()
        for server in self.servers.values():
            server.close()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        self._exit.close()
        return left

    def leftovers(self, within_s: float = 5.0) -> list[str]:
        """Return the processes and files that remain after the launcher has ended."""
        import psutil

        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=within_s)
        left = [
            f"process {process.pid} still runs"
            for process in alive
            if process.status() != psutil.STATUS_ZOMBIE
        ]
        files = [path for path in (self._folder / "tmp").rglob("*") if path.is_file()]
        return left + [f"file {path.relative_to(self._folder)} remains" for path in files]

    def _read(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        with launcher.stdout as output, open(self._log or os.devnull, "w", encoding="utf-8") as log:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self.lines.append(line)
                log.write(line + "\n")
                log.flush()
                name, _, text = line.partition("|")
                self._parse(name.strip(), text.strip())

    def _parse(self, name: str, text: str) -> None:
        """Update the state from a log line."""
        if match := re.search(r"health at http://localhost:(\d+)", text):
            self._health[name] = f"http://127.0.0.1:{match[1]}"
        elif name != "launch":
            return
        elif match := re.match(r"(\S+) is ready after .* as instance ([0-9a-f]+)", text):
            self._instances[match[1]] = match[2]
        elif match := re.match(r"(\S+) (?:was killed|exited)", text):
            self._instances.pop(match[1], None)
            self._health.pop(match[1], None)

    # --- processes --------------------------------------------------------------------------------

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield the name and process of the launcher and all its descendants."""
        import psutil

        if self._launcher is None or self._launcher.poll() is not None:
            return
        launcher = psutil.Process(self._launcher.pid)
        yield "launcher", launcher
        for child in launcher.children(recursive=True):
            try:
                name = child.environ().get(NAME_VARIABLE)
                command = " ".join(child.cmdline())
            except psutil.Error:  # it has just ended
                continue
            if name is None:
                name = next((name for text, name in _COMMANDS.items() if text in command), "other")
            self._seen[child.pid] = child
            yield name, child

    def note_processes(self) -> None:
        """Record all running processes, for the later check for leftovers."""
        for _ in self.processes():
            pass

    def process(self, name: str) -> psutil.Process:
        """Return the launcher, the frontend or a worker by name.

        Raise NotReady if it does not run.
        """
        for other, process in self.processes():
            if other == name:
                return process
        raise NotReady(f"process {name} does not run")

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process. Raise NotReady if it does not run."""
        self.process(name).send_signal(number)

    def resume_all(self) -> None:
        """Send SIGCONT to all processes and servers."""
        for _, process in self.processes():
            process.send_signal(signal.SIGCONT)
        for server in self.servers.values():
            server.send(signal.SIGCONT)

    def wait_launcher(self, timeout_s: float) -> bool:
        """Wait for the launcher to end. Return whether it did within the timeout."""
        assert self._launcher is not None
        try:
            self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    # --- state ------------------------------------------------------------------------------------

    def health_url(self, name: str) -> str:
        """Return the URL of a worker's health and metrics, or "" if it is not known yet."""
        return self._health.get(name, "")

    def instance(self, name: str) -> str | None:
        """Return the instance id of a ready worker, in hexadecimal.

        None if the worker is not ready.
        """
        return self._instances.get(name)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until all workers are ready and the frontend lists exactly these.

        Raise NotReady with the reason.
        """
        until = time.monotonic() + timeout_s
        while reason := self._not_ready_reason():
            if time.monotonic() > until:
                raise NotReady(
                    "\n".join([f"not ready within {timeout_s:g} s: {reason}", *self.lines[-30:]])
                )
            time.sleep(0.05)

    def _not_ready_reason(self) -> str:
        """Return why the deployment is not ready; "" if it is. Raise NotReady if it can't be."""
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            raise NotReady("\n".join(["the launcher exited", *self.lines[-30:]]))
        missing = [name for name in self.workers if name not in self._instances]
        if missing:
            return f"{', '.join(missing)} not ready"
        try:
            health = orjson.loads(fetch(f"{self.url}/health"))
            fetch(f"{self.url}/v1/models/{self.model}/ready")
        except OSError as exc:
            return f"frontend: {exc}"
        listed = {instance["instance_id"] for instance in health["instances"]}
        running = {int(instance, 16) for instance in self._instances.values()}
        if listed != running:
            return (
                f"the frontend lists {len(listed)} instances, {len(listed & running)} of which run"
            )
        return ""

    def held(self) -> list[str]:
        """Return the resources that requests hold now, one line each."""
        processes: list[tuple[str, str, Sequence[str]]] = [
            (name, self._health.get(name, ""), _HELD) for name in self.workers
        ]
        processes.append((FRONTEND, self.url, _HELD_BY_FRONTEND))
        held = []
        for name, url, resources in processes:
            numbers = gauges(url)
            held += [f"{name} {key} {numbers[key]:g}" for key in resources if numbers.get(key)]
        return held

    def total(self, counter: str) -> float:
        """Return the sum of one of the frontend's counters over all labels."""
        return total(self.url, counter)

    def worker_total(self, name: str, counter: str, label: str = "") -> float:
        """Return the sum of one of a worker's counters, see `scrape.total`. Raise OSError."""
        return total(self._health.get(name, ""), counter, label)

    def kv_share(self, name: str) -> float:
        """Return the share of a worker's KV blocks that are in use."""
        numbers = gauges(self._health.get(name, ""))
        return numbers.get("kv_blocks_used", 0.0) / numbers.get("kv_blocks_total", 1.0)
