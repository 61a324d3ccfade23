"""Collect garbage less often, and exclude objects that stay from garbage collection."""

from __future__ import annotations

import gc
import logging
from typing import Final

log = logging.getLogger(__name__)

# Thresholds of the three GC generations: how many allocations, or collections of the younger
# generation, lead to a collection. A collection of the middle generation stops all streams:
#   up to 500,000 objects took 150 to 200 ms while many choices started,
#   100,000 objects took 50 ms on a busy machine,
#   50,000 objects took 33 ms of CPU time for a body of 40,000 blocks.
# With these thresholds, such a collection has at most 25,000 objects and takes 16 ms. All
# collections together take as long as with larger thresholds.
THRESHOLDS: Final = (5_000, 5, 2_000)


def tune_gc() -> None:
    """Exclude all existing objects from garbage collection, and collect less often.

    A frontend and a simulation call this: in both, a collection of all objects takes tens of ms.
    """
    freeze_objects()
    gc.set_threshold(*THRESHOLDS)


def freeze_objects() -> None:
    """Collect garbage once, then exclude all objects that exist now from garbage collection.

    An engine's library creates hundreds of thousands of objects that stay until the process ends. A
    collection of the oldest generation looks at each of these objects and holds the GIL meanwhile,
    so that all streams pause. For this reason, Dynamo's workers can switch garbage collection off
    (TRTLLM_SERVER_DISABLE_GC in main.py of dynamo.trtllm 1.7). But then reference cycles of
    requests are never freed.
    """
    gc.collect()
    gc.freeze()
    log.debug("%d objects are excluded from garbage collection", gc.get_freeze_count())
