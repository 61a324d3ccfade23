"""The end of a frontend process, without its application."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process import run_app
from dynamo_trtllm.frontend.process.control_pipe import ControlPipe
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.protocol.errors import Unreachable
from tests.kit.waiting import SOON_S


async def serve(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], *, ends: bool) -> None:
    """Serve with an application, as one of several processes. `ends`: the parent ends."""
    monkeypatch.setattr(run_app, "run_app", run)
    sockets = socket.socketpair()
    parent, child = [await asyncio.open_unix_connection(sock=sock) for sock in sockets]
    if ends:
        parent[1].close()
    try:
        async with asyncio.timeout(SOON_S):
            sock = socket.create_server(("127.0.0.1", 0))
            await Frontend(FrontendConfig(), sock=sock, pipe=ControlPipe(*child)).serve()
    finally:
        parent[1].close()


async def test_serve_ends_with_its_parent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def run(*_: Any, **__: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with caplog.at_level(logging.ERROR):
        await serve(monkeypatch, run, ends=True)
    assert ended.is_set()
    assert "parent process exited" in caplog.text


async def test_serve_raises_the_application_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> None:
        raise Unreachable("etcd is away")

    with pytest.raises(Unreachable, match="etcd is away"):
        await serve(monkeypatch, run, ends=False)
