"""Servers on the event loop of their program: wrong orders of calls, errors, other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from dynamo_trtllm.protocol.errors import Draining, EngineFailed
from dynamo_trtllm.support import lifecycle
from dynamo_trtllm.support.lifecycle import Lifecycle
from tests.kit.waiting import SOON_S


class Server(Lifecycle):
    """A server that is ready at once and fails when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.num_starts = 0
        self.is_failing = asyncio.Event()

    async def _serve(self) -> None:
        self.num_starts += 1
        self._note_ready()
        failing = asyncio.create_task(self.is_failing.wait())
        stopping = asyncio.create_task(self._stop_event.wait())
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        stopping.cancel()
        if self.is_failing.is_set():
            raise EngineFailed("planted")


async def test_ready_when_nothing_serves_then_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifecycle, "_BEGIN_S", 0.01)
    with pytest.raises(RuntimeError, match=r"this Server does not serve, .* run serve\(\) in a"):
        await asyncio.wait_for(Server().ready(), SOON_S)


async def test_ready_when_serve_begins_later_then_it_waits() -> None:
    server = Server()
    waiting = asyncio.create_task(server.ready())
    await asyncio.sleep(0)
    serving = asyncio.create_task(server.serve())
    await asyncio.wait_for(waiting, SOON_S)
    server.stop()
    await serving


async def test_ready_in_another_thread_than_serve_then_it_returns() -> None:
    server = Server()
    async with asyncio.timeout(SOON_S):
        serving = asyncio.create_task(asyncio.to_thread(asyncio.run, server.serve()))
        await server.ready()
        server.stop()
        await serving


async def test_ready_when_one_waiter_is_cancelled_then_others_wait() -> None:
    server = Server()
    impatient = asyncio.create_task(server.ready())
    patient = asyncio.create_task(server.ready())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    async with asyncio.timeout(SOON_S), server:
        await patient


async def enter(server: Server) -> None:
    async with server:
        pytest.fail("the block was entered")


@pytest.mark.parametrize("use", [Server.ready, enter], ids=["ready", "block"])
async def test_server_when_stopped_before_it_starts_then_it_never_does(
    use: Callable[[Server], Awaitable[None]],
) -> None:
    server = Server()
    server.stop()
    with pytest.raises(Draining, match="the server was stopped; create another one"):
        await asyncio.wait_for(use(server), SOON_S)
    assert server.num_starts == 0


async def test_serve_when_stopped_before_then_it_returns_at_once() -> None:
    server = Server()
    server.stop()
    await asyncio.wait_for(server.serve(), SOON_S)
    assert server.num_starts == 0


@pytest.mark.parametrize("again", [Server.serve, enter], ids=["serve", "block"])
async def test_second_start_is_rejected_and_the_first_goes_on(
    again: Callable[[Server], Awaitable[None]],
) -> None:
    async with Server() as server:
        with pytest.raises(RuntimeError, match="a Server serves once"):
            await again(server)
        await server.ready()
    with pytest.raises(RuntimeError, match="a Server serves once"):
        await again(server)
    with pytest.raises(Draining):
        await server.ready()


async def test_block_when_it_fails_like_the_server_then_both_show() -> None:
    async def fail_beside_the_server() -> None:
        async with Server() as server:
            server.is_failing.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("of the block")

    with pytest.raises(EngineFailed, match="planted") as raised:
        await fail_beside_the_server()
    assert isinstance(raised.value.__context__, ValueError)
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_block_when_it_raises_then_its_error_ends_the_server() -> None:
    server = Server()
    with pytest.raises(ValueError, match="of the block"):
        async with server:
            raise ValueError("of the block")
    with pytest.raises(Draining):
        await server.ready()


async def test_run_in_an_event_loop_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"Server\.run starts an event loop, but one runs"):
        Server()._prepare_run()


def test_run_in_another_thread_says_what_to_do() -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            Server()._prepare_run()
        except RuntimeError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(SOON_S)
    assert "needs the main thread" in str(errors)
