"""The time limit of a connection to NATS holds although the client drops cancels."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from dynamo_trtllm.cluster.request_plane import nats_connection
from dynamo_trtllm.cluster.request_plane.nats_connection import (
    NO_CREDENTIALS,
    NatsClient,
    connect_client,
)
from tests.kit.waiting import SOON_S


async def retry_for_ever(drops: int) -> None:
    """Do as the client does when `wait_for` drops a cancel that arrives together with the error of
    an attempt.
    """
    for _ in range(drops):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(SOON_S)
    await asyncio.sleep(SOON_S)


@pytest.mark.parametrize("drops", [0, 1, 3])
async def test_connect_limit_holds_when_client_drops_cancels(
    drops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "_CANCEL_AGAIN_S", 0.001)
    client = NatsClient(NO_CREDENTIALS)
    task = asyncio.current_task()
    assert task is not None
    monkeypatch.setattr(client, "connect", lambda *_, **__: retry_for_ever(drops))
    with pytest.raises(TimeoutError):
        await connect_client(client, "", 0.001)
    assert client.is_closed
    assert task.cancelling() == 0
    await asyncio.sleep(0.005)  # nothing cancels it any more


async def test_connect_cancelled_after_the_limit_raises_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_connection, "_CANCEL_AGAIN_S", SOON_S)
    begun = asyncio.Event()

    async def connect(*_: object, **__: object) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(SOON_S)
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(SOON_S)

    client = NatsClient(NO_CREDENTIALS)
    monkeypatch.setattr(client, "connect", connect)
    task = asyncio.create_task(connect_client(client, "", 0.0))
    await begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize(
    ("message", "reconnects"),
    [
        ("'user authentication expired'", True),
        ("'authorization violation'", True),
        ("'permissions violation for publish to \"auth.x\"'", False),
    ],
)
async def test_server_that_rejects_a_user_is_connected_again(
    message: str, reconnects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NatsClient(NO_CREDENTIALS)
    errors: list[Exception] = []
    reported: list[Exception] = []

    async def reconnect(error: Exception) -> None:
        errors.append(error)

    async def report(error: Exception) -> None:
        reported.append(error)

    monkeypatch.setattr(client, "_process_op_err", reconnect)
    client._error_cb = report
    await client._process_err(message)
    assert (len(errors), len(reported)) == ((1, 0) if reconnects else (0, 1))
