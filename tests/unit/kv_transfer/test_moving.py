"""Fetches that take turns on one thread: all are taken to their ends, whatever becomes of one of
them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from dynamo_trtllm.kv_transfer.nixl.poller import MAX_CONCURRENT_FETCHES, TransferPoller

WAIT_S = 10


def steps(name: str, seen: list[str], count: int = 3) -> Iterator[float]:
    for _ in range(count):
        seen.append(name)
        yield 0.0


def until(event: threading.Event, begun: threading.Semaphore | None = None) -> Iterator[float]:
    if begun is not None:
        begun.release()
    while not event.is_set():
        yield 0.01


def failing() -> Iterator[float]:
    yield 0.0
    raise ZeroDivisionError


def test_mover_when_one_fails_then_others_go_on() -> None:
    mover = TransferPoller("test")
    seen = list[str]()
    gate = threading.Event()
    gated = mover.submit(until(gate))
    failed = mover.submit(failing())
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    mover.submit(steps("a", seen)).result(WAIT_S)
    assert not gated.done()  # and a was moved beside it
    gate.set()
    gated.result(WAIT_S)
    assert seen == ["a"] * 3
    mover.shutdown()


def test_mover_when_full_makes_others_wait_in_order() -> None:
    mover = TransferPoller("test")
    seen = list[str]()
    gate = threading.Event()
    first = [mover.submit(until(gate)) for _ in range(MAX_CONCURRENT_FETCHES)]
    late = [mover.submit(steps(name, seen, 1)) for name in "abc"]
    assert late[1].cancel()
    gate.set()
    for move in (*first, late[0], late[2]):
        move.result(WAIT_S)
    assert seen == ["a", "c"]
    mover.shutdown()


def test_shutdown_cancels_waiting_moves_only() -> None:
    mover = TransferPoller("test")
    gate = threading.Event()
    begun = threading.Semaphore(0)
    moving = [mover.submit(until(gate, begun)) for _ in range(MAX_CONCURRENT_FETCHES)]
    assert all(begun.acquire(timeout=WAIT_S) for _ in moving)
    waiting = mover.submit(until(gate))
    closing = threading.Thread(target=mover.shutdown)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    assert not any(move.done() for move in moving)
    gate.set()
    for move in moving:
        move.result(WAIT_S)
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_submit_stepped_takes_the_first_step_at_once() -> None:
    mover = TransferPoller("test")
    threads = list[int]()

    def noting() -> Iterator[float]:
        for _ in range(3):
            threads.append(threading.get_ident())
            yield 0.0

    mover.submit(noting(), step_now=True).result(WAIT_S)
    assert threads[0] == threading.get_ident()
    assert threading.get_ident() not in threads[1:]
    mover.shutdown()


def test_submit_stepped_over_or_failed_has_its_result() -> None:
    mover = TransferPoller("test")
    assert mover.submit(iter([]), step_now=True).done()

    def fails() -> Iterator[float]:
        raise ZeroDivisionError
        yield 0.0

    with pytest.raises(ZeroDivisionError):
        mover.submit(fails(), step_now=True).result(0)
    mover.shutdown()


def test_submit_stepped_waits_behind_others() -> None:
    mover = TransferPoller("test")
    seen = list[str]()
    gate = threading.Event()
    first = [mover.submit(until(gate)) for _ in range(MAX_CONCURRENT_FETCHES)]
    late = [mover.submit(steps(name, seen, 1), step_now=True) for name in "abc"]
    assert not seen
    gate.set()
    for move in (*first, *late):
        move.result(WAIT_S)
    assert seen == ["a", "b", "c"]
    mover.shutdown()


def test_mover_continues_others_while_the_oldest_waits() -> None:
    mover = TransferPoller("test")
    seen = list[str]()
    gate = threading.Event()
    gated = mover.submit(until(gate))
    for move in [mover.submit(steps(name, seen, 50)) for name in "abcdef"]:
        move.result(WAIT_S)
    assert sorted(seen) == sorted("abcdef" * 50)
    gate.set()
    gated.result(WAIT_S)
    mover.shutdown()
