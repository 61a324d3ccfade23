"""End this process if it hangs when it ends.

At its end, an event loop waits for its tasks and threads, and the interpreter for threads and for
functions of libraries. An engine, middleware or a library may leave some that never end: a task
that ignores its cancellation, a call on a thread, or a function that waits for a lost rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Final

log = logging.getLogger(__name__)

# Longest time to close an engine and end the event loop, and for the exit of the interpreter.
EXIT_S: Final = 30.0
FORCED_EXIT_S: Final = 5.0  # longest time from a second signal to the end of the event loop


class ExitLimit:
    """Ends this process if `cancel` is not called in time after `begin`. Thread-safe."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def begin(self, status: int, limit_s: float) -> None:
        """End this process with `status` after `limit_s`. A longer limit of before has no effect.

        Args:
            status: exit status of the process.
            limit_s: time in seconds.
        """
        timer = threading.Timer(limit_s, _end_process, (status, limit_s))
        timer.name = "exit-limit"
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def cancel(self) -> None:
        """Let this process continue. Idempotent."""
        for timer in self._timers:
            timer.cancel()


def limit_interpreter_exit(status: int) -> None:
    """End this process with `status` if the exit of the interpreter takes longer than EXIT_S.

    The functions of mpi4py and TensorRT-LLM wait for a lost rank for ever (`pre_shutdown` and
    `shutdown` in executor/proxy.py).
    """
    # Functions that were registered with `threading._register_atexit` run before those of `atexit`,
    # and libraries may hang there already. The function that was registered last runs first.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(lambda: ExitLimit().begin(status, EXIT_S))


def _end_process(status: int, limit_s: float) -> None:
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
    log.error(
        "the exit of this process hangs, so it ends with %d after %g s; threads that still run: %s",
        status,
        limit_s,
        ", ".join(threads),
    )
    os._exit(status)
