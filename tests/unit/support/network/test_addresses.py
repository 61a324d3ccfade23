from __future__ import annotations

import socket

import pytest

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.addresses import (
    LOOPBACK,
    address_towards,
    is_wildcard,
    resolve_host,
    shown_address,
)
from tests.kit.cases import each_case

HERE = "nats://localhost:4222"


@pytest.mark.parametrize(
    "url", [HERE, "127.0.0.1:4222", "http://[::1]:2379", "nats://no-such-host.invalid:1"]
)
def test_address_when_all_servers_are_on_this_host_then_loopback(url: str) -> None:
    assert address_towards([url]) == LOOPBACK


@pytest.mark.parametrize(
    ("url", "address"), [("nats://name:word@127.0.0.2", "10.0.0.2"), ("127.0.0.3:2379", "10.0.0.3")]
)
def test_address_follows_the_interface_of_the_server(
    url: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe(socket.socket):
        """A socket of a host with another interface."""

        def getsockname(self) -> tuple[str, int]:
            peer = str(self.getpeername()[0])
            return (peer if peer == LOOPBACK else f"10.0.0.{peer[-1]}", 1)

    monkeypatch.setattr(socket, "socket", Probe)
    assert address_towards([HERE, url, "127.0.0.9"]) == address


@each_case("host", ["", "*", "0.0.0.0", "::", "0:0::0", "224.0.0.1", "ff02::1"])
def test_host_when_it_means_several_then_it_is_a_wildcard(host: str) -> None:
    assert is_wildcard(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1", "fd00::2", "worker-1.example"])
def test_host_when_it_means_one_then_it_is_no_wildcard(host: str) -> None:
    assert not is_wildcard(host)


def test_name_without_address_is_config_error() -> None:
    with pytest.raises(ConfigError, match=r"^--some-host .a+. can.t be resolved"):
        resolve_host(70 * "a", "--some-host")
    with pytest.raises(ConfigError, match=r"^--some-host .no-such-host.invalid. can.t be resolved"):
        resolve_host("no-such-host.invalid", "--some-host")
    assert resolve_host("127.0.0.2", "--x") == "127.0.0.2"
    assert resolve_host("::1", "--x") == "::1"


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("0.0.0.0", "localhost:80"),
        ("::", "localhost:80"),
        ("127.0.0.1", "localhost:80"),
        ("10.0.0.1", "10.0.0.1:80"),
        ("fd00::1", "[fd00::1]:80"),
    ],
)
def test_address_for_a_user_of_this_machine(host: str, shown: str) -> None:
    assert shown_address(host, 80) == shown
