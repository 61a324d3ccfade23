"""A temporary folder that goes with this process, also when it is killed: a shell waits for its end and clears up."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What writes into the folder dies with this process too, and may still write for a moment.
_CLEAR_UP = 'read -r _; for _ in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$0" 2>/dev/null && exit; sleep 0.1; done'


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Gone when left, or when this process ends in whatever way. POSIX shells only."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        # its own group: a Ctrl-C or a kill of ours is not meant for it
        janitor = subprocess.Popen(["sh", "-c", _CLEAR_UP, folder], stdin=subprocess.PIPE, process_group=0)
        try:
            yield Path(folder)
        finally:
            janitor.communicate()
