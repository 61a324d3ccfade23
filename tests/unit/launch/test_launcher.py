"""When a process counts as one that serves, and the ports at which it is asked."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.deployment import ServicesConfig
from dynamo_trtllm.launch import launcher
from dynamo_trtllm.launch.plan import with_settings
from dynamo_trtllm.launch.servers import NotYet
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

WORKER = worker("w", "prefill_and_decode", "cpu", "mock")


async def started(*workers: dict[str, Any]) -> LauncherRun:
    made = LauncherRun(deployment(*workers))
    await until(lambda: len(ALL) == 1 + len(workers))
    return made


async def test_launcher_when_it_starts_a_process_then_it_passes_addresses_in_the_environment() -> (
    None
):
    services = ServicesConfig(etcd="127.0.0.1:1", nats="nats://dynamo:secret@127.0.0.1:2")
    made = LauncherRun(deployment(WORKER).model_copy(update={"services": services}))
    await until(lambda: len(ALL) == 2)
    started = list(ALL)
    await made.end()
    for child in started:
        assert child.environ.get("DYN_TRTLLM_ETCD_ENDPOINTS") == "127.0.0.1:1"
        assert child.environ.get("DYN_TRTLLM_NATS_SERVER") == "nats://dynamo:secret@127.0.0.1:2"
        assert "secret" not in " ".join(child.spec.argv)


async def test_process_when_its_log_says_that_it_serves_then_it_does_only_when_it_answers_so() -> (
    None
):
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


async def test_process_when_it_does_not_serve_in_time_then_the_error_says_what_it_answered_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def until_ready(ask: Any, within_s: float, on_wait: Any) -> None:
        raise NotYet("loading: reading weights")

    monkeypatch.setattr(launcher, "until", until_ready)
    made = await started(WORKER)
    for child in ALL:
        child.die(KILLED)
    with pytest.raises(
        RunFailed,
        match=r"was not ready within 120 s \(loading: reading weights\); raise ready_timeout_s",
    ):
        await made.running


async def test_record_when_a_worker_was_restarted_then_it_tells_its_instance_from_the_ended_one(
    tmp_path: Path,
) -> None:
    def recorded() -> tuple[list[str], list[str]]:
        record = msgspec.json.decode(
            (tmp_path / "deployment.json").read_bytes(), type=launcher.LaunchRecord
        )
        return [process.instance_id for process in record.processes], record.ended_instances

    async with run_launcher(WORKER):
        await until(lambda: recorded() == (["", "ab"], []))
        latest_child("w").die(KILLED)
        latest = await wait_for_start("w", 2)
        await until(lambda: recorded() == (["", ""], ["ab"]))
        latest.serve()
        await until(lambda: recorded() == (["", "abab"], ["ab"]))


async def test_launcher_when_the_reader_of_its_output_has_exited_then_it_stops_all_without_an_error() -> (
    None
):
    reader, writer = os.pipe()
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as out:
        made = LauncherRun(deployment(WORKER), out)
        await until(lambda: len(ALL) == 2)
        os.close(reader)
        latest_child("w").say("a line")
        await until(lambda: latest_child("w").is_terminating)
        await made.end()
    assert isinstance(made.output.failure, BrokenPipeError)


async def test_process_when_it_refuses_its_configuration_then_all_is_given_up() -> None:
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
async def test_run_when_a_port_is_in_use_then_it_is_named_and_nothing_starts_not_even_etcd(
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


async def test_run_when_the_host_is_unknown_then_the_flag_that_changes_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "bind", bind)
    of = with_settings(
        deployment(WORKER), LaunchConfig(deployment=Path(), host="nope.invalid", port=8000)
    )
    with pytest.raises(
        ConfigError,
        match=r"^frontend: --http-host nope\.invalid .*--host of this command changes it$",
    ):
        await LauncherRun(of).running
    assert not ALL


async def test_run_when_a_port_is_chosen_then_it_is_reserved_for_its_process_until_the_end() -> (
    None
):
    made = await started(WORKER)
    port = latest_child("w").port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    with listen(HOST, port):
        pass
    await made.end()
    with socket.socket() as other:
        other.bind((HOST, port))
