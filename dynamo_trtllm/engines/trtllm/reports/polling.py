"""Define a thread that polls TensorRT-LLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Poller:
    """A thread that polls TensorRT-LLM until `stop`.

    Args:
        name: the name of the thread.
        failure: what a log line says about a poll that failed.
    """

    pause_s: float
    timeout_s: float  # limit for one poll

    def __init__(self, name: str, *, failure: str) -> None:
        self._name = name
        self._failure_text = failure
        self._failure = ""  # the error of the last poll that failed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _start(self, poll: Callable[[], None]) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(poll,), name=self._name, daemon=True
            )
            self._thread.start()

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def stop(self) -> None:
        """Stop the thread and wait for its current call, which has a time limit. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.timeout_s)

    def _run(self, poll: Callable[[], None]) -> None:
        while not self._stop.wait(self.pause_s):
            try:
                poll()
            except Exception as exc:  # noqa: BLE001 - logged, and tried again
                # Remote calls raise RPCError (executor/rpc/rpc_common.py), a plain Exception.
                failure = f"{type(exc).__name__}: {exc}"
                if failure != self._failure and not self._stop.is_set():
                    log.warning("%s: %s", self._failure_text, failure)
                self._failure = failure
