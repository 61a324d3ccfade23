"""Children of a launcher that are none."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_trtllm.launch import launcher
from tests.kit.fake_children import ALL, RUNS, FakeChild, until_ready


@pytest.fixture
async def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[None]:
    monkeypatch.setattr(launcher, "ManagedProcess", FakeChild)
    monkeypatch.setattr(launcher, "poll", until_ready)
    monkeypatch.setattr(launcher, "bind", lambda *_, **__: socket.socket())  # every port is free
    monkeypatch.setattr(launcher, "scratch_folder", lambda prefix: contextlib.nullcontext(tmp_path))
    yield
    for made in RUNS:
        await made.abort()
    ALL.clear()
    RUNS.clear()
