"""Registers thousands of workers, sends many requests at once, and reports how each request ended.

    python -m benchmarks.many_workers --workers 2550 --requests 1536

The workers have mock engines and share few processes; half of them are prefill and half decode
workers. etcd, NATS and the frontend are the real processes. Afterwards each request is looked up in
the recordings, as `dynamo-trtllm explain` does. The exit status is 1 if a request failed, hung or
is not explained. It needs no network. On a machine with many cores, all but four of them serve
workers by default; the others are for etcd, NATS, the frontend and the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import httpx
import uvloop

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.observability.recorder import RecordedEvent
from dynamo_trtllm.observability.recordings import Recordings
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.support.background import wait_for_first
from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.support.subprocesses import spawn
from dynamo_trtllm.worker import Worker

from .startup import MODEL, LoggedProcess, http_request, start_servers

log = logging.getLogger(__name__)

_ROLES = (Role.PREFILL, Role.DECODE)
_STARTING = 2  # workers of one process that start at the same time
_OTHER_CORES = 4  # for etcd, NATS, the frontend and the requests
_FEWEST_PROCESSES = 8  # more workers of one process would wait for each other
_PROGRESS_S = 5.0
_RESTART_S = 1.0
# thousands of leases that are renewed every 3 s would be the load that is measured
_LEASE_TTL_S = 60.0


async def serve_workers(role: Role, count: int, folder: Path) -> None:
    """Serve many workers in this process until SIGTERM."""
    turns = asyncio.Semaphore(_STARTING)
    stopped = asyncio.Event()
    workers = dict[int, Worker]()
    registered = _Registered()
    logging.getLogger("dynamo_trtllm.worker.worker").addHandler(registered)

    def stop_all() -> None:
        stopped.set()
        for worker in workers.values():
            worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_all)

    async def serve() -> None:
        """Serve one worker. Start it again if it fails, as a supervisor would."""
        while not stopped.is_set():
            async with turns:
                worker = Worker(_config(role, folder))
                workers[worker.instance_id] = worker
                serving = asyncio.create_task(worker.serve())
                await wait_for_first(
                    registered.event(worker.instance_id).wait(), asyncio.wait([serving])
                )
            try:
                await serving
            except DynamoError as exc:
                log.warning(
                    "worker %x ended, starting another one (%s): %s",
                    worker.instance_id,
                    exc.code,
                    exc.message,
                )
                await wait_for_first(stopped.wait(), timeout_s=_RESTART_S)
            del workers[worker.instance_id]

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(serve())


class _Registered(logging.Handler):
    """The workers of this process that have logged that they serve."""

    def __init__(self) -> None:
        super().__init__()
        self._events: defaultdict[object, asyncio.Event] = defaultdict(asyncio.Event)

    def event(self, instance_id: int) -> asyncio.Event:
        return self._events[instance_id]

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.msg.startswith("serving as instance"):
            self._events[record.args[0]].set()


def _config(role: Role, folder: Path) -> WorkerConfig:
    return WorkerConfig(
        model_path=MODEL,
        engine="mock",
        disaggregation_mode=role,
        etcd_endpoints=os.environ["ETCD_ENDPOINTS"],
        nats_server=os.environ["NATS_SERVER"],
        lease_ttl_s=_LEASE_TTL_S,
        recorder_dir=str(folder),
        override_engine_args={"step_s": 0.02},
    )


async def ask_all(
    port: int, count: int, timeout_s: float
) -> tuple[Counter[str], list[float], list[str]]:
    """Send all requests at once.

    Return their outcomes, the seconds of the complete ones, and their ids.
    """
    outcomes: Counter[str] = Counter()
    seconds = []
    ids = []
    body = {"model": MODEL, "max_tokens": 32, "messages": [{"role": "user", "content": "hello"}]}
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    timeout = httpx.Timeout(None, connect=timeout_s)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=timeout, trust_env=False
    ) as client:

        async def ask(number: int) -> None:
            begun_s = time.monotonic()
            name = f"many-{number}"
            ids.append(name)
            try:
                async with asyncio.timeout(timeout_s):
                    response = await client.post(
                        "/v1/chat/completions", json=body, headers={"x-request-id": name}
                    )
            except TimeoutError:
                outcomes["hung"] += 1
                return
            except httpx.HTTPError as exc:
                outcomes[type(exc).__name__] += 1
                return
            answer = response.json()
            num_tokens = answer.get("usage", {}).get("completion_tokens")
            if response.status_code == 200 and num_tokens == body["max_tokens"]:
                outcomes["complete"] += 1
                seconds.append(time.monotonic() - begun_s)
            else:
                code = answer.get("error", {}).get("code", response.status_code)
                outcomes[str(code)] += 1

        progress = asyncio.create_task(_print_progress(outcomes, count))
        await asyncio.gather(*(ask(number) for number in range(count)))
        progress.cancel()
    return outcomes, seconds, ids


async def _print_progress(outcomes: Counter[str], count: int) -> None:
    begun_s = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_S)
        print(
            f"{outcomes.total()} of {count} requests ended after"
            f" {time.monotonic() - begun_s:.0f} s",
            flush=True,
        )


def explained(folder: Path, ids: list[str]) -> int:
    """Return how many requests have a recording from arrival to end."""
    recordings = Recordings.read(folder)
    count = 0
    for name in ids:
        for request in recordings.find(name):
            events = {step.entry.event for step in request.steps}
            roles = {step.process.kind for step in request.steps}
            is_whole = {RecordedEvent.RECEIVED, RecordedEvent.FINISHED} <= events
            # The frontend has recorded it, and a worker of each role.
            if is_whole and len(roles) == 1 + len(_ROLES):
                count += 1
    return count


def wait_for_workers(port: int, count: int, timeout_s: float) -> float:
    """Wait until the frontend knows all workers.

    Return the seconds that it took. Exit after the time-out.
    """
    begun_s = time.monotonic()
    while True:
        status, text = http_request(port, "GET", "/health")
        known = sum(json.loads(text).get("num_instances", {}).values()) if status else 0
        spent_s = time.monotonic() - begun_s
        print(f"{known} of {count} workers after {spent_s:.0f} s", flush=True)
        if known >= count:
            return spent_s
        if spent_s > timeout_s:
            raise SystemExit(f"timeout after {timeout_s:g} s")
        time.sleep(5.0)


def shares(count: int, processes: int) -> list[int]:
    """Return how many workers each process serves. They differ by at most one."""
    return [count // processes + (number < count % processes) for number in range(processes)]


def run(args: argparse.Namespace, env: Mapping[str, str], folder: Path) -> int:
    """Start everything, measure once and print the result. Return the exit status."""
    port = free_ports()
    frontend = LoggedProcess(
        "dynamo_trtllm.frontend",
        [f"--http-port={port}", f"--recorder-dir={folder}", "--max-inflight=4096"],
        env,
    )
    hosts: list[subprocess.Popen[bytes]] = []
    try:
        for number, count in enumerate(shares(args.workers, args.processes)):
            command = [
                sys.executable,
                "-m",
                __spec__.name,
                "--serve",
                _ROLES[number % 2],
                "--workers",
                str(count),
            ]
            hosts.append(spawn([*command, "--recorder-dir", str(folder)], env=env))
        registered_s = wait_for_workers(port, args.workers, args.start_timeout_s)
        outcomes, seconds, ids = asyncio.run(ask_all(port, args.requests, args.timeout_s))
        print(f"{args.workers} workers in {len(hosts)} processes, known after {registered_s:.0f} s")
        print(
            f"{args.requests} requests at once: "
            + ", ".join(f"{count} {name}" for name, count in outcomes.items())
        )
        if seconds:
            print(
                f"time of a request: p50 {statistics.median(seconds):.2f} s, longest"
                f" {max(seconds):.2f} s"
            )
        num_explained = explained(folder, ids)
        print(f"explained: {num_explained}; memory of the frontend: {frontend.rss_mib():.0f} MiB")
        return int(outcomes["complete"] != args.requests or num_explained != args.requests)
    finally:
        for host in hosts:
            host.terminate()
        for host in hosts:
            host.wait()
        frontend.stop()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.many_workers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=int, default=2550, metavar="N", help="number of workers (default: 2550)")
    processes = max(_FEWEST_PROCESSES, (len(os.sched_getaffinity(0)) - _OTHER_CORES) // 2 * 2)
    about = f"number of processes that they share (here by default: {processes})"
    add("--processes", type=int, default=processes, metavar="N", help=about)
    add(
        "--requests",
        type=int,
        default=1536,
        metavar="N",
        help="requests that are sent at once (default: 1536)",
    )
    add(
        "--start-timeout-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="for all to register (default: 1800)",
    )
    add(
        "--timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="a request that takes longer hangs (default: 300)",
    )
    add("--serve", choices=_ROLES, help=argparse.SUPPRESS)  # the processes of the workers
    add("--recorder-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.serve is not None:
        logging.basicConfig(level=logging.INFO)
        logging.getLogger().handlers[0].setLevel(logging.WARNING)
        uvloop.run(serve_workers(Role(args.serve), args.workers, args.recorder_dir))
        return 0
    # The flight recorder writes into memory only.
    recordings = tempfile.TemporaryDirectory(prefix="dynamo-many-", dir="/dev/shm")
    with recordings as folder, start_servers() as env:
        return run(args, env, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
