"""The launcher with real servers, a real frontend and mock workers: how it starts, keeps and ends
its processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm.cli import logs, stop
from dynamo_trtllm.cli import status as status_command
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.launch.local_servers import nats_binary
from dynamo_trtllm.protocol.errors import Unreachable
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.cluster import PLAIN
from tests.kit.launcher_process import WAIT_S, LauncherProcess, ask_until_answered
from tests.kit.waiting import SOON_S

FILE = """\
namespace: launch-{port}
frontend: {{http-port: {port}}}
workers:
  - {{name: prefill, disaggregation_mode: prefill, flags: {{model: tiny-gpt-oss, engine: mock}}}}
  - {{name: decode, disaggregation_mode: decode, flags: {{model: tiny-gpt-oss, engine: mock}}}}
restart: {{max_restarts: 1}}
"""

pytestmark = pytest.mark.timeout(300)

Launch = Callable[..., LauncherProcess]


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def deployment(tmp_path: Path, port: int) -> Path:
    path = tmp_path / "d.yaml"
    path.write_text(FILE.format(port=port))
    return path


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the launcher keeps the data of its servers."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(temporary: Path) -> Iterator[Launch]:
    started: list[LauncherProcess] = []

    def start(*argv: object, **how: Any) -> LauncherProcess:
        started.append(LauncherProcess(temporary, *map(str, argv), **how))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


@pytest.fixture
def status(
    capsys: pytest.CaptureFixture[str],
) -> Callable[[], Any]:
    """Return a function that returns what `dynamo-trtllm status --json` says, once all is ready."""

    def show() -> Any:
        deadline = time.monotonic() + WAIT_S
        while True:  # the frontend may learn of its workers shortly after the launcher
            with pytest.raises(SystemExit) as ended:
                status_command.main(["--json"])
            said = capsys.readouterr().out
            if ended.value.code == 0:
                return json.loads(said)
            assert time.monotonic() < deadline, said

    return show


def serve_while_stopped(launched: LauncherProcess, port: int) -> None:
    """Stop the launcher with SIGSTOP: its deployment serves, and the lines come late."""
    ask_until_answered(port)
    launched.process.send_signal(signal.SIGSTOP)
    try:
        body = {"model": "tiny-gpt-oss", "prompt": "Hi", "max_tokens": 1}
        with httpx.Client(timeout=SOON_S, **PLAIN) as client:
            for number in range(200):
                request_id = {"X-Request-Id": f"request-{number:03}-{'x' * 100}"}
                answer = client.post(
                    f"http://localhost:{port}/v1/completions", json=body, headers=request_id
                )
                assert answer.status_code == 200, answer.text
    finally:
        launched.process.send_signal(signal.SIGCONT)
    launched.wait_line(r"frontend +\| .* request-199-x")
    # more than a pipe holds
    assert sum(len(line) for line in launched.lines if " request-" in line) > 1 << 16


async def check_strangers(etcd: str, nats: str) -> None:
    """Check that the servers of the launcher reject clients without credentials."""
    with pytest.raises(Unreachable, match="rejects this process"):
        await NatsPlane.connect(nats, connect_timeout_s=0.3)
    async with aclosing(EtcdStore(ConnectionConfig(etcd_endpoints=etcd))) as store:
        with pytest.raises(Unreachable, match="rejects this process, "):
            await store.read_all("v1/instances/")


def test_launch_when_all_is_well_then_it_serves_until_sigterm(
    launch: Launch,
    deployment: Path,
    port: int,
    temporary: Path,
    status: Callable[[], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: Callable[[list[str]], None], *words: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            command([*words])
        return capsys.readouterr().out

    launched = launch(deployment)
    launched.wait_line(r"launch +\| Ready")
    assert list(temporary.iterdir())
    for name in ("etcd", "nats", "frontend", "prefill", "decode"):
        launched.wait_line(rf"^launch +\| {name} is ready after \d+\.\d\d s (at|as) \S+")
    order = [line.split()[2] for line in launched.lines if " is ready after" in line]
    assert order[:2] == ["etcd", "nats"]
    # two servers, a frontend, two workers, the launcher and who clears up after it, and four output
    # relays
    assert len(launched.pids()) == 11
    with urllib.request.urlopen(f"http://localhost:{port}/live", timeout=WAIT_S) as reply:
        assert json.load(reply) == {"status": "live"}
    (report,) = status()
    assert (report["namespace"], report["url"]) == (f"launch-{port}", f"http://localhost:{port}")
    shown = {
        process["name"]: (process["role"], process["state"]) for process in report["processes"]
    }
    assert shown == {
        name: (name, "ready") for name in ("etcd", "nats", "frontend", "prefill", "decode")
    }
    assert report["processes"][-1]["load"]["running"] == 0
    addresses = {process["name"]: process["address"] for process in report["processes"]}
    asyncio.run(check_strangers(addresses["etcd"], addresses["nats"]))
    serve_while_stopped(launched, port)
    # A thread of the launcher writes the file, so it may lag behind the terminal.
    deadline = time.monotonic() + SOON_S
    while not re.search(r"^[^|]* INFO .*request-199-x", run(logs.main, "frontend"), re.MULTILINE):
        assert time.monotonic() < deadline
    assert "launch   | Ready" in run(logs.main, "--tail", "1000")
    stopped = run(stop.main)
    ended = re.findall(r"^(\w+) ended after \d", stopped, re.MULTILINE)
    assert sorted(ended) == ["decode", "frontend", "prefill"]
    assert re.search(rf"^launch-{port} stopped after \d", stopped, re.MULTILINE)
    assert launched.end() == (0, "")
    launched.wait_gone(SOON_S)
    drained = [
        i for i, line in enumerate(launched.lines) if re.match(r"(prefill|decode) .*drained", line)
    ]
    assert len(drained) == 2  # stopped in order, not killed
    assert launched.lines[-1].endswith("| stopped")
    assert not list(temporary.iterdir())


SILENT = """\
namespace: launch-{port}
frontend: {{http-port: 0, workers: 2, log-level: error}}
workers:
  - name: w
    disaggregation_mode: prefill_and_decode
    flags: {{model: tiny-gpt-oss, engine: mock, log-level: error}}
