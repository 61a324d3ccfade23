"""What the parent of several frontend processes decides; that they live and die is for the
end-to-end tests.
"""

from __future__ import annotations

import os
import socket
import sys

import pytest

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process.process_group import (
    ProcessGroup,
    combined_exit_status,
    process_argv,
    process_environ,
    reserve_port,
)
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.listening import bind, listen
from tests.kit.cases import each_case

HOST = "127.0.0.1"


def test_member_argv_passes_all_settings() -> None:
    words = [
        "--workers",
        "3",
        "--http-port",
        "0",
        "--max-inflight",
        "7",
        "--decode-fallback",
        "--namespace",
        "n",
    ]
    words += ["--nats-server", "nats://user:secret@host:1"]
    config = load(FrontendConfig, prog="frontend", argv=words, environ={})
    _, dash_m, module, *argv = process_argv(config, 2, 8123)
    assert (dash_m, module) == ("-m", "dynamo_trtllm.frontend.process.main")
    assert "secret" not in " ".join(argv)
    # the parent's settings win
    inherited = {"DYN_TRTLLM_MAX_INFLIGHT": "9", "DYN_TRTLLM_NATS_SERVER": "nats://b:2"}
    environ = process_environ(config, inherited)
    read = load(FrontendProcessConfig, prog="member", argv=argv, environ=environ)
    assert (read.number, read.http_port) == (2, 8123)
    same = {
        name: getattr(config, name) for name in FrontendConfig.model_fields if name != "http_port"
    }
    assert {name: getattr(read, name) for name in same} == same


def test_member_argv_has_the_names_of_hooks() -> None:
    config = FrontendConfig(workers=2)
    names = {"middleware": ["a:b"], "routes": {"GET /c": "a:c"}, "hook_timeout_s": 1.5}
    _, _, _, *argv = process_argv(config, 1, 8123, names)
    assert load(FrontendProcessConfig, prog="member", argv=argv, environ={}).hooks == names
    group = ProcessGroup(config, 8123, {"PYTHONPATH": "/old"}, names)
    assert group._environ["PYTHONPATH"] == os.pathsep.join(path for path in sys.path if path)


@each_case(
    ("statuses", "expected"),
    [
        ({}, 0),
        ({"a": 0, "b": 0}, 0),
        ({"a": 0, "b": 1}, 1),
        ({"a": 2, "b": 1}, 2),
        ({"a": 1, "b": -9}, 137),
        ({"a": 0, "b": -15}, 0),
    ],
)
def test_worst_status_is_the_highest_except_own_sigterm(
    statuses: dict[str, int], expected: int
) -> None:
    assert combined_exit_status(statuses) == expected


def test_held_port_then_members_can_share_it_and_others_can_not() -> None:
    with reserve_port(FrontendConfig(http_host=HOST, http_port=0, workers=2)) as held:
        port = held.getsockname()[1]
        with listen(HOST, port, is_shared=True), listen(HOST, port, is_shared=True):
            with pytest.raises(ConfigError, match=f"--http-port {port}"):
                listen(HOST, port)
            with pytest.raises(ConfigError, match=f"--http-port {port}"):
                reserve_port(FrontendConfig(http_host=HOST, http_port=port, workers=2))


def test_reserve_port_rejects_far_more_processes_than_cores() -> None:
    with pytest.raises(
        ConfigError, match="--workers 100000 is more than 16 processes for each of the"
    ):
        reserve_port(FrontendConfig(http_host=HOST, http_port=0, workers=100_000))


def test_held_port_without_listener_refuses_connections() -> None:
    with (
        reserve_port(FrontendConfig(http_host=HOST, http_port=0, workers=2)) as held,
        pytest.raises(ConnectionRefusedError),
    ):
        socket.create_connection(held.getsockname(), timeout=5).close()


def test_bound_when_the_port_is_used_then_refused_by_name() -> None:
    with listen(HOST, 0) as taken, pytest.raises(ConfigError, match="can't be opened"):
        bind(HOST, taken.getsockname()[1], is_shared=True)
