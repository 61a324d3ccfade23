"""When a process counts as one that serves, and the ports at which it is asked."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.deployment import ServicesConfig
from dynamo_trtllm.kv_transfer.keys import read_keys
from dynamo_trtllm.launch import launcher
from dynamo_trtllm.launch.process_output import ProcessOutput
from dynamo_trtllm.launch.process_specs import with_settings
from dynamo_trtllm.launch.readiness import NotYet, ReadyAnswer
from dynamo_trtllm.launch.running_deployments import running_deployments
from dynamo_trtllm.launch.secret_files import SecretFiles
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.listening import bind, listen
from dynamo_trtllm.support.subprocesses import BAD_CONFIG, RunFailed
from tests.kit.fake_children import (
    ALL,
    HOST,
    KILLED,
    LauncherRun,
    deployment,
    latest_child,
    run_launcher,
    settle,
    until,
    wait_for_start,
    worker,
)

pytestmark = pytest.mark.usefixtures("scripted")

KEY_FILE = "DYN_TRTLLM_KV_TRANSFER_KEY_FILE"

WORKER = worker("w", "prefill_and_decode", "cpu", "mock")


async def started(*workers: dict[str, Any]) -> LauncherRun:
    made = LauncherRun(deployment(*workers))
    await until(lambda: len(ALL) == 1 + len(workers))
    return made


async def test_launcher_passes_addresses_in_the_environment() -> None:
    services = ServicesConfig(etcd="127.0.0.1:1", nats="nats://dynamo:secret@127.0.0.1:2")
    made = LauncherRun(deployment(WORKER).model_copy(update={"services": services}))
    await until(lambda: len(ALL) == 2)
    started = list(ALL)
    await made.end()
    for child in started:
        assert child.environ.get("DYN_TRTLLM_ETCD_ENDPOINTS") == "127.0.0.1:1"
        assert child.environ.get("DYN_TRTLLM_NATS_SERVER") == "nats://dynamo:secret@127.0.0.1:2"
        assert "secret" not in " ".join(child.spec.argv)


async def test_launcher_that_stops_ends_a_demonstration() -> None:
    """Otherwise its requests would keep workers from draining."""
    is_shown = asyncio.Event()
    ended: list[str] = []

    class Demonstrated(LauncherRun):
        async def _on_ready(self, serving: Any) -> bool:
            is_shown.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
            return True

    made = Demonstrated(deployment(WORKER))
    await until(lambda: len(ALL) == 2)
    for child in ALL:
        child.serve()
    await is_shown.wait()
    made.launcher._supervisor.stop()
    await until(lambda: bool(ended))
    await made.end()


@pytest.mark.parametrize(
    ("services", "environ", "has_own_key"),
    [
        (ServicesConfig(), {}, True),
        (ServicesConfig(etcd="127.0.0.1:1"), {}, False),
        (ServicesConfig(nats="127.0.0.1:2"), {}, False),
        (ServicesConfig(), {KEY_FILE: "keys"}, False),
    ],
    ids=["own servers", "shared etcd", "shared NATS", "given key"],
)
def test_launcher_makes_a_transfer_key_for_its_own_servers(
    tmp_path: Path, services: ServicesConfig, environ: dict[str, str], has_own_key: bool
) -> None:
    of = deployment(WORKER).model_copy(update={"services": services})
    made = launcher.Launcher(of, [], ProcessOutput(io.StringIO(), []), environ)
    made._give_transfer_key(SecretFiles(tmp_path))
    given = made._environ.get(KEY_FILE)
    if not has_own_key:
        assert given == environ.get(KEY_FILE)
        return
    assert given is not None
    assert len(read_keys(Path(given))) == 1
    assert Path(given).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("services", "own"),
    [
        (ServicesConfig(), {"ETCD", "NATS"}),
        (ServicesConfig(etcd="127.0.0.1:1"), {"NATS"}),
        (ServicesConfig(nats="127.0.0.1:2"), {"ETCD"}),
    ],
    ids=["own servers", "shared etcd", "shared NATS"],
)
def test_launcher_makes_users_for_its_own_servers(
    tmp_path: Path, services: ServicesConfig, own: set[str]
) -> None:
    given = {
        f"DYN_TRTLLM_{server}_CREDENTIALS_FILE": "of other servers" for server in ("ETCD", "NATS")
    }
    given |= {"NATS_CA": "of other servers", "ETCD_AUTH_CA": "of other servers"}
    of = deployment(WORKER).model_copy(update={"services": services})
    made = launcher.Launcher(of, [], ProcessOutput(io.StringIO(), []), given)
    made._make_users(SecretFiles(tmp_path))
    for server, authority in (("ETCD", "ETCD_AUTH_CA"), ("NATS", "NATS_CA")):
        file = made._environ[f"DYN_TRTLLM_{server}_CREDENTIALS_FILE"]
        assert (file != "of other servers") == (server in own)
        assert (authority not in made._environ) == (server in own)
        record = getattr(made.record, f"{server.lower()}_credentials_file")
        assert record == (file if server in own else "")
    passwords = set()
    for role in ("frontend", "worker", "planner", "tool"):
        path = tmp_path / f"{role}.credentials"
        user, _, password = path.read_text().strip().partition(":")
        assert user == role
        passwords.add(password)
    assert len(passwords) == 4
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


async def test_process_serves_only_when_it_answers_so() -> None:
    made = await started(WORKER)
    latest_child("frontend").say("listening on http://0.0.0.0:8000")
    latest_child("w").say("serving as instance ab (prefill_and_decode)")
    await settle()
    assert not any(child.is_ready for child in ALL)
    assert "is ready" not in made.out.getvalue()
    latest_child("frontend").serve()
    latest_child("w").serve()
    await until(lambda: all(child.is_ready for child in ALL))
    record = made.launcher.record
    assert record.frontend is not None
    assert record.frontend.address == "localhost:8000"
    assert {process.instance_id: process.name for process in record.processes} == {
        "": "frontend",
        "ab": "w",
    }
    assert "s at http://localhost:8000" in made.out.getvalue()
    assert "s as instance ab" in made.out.getvalue()
    await made.end()


async def test_process_not_serving_in_time_reports_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def until_ready(ask: Any, within_s: float, on_wait: Any) -> None:
        raise NotYet("loading: reading weights")

    monkeypatch.setattr(launcher, "poll", until_ready)
    made = await started(WORKER)
    for child in ALL:
        child.die(KILLED)
    with pytest.raises(
        RunFailed,
        match=r"was not ready within 120 s \(loading: reading weights\); raise ready_timeout_s",
    ):
        await made.running


async def test_slow_restart_is_tried_again_with_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    async def until_ready(ask: Any, within_s: float, on_wait: Any) -> ReadyAnswer:
        limits.append(within_s)
        if len(limits) in (1, 2, 4):
            raise NotYet("loading: reading weights")
        return ReadyAnswer("serving", instance_id="ab")

    async def restart_until(num_starts: int) -> None:
        latest_child("w").die(KILLED)
        await until(lambda: len(limits) == num_starts and latest_child("w").is_ready)

    async with run_launcher(WORKER, max_restarts=10) as made:
        monkeypatch.setattr(launcher, "poll", until_ready)
        await restart_until(3)
        await restart_until(5)
        assert limits == [120.0, 240.0, 480.0, 120.0, 240.0]
        assert not latest_child("frontend").is_terminating
        assert (
            "w was not ready within 120 s (loading: reading weights) after a restart, and is"
            " killed; the next start may take 240 s (ready_timeout_s)"
        ) in made.out.getvalue()


async def test_record_distinguishes_a_restarted_worker() -> None:
    def recorded() -> tuple[list[str], list[str]]:
        (record,) = running_deployments()
        return [process.instance_id for process in record.processes], record.ended_instances

    async with run_launcher(WORKER):
        await until(lambda: recorded() == (["", "ab"], []))
        latest_child("w").die(KILLED)
        latest = await wait_for_start("w", 2)
        await until(lambda: recorded() == (["", ""], ["ab"]))
        latest.serve()
        await until(lambda: recorded() == (["", "abab"], ["ab"]))


async def test_launcher_stops_cleanly_when_output_reader_exits() -> None:
    reader, writer = os.pipe()
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as out:
        made = LauncherRun(deployment(WORKER), out)
        await until(lambda: len(ALL) == 2)
        os.close(reader)
        latest_child("w").say("a line")
        await until(lambda: latest_child("w").is_terminating)
        await made.end()
    assert isinstance(made.output.failure, BrokenPipeError)


async def test_process_that_rejects_its_configuration_ends_all() -> None:
    made = await started(WORKER)
    latest_child("w").die(BAD_CONFIG)
    await until(lambda: latest_child("frontend").is_terminating)
    latest_child("frontend").die(0)
    with pytest.raises(RunFailed) as given_up:
        await made.running
    assert given_up.value.exit_status == BAD_CONFIG


@pytest.mark.parametrize(
    ("frontend_port", "worker_port", "says"),
    [
        (
            "{}",
            0,
            (
                "^frontend: --http-port {} can't be opened on --http-host 127.0.0.1 .*--port of"
                " this command"
            ),
        ),
        (0, "{}", "^w: --system-port {} can't be opened on --system-host 127.0.0.1 "),
    ],
)
async def test_run_with_used_port_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, frontend_port: Any, worker_port: Any, says: str
) -> None:
    monkeypatch.setattr(launcher, "bind", bind)
    monkeypatch.setattr(launcher, "start_etcd", None)  # a call of it fails
    with socket.create_server(("127.0.0.1", 0)) as owner:
        taken = str(owner.getsockname()[1])
        flags = {"system_port": int(str(worker_port).format(taken))}
        of = deployment(worker("w", "prefill_and_decode", "cpu", "mock", flags=flags))
        of = with_settings(
            of, LaunchConfig(deployment=Path(), port=int(str(frontend_port).format(taken)))
        )
        with pytest.raises(ConfigError, match=says.format(taken)):
            await LauncherRun(of.model_copy(update={"services": ServicesConfig()})).running
    assert not ALL


async def test_run_with_unknown_host_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "bind", bind)
    of = with_settings(
        deployment(WORKER), LaunchConfig(deployment=Path(), host="nope.invalid", port=8000)
    )
    assert of.frontend is not None
    of.frontend["allow_anonymous"] = True
    with pytest.raises(
        ConfigError,
        match=r"^frontend: --http-host nope\.invalid .*--host of this command changes it$",
    ):
        await LauncherRun(of).running
    assert not ALL


async def test_run_reserves_a_chosen_port_until_the_end() -> None:
    made = await started(WORKER)
    port = latest_child("w").port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    with listen(HOST, port):
        pass
    await made.end()
    with socket.socket() as other:
        other.bind((HOST, port))