"""


# tests/unit/launch covers it without the launcher's process: test_process_specs.py the ports and the level of
# logs, test_launcher.py the port that stays reserved, and the readiness by HTTP
@pytest.mark.long
def test_launch_without_port_or_log_uses_chosen_ports(
    launch: Launch, deployment: Path, port: int
) -> None:
    deployment.write_text(SILENT.format(port=port))
    launched = launch(deployment)
    launched.wait_line(r"launch +\| Ready")
    frontend = launched.wait_line(r"frontend is ready after .* at (http://localhost:\d+)").group(1)
    instance = launched.wait_line(r"w is ready after .* as instance ([0-9a-f]+)").group(1)
    command = launched.pids()[launched.pid_of("--disaggregation-mode=")]
    assert "--system-host=127.0.0.1" in command
    found = re.search(r"--system-port=(\d+)", command)
    assert found is not None
    for url, said in (
        (f"{frontend}/ready", {"status": "ready", "reason": ""}),
        (
            f"http://127.0.0.1:{found[1]}/ready",
            {"status": "serving", "reason": "", "instance_id": instance},
        ),
    ):
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            assert json.load(reply) == said
    assert {line.split()[0] for line in launched.lines} == {"launch"}
    launched.process.terminate()
    assert launched.end() == (0, "")
    launched.wait_gone(SOON_S)


# That a process which ends again and again ends all: tests/unit/support/subprocesses/test_supervisor.py
def test_launch_killed_after_restarts_leaves_nothing(
    launch: Launch, deployment: Path, port: int, temporary: Path
) -> None:
    launched = launch(deployment)
    launched.wait_line(r"launch +\| Ready")
    kill_server(launched, port, "nats", "nats-server -a")
    first = launched.pid_of("--disaggregation-mode=decode")
    seen = len(launched.lines)
    os.kill(first, signal.SIGKILL)
    launched.wait_line(
        r"launch +\| decode was killed by SIGKILL; starting it again \(1 of 1 in 60 s\)", seen
    )
    launched.wait_line(r"launch +\| decode is ready after", seen)
    assert launched.pid_of("--disaggregation-mode=decode") != first
    assert list(temporary.iterdir())
    launched.process.kill()
    launched.wait_gone(SOON_S)
    assert not list(temporary.iterdir())


def test_launch_when_killed_while_starting_then_nothing_is_left(
    launch: Launch, deployment: Path
) -> None:
    launched = launch(deployment)
    launched.wait_line("nats is ready")
    launched.process.kill()
    launched.wait_gone(SOON_S)


def test_launch_when_stopped_while_starting_then_it_does_with_0(
    launch: Launch, deployment: Path
) -> None:
    launched = launch(deployment)
    launched.wait_line("nats is ready")
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 0
    launched.wait_gone(SOON_S)


# tests/unit/support/subprocesses/test_supervisor.py kills processes that ignore the first signal
@pytest.mark.long
def test_launch_second_signal_kills_a_frozen_worker(launch: Launch, deployment: Path) -> None:
    launched = launch(deployment)
    launched.wait_line(r"launch +\| Ready")
    os.kill(launched.pid_of("--disaggregation-mode=decode"), signal.SIGSTOP)
    launched.process.terminate()
    launched.wait_line("prefill .*drained")
    launched.process.terminate()
    assert launched.end() == (0, "")
    launched.wait_gone(SOON_S)


def kill_server(launched: LauncherProcess, port: int, server: str, program: str) -> None:
    """It is back at its address, no other process has ended, and requests are served."""
    address = launched.wait_line(rf"{server} is ready after .* at (\S+)").group(1)
    others = {pid for pid, command in launched.pids().items() if program not in command}
    seen = len(launched.lines)
    os.kill(launched.pid_of(program), signal.SIGKILL)
    launched.wait_line(
        rf"launch +\| {server} was killed by SIGKILL; starting it again \(1 of 1 in 60 s\)", seen
    )
    launched.wait_line(rf"launch +\| {server} is ready after .* at {re.escape(address)}$", seen)
    ask_until_answered(port)
    assert others <= set(launched.pids())


@pytest.mark.long
@pytest.mark.parametrize(
    ("server", "program"), [("etcd", "etcdbin/etcd"), ("nats", "nats-server -a")]
)
def test_launch_when_a_server_dies_twice_then_all_is_given_up(
    launch: Launch, deployment: Path, port: int, server: str, program: str
) -> None:
    launched = launch(deployment)
    launched.wait_line(r"launch +\| Ready")
    kill_server(launched, port, server, program)
    os.kill(launched.pid_of(program), signal.SIGKILL)
    status, said = launched.end()
    assert status == 1
    assert f"{server} was killed by SIGKILL; it was restarted 1 time in 60 s" in said
    launched.wait_gone(SOON_S)


# A launcher whose given server comes up `times` times. Then another program takes its place, which
# claims in its log to be ready and listens nowhere.
SERVER_SLEEPS = """
import sys
from dynamo_trtllm.launch import local_servers
name, sleeper = sys.argv.pop(1), sys.argv.pop(1)
setattr(local_servers, name, lambda: sleeper)
local_servers.READY_TIMEOUT_S = 600.0
from dynamo_trtllm.launch.main import main
main()
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    program = tmp_path / "sleeper"
    program.write_text("#!/bin/sh\necho ready to serve client requests\nsleep 600\ntrue\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("server", ["etcd", "nats"])
def test_launch_stops_at_once_while_a_server_starts(
    launch: Launch, deployment: Path, sleeper: Path, server: str
) -> None:
    launched = launch(
        f"{server}_binary", sleeper, deployment, command=[sys.executable, "-c", SERVER_SLEEPS]
    )
    launched.wait_process(str(sleeper))
    launched.process.terminate()
    assert launched.end() == (0, "")
    assert not any("nats is ready" in line for line in launched.lines)
    launched.wait_gone(SOON_S)


@pytest.mark.long  # the test above that kills a server and a worker covers most of it
def test_launch_continues_while_a_server_is_away(
    launch: Launch, deployment: Path, sleeper: Path
) -> None:
    started = sleeper.with_name("started")
    once = f'[ -e {started} ] || {{ touch {started}; exec {nats_binary()} "$@"; }}'
    sleeper.write_text(sleeper.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{once}\n"))
    launched = launch(
        "nats_binary", sleeper, deployment, command=[sys.executable, "-c", SERVER_SLEEPS]
    )
    launched.wait_line(r"launch +\| Ready")
    os.kill(launched.pid_of("nats-server -a"), signal.SIGKILL)
    launched.wait_process(str(sleeper))
    seen = len(launched.lines)
    first = launched.pid_of("--disaggregation-mode=decode")
    os.kill(first, signal.SIGKILL)
    launched.wait_line(
        r"launch +\| decode was killed by SIGKILL; starting it again \(1 of 1 in 60 s\)", seen
    )
    launched.wait_line(r"^decode +\| ", seen)  # its successor is heard
    launched.process.terminate()
    assert launched.end() == (0, "")
    launched.wait_gone(SOON_S)


def test_launch_on_used_port_leaves_nothing(launch: Launch, deployment: Path, port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port))
        taken.listen()
        launched = launch(deployment)
        status, said = launched.end()
    assert status == 2
    assert said.count("\n") == 1
    assert (
        f"frontend: --http-port {port} can't be opened on --http-host 127.0.0.1 (Address already in"
        " use)" in said
    )
    assert launched.lines == []  # neither etcd nor NATS was started
    launched.wait_gone(SOON_S)


def test_launch_with_unknown_yaml_key_suggests_the_nearest(
    launch: Launch, deployment: Path
) -> None:
    deployment.write_text(deployment.read_text().replace("restart:", "restrat:"))
    launched = launch(deployment)
    status, said = launched.end()
    assert status == 2
    assert (
        said == f"python -m dynamo_trtllm.launch: {deployment}: unknown key 'restrat'; did you mean"
        " 'restart'?\n"
    )
    assert launched.lines == []


@pytest.mark.long  # tests/e2e/test_serve.py starts two side by side, too
def test_launch_twice_with_two_ports_answers_both(launch: Launch, deployment: Path) -> None:
    ports = free_ports(), free_ports()
    both = [launch("--demo", "--once", f"--port={port}", deployment) for port in ports]
    for port, launched in zip(ports, both, strict=True):
        assert launched.end() == (0, "")
        launched.wait_line(rf"Ready: http://localhost:{port}$")
        launched.wait_line(rf"listening on http://127\.0\.0\.1:{port}")
        launched.wait_line(r"answer: +\S")
        launched.wait_line(r"prefill by: prefill \(instance [0-9a-f]+\)")
        launched.wait_line(r"decode by: +decode \(instance [0-9a-f]+\)")
        launched.wait_line(r"KV moved: +[1-9][\d,]* bytes over tcp")
        launched.wait_line(r"TTFT: +\d+ ms")
        launched.wait_line(rf"curl -N http://localhost:{port}/v1/chat/completions")
        launched.wait_gone(SOON_S)


# As if mock workers read KV over CUDA IPC: the launcher's own table, with one engine more.
MOCK_KEEPS_MAPPED = """
from dynamo_trtllm.launch import launcher
launcher.KEEP_MAPPED |= {"mock"}
from dynamo_trtllm.launch.main import main
main()
"""


# tests/unit/launch/test_dependents.py covers it with children that are fakes
@pytest.mark.long
def test_launch_drains_readers_of_a_killed_prefill_worker(
    temporary: Path, deployment: Path, port: int
) -> None:
    text = deployment.read_text()
    for number, role in enumerate(("prefill", "decode")):
        text = text.replace(f"name: {role},", f"name: {role}, devices: [{number}],")
    deployment.write_text(text)
    launched = LauncherProcess(
        temporary, str(deployment), command=[sys.executable, "-c", MOCK_KEEPS_MAPPED]
    )
    try:
        launched.wait_line(r"launch +\| Ready")
        ask_until_answered(port)
        before = launched.pids()
        roles = [launched.pid_of(f"--disaggregation-mode={role}") for role in ("prefill", "decode")]
        seen = len(launched.lines)
        os.kill(roles[0], signal.SIGKILL)
        for role in ("prefill", "decode"):
            launched.wait_line(rf"launch +\| {role} is ready after", seen)
        order = [
            next(
                i for i, line in enumerate(launched.lines) if i >= seen and re.search(pattern, line)
            )
            for pattern in (
                r"launch +\| prefill was killed by SIGKILL; starting it again \(1 of 1 in 60 s\)",
                r"launch +\| draining and restarting decode",
                r"^decode .*drained",
                r"launch +\| decode stopped; GPU memory of prefill is free",
                r"launch +\| prefill is ready after",
            )
        ]
        assert order == sorted(order)
        ask_until_answered(port)
        after = set(launched.pids())
        ended = {pid for pid in set(before) - after if "output_relay" not in before[pid]}
        assert ended == set(roles)
        assert len(after) == len(before)
        seen = len(launched.lines)
        # its first own death, of 1 allowed
        os.kill(launched.pid_of("--disaggregation-mode=decode"), signal.SIGKILL)
        launched.wait_line(
            r"launch +\| decode was killed by SIGKILL; starting it again \(1 of 1 in 60 s\)", seen
        )
        launched.process.terminate()
        assert launched.end() == (0, "")
        launched.wait_gone(SOON_S)
    finally:
        launched.close()
