"""Keep the numbers of the standard streams away from sockets and files."""

from __future__ import annotations

import os

_NUM_STREAMS = 3  # stdin, stdout and stderr


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise, the next sockets would take their numbers. uvloop aborts the process when it closes
    such a socket, and what a library writes to stderr would go to a server.
    """
    for number in range(_NUM_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            # The system takes the lowest free number, which is this one. A child process inherits
            # only what is made inheritable.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
