"""Children of a supervisor that are none."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.launch import supervisor
from tests.unit.launch.supervisor_helpers import ALL, FakeChild, is_not_taken, until_ready


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "ManagedProcess", FakeChild)
    monkeypatch.setattr(supervisor, "until", until_ready)
    monkeypatch.setattr(supervisor, "is_taken", is_not_taken)
    monkeypatch.setattr(supervisor, "bind", lambda *_, **__: socket.socket())  # every port is free
    monkeypatch.setattr(supervisor, "scratch_folder", lambda prefix: contextlib.nullcontext(Path("/nowhere")))
    yield
    ALL.clear()
