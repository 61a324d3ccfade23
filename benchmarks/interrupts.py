"""Take Ctrl-C as a request to stop soon, so that it interrupts nothing in the middle."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """A context in which the first Ctrl-C is noted, and a second one raises KeyboardInterrupt.

    Use it in the main thread.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._actions: list[Callable[[], None]] = []
        self._handler_before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._handler_before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._handler_before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_set = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for action in self._actions:
            action()

    @contextmanager
    def stopping(self, action: Callable[[], None]) -> Iterator[None]:
        """Call an action at the first Ctrl-C within this context, or now if that came before."""
        self._actions.append(action)
        try:
            if self.is_set:
                action()
            yield
        finally:
            self._actions.remove(action)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let the first Ctrl-C raise KeyboardInterrupt, too, within this context."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C back within this context. Processes that are started in it never get it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
