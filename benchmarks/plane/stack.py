"""Runs a frontend with its workers, etcd and NATS as processes that end with this one, for any
product.
"""

from __future__ import annotations

import math
import os
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import product
from pathlib import Path
from threading import Thread
from typing import NamedTuple, Protocol

import orjson
import psutil

from dynamo_trtllm.launch.local_servers import LocalServer, start_etcd, start_nats
from dynamo_trtllm.support.subprocesses import scratch_folder, spawn

from ..blocking import wait_for
from ..credentials import VARIABLE, api_key_headers
from .points import Engines

MODEL = "openai/gpt-oss-120b"
HOST = "127.0.0.1"
_READY_S = 120.0
_STOP_S = 10.0
_IDLE_S = 20.0  # longest wait
_IDLE_CORES = 0.2
_PAUSE_S = 0.5


class Certificate(NamedTuple):
    """The files of a certificate that signs itself: clients trust it as their only CA."""

    certificate: Path
    key: Path


class NotReady(Exception):
    """A process exited, or a chat request got no answer."""


class Recipe(Protocol):
    """The commands of a product."""

    name: str
    python: str
    framing_tokens: int  # tokens per answer that become no text
    api_key: str  # for the clients; "": they need none
    certificate: Certificate | None  # TLS of the frontend; None: it has none
    num_consoles: int  # open pages of the console of our frontend

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        """Return environment variables for all processes."""
        ...

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        """Return the arguments of `python` for the frontend of workers with this step time."""
        ...

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        """Return the arguments of `python` for a worker with this step time; none: no worker."""
        ...


class Stack:
    """The processes of a product, as a context manager. Use it from the main thread."""

    def __init__(self, recipe: Recipe, port: int, engines: Engines) -> None:
        self.name = recipe.name
        self.framing_tokens = recipe.framing_tokens
        self.client_env = os.environ | {VARIABLE: recipe.api_key}
        scheme = "http"
        if recipe.certificate is not None:
            scheme = "https"
            # The clients trust this certificate and no other.
            self.client_env |= {"SSL_CERT_FILE": str(recipe.certificate.certificate)}
        self.url = f"{scheme}://{HOST}:{port}"
        self._recipe = recipe
        self._port = port
        self._engines = engines
        self._exit = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._servers: dict[str, LocalServer] = {}

    @property
    def pids(self) -> dict[str, int]:
        servers = {name: server.pid for name, server in self._servers.items()}
        return {name: process.pid for name, process in self._processes.items()} | servers

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _start(self) -> None:
        folder = self._exit.enter_context(scratch_folder("dynamo-plane-"))
        for name, start in (("etcd", start_etcd), ("nats", start_nats)):
            server = self._servers[name] = wait_for(start(folder / name))
            self._exit.callback(_stop_server, server)
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        env |= self._recipe.env(
            f"http://{self._servers['etcd'].address}", self._servers["nats"].address
        )
        pace_s = self._engines.pace_s
        commands = {"frontend": self._recipe.frontend(self._port, pace_s)}
        for role, number in product(("prefill", "decode"), range(self._engines.pairs)):
            name = f"{role}-{number + 1}" if number else role
            worker = self._recipe.worker(role, pace_s)
            if worker:
                commands[name] = worker
        self._exit.callback(self._stop)
        for name, arguments in commands.items():
            log = self._exit.enter_context((folder / f"{name}.log").open("wb"))
            argv = [self._recipe.python, *arguments]
            self._processes[name] = spawn(argv, env=env, stdout=log, stderr=subprocess.STDOUT)
        self._wait_chat(folder)
        for _ in range(self._recipe.num_consoles):
            self._open_console()
        self._wait_idle()

    def _wait_chat(self, folder: Path) -> None:
        # long, so that this project's frontend begins to load the tokenizer of long texts now
        messages = [{"role": "user", "content": "hi " * 1000}]
        body = orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 2})
        until = time.monotonic() + _READY_S
        while time.monotonic() < until:
            ended = [
                name for name, process in self._processes.items() if process.poll() is not None
            ]
            if ended:
                raise NotReady(
                    f"{self.name}: {ended[0]} exited:\n{_tail(folder / f'{ended[0]}.log')}"
                )
            headers = api_key_headers(self._recipe.api_key)
            headers["Content-Type"] = "application/json"
            request = urllib.request.Request(f"{self.url}/v1/chat/completions", body, headers)
            try:
                with urllib.request.urlopen(request, timeout=130, context=self._tls()):
                    return
            except OSError:
                time.sleep(0.1)
        tails = "\n".join(f"{name}: {_tail(folder / f'{name}.log')}" for name in self._processes)
        raise NotReady(f"{self.name}: no chat request succeeded within {_READY_S:g} s\n{tails}")

    def _tls(self) -> ssl.SSLContext | None:
        """Return the context with which this process trusts the frontend; None: it has no TLS."""
        if self._recipe.certificate is None:
            return None
        return ssl.create_default_context(cafile=str(self._recipe.certificate.certificate))

    def _open_console(self) -> None:
        """Read the events of the console until the frontend ends, in a thread of its own."""
        connection = HTTPConnection(HOST, self._port, timeout=_READY_S)
        connection.request("GET", "/console/events", headers=api_key_headers(self._recipe.api_key))
        response = connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise NotReady(f"{self.name}: the console answers with status {response.status}")
        Thread(target=_read_all, args=(response,), daemon=True).start()

    def _wait_idle(self) -> None:
        """Wait until the processes use little CPU time, because a tokenizer may be loading beside
        the first request.
        """
        until = time.monotonic() + _IDLE_S
        spent_s = math.inf
        while spent_s > _IDLE_CORES * _PAUSE_S and time.monotonic() < until:
            begun_s = self._cpu_s()
            time.sleep(_PAUSE_S)
            spent_s = self._cpu_s() - begun_s

    def _cpu_s(self) -> float:
        """Return the CPU time of all processes and their children so far."""
        roots = [psutil.Process(pid) for pid in self.pids.values()]
        times = [
            process.cpu_times()
            for root in roots
            for process in (root, *root.children(recursive=True))
        ]
        return float(sum(used.user + used.system for used in times))

    def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + _STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_all(response: HTTPResponse) -> None:
    with suppress(OSError, HTTPException):
        while response.read1():
            pass


def _stop_server(server: LocalServer) -> None:
    wait_for(server.stop())


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
