"""A chosen port and its neighbors are free."""

from __future__ import annotations

import socket

import pytest

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network import addresses


def test_ports_when_one_in_between_is_taken_then_others(monkeypatch: pytest.MonkeyPatch) -> None:
    free = addresses.free_ports(3)
    taken = addresses.free_ports()
    while abs(taken - free) < 3:
        taken = addresses.free_ports()
    with socket.create_server(("127.0.0.1", taken)):
        choices = iter([taken - 2, taken - 1, taken, free])
        monkeypatch.setattr(addresses.random, "choice", lambda _: next(choices))
        assert addresses.free_ports(3) == free


def test_ports_all_taken_says_how_many_were_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(addresses.random, "choice", lambda _: taken.getsockname()[1] - 1)
        with pytest.raises(ConfigError, match="no 2 consecutive free ports from 20000 to 31999"):
            addresses.free_ports(2)
