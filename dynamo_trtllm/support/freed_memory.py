"""Return memory that was freed to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return what malloc keeps for later allocations. Does nothing without glibc.

    glibc returns memory by itself only from the end of its heap, where one small object that is in
    use keeps all of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
