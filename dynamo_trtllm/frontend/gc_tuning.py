"""The garbage collector of a process that serves streams: what was loaded at the start is not looked through again.

With Python's own thresholds the requests under way are looked through again and again: at 512 streams a collection of
the oldest generation took 5 to 20 times a step. What a request leaves behind is freed by reference counting; cycles
are few and die young.
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 50, 100)  # of each generation, in allocations or collections of the younger one


def tune_gc() -> None:
    """Everything that exists now stays for good. Takes tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
