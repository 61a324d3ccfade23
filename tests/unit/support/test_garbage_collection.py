"""What the garbage collector looks through once a frontend has tuned it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from dynamo_trtllm.support import garbage_collection


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


class Link:
    """An object that refers to itself when it is closed into a ring."""

    ring: Link


def test_tune_gc_then_what_exists_is_not_looked_through_again() -> None:
    frozen = gc.get_freeze_count()
    loaded = [Link() for _ in range(100)]
    garbage_collection.tune_gc()
    assert gc.get_freeze_count() > frozen + len(loaded)
    assert not any(isinstance(item, Link) for item in gc.get_objects())


def test_tune_gc_then_cycles_made_before_and_after_are_freed() -> None:
    before = Link()
    gone = []
    before.ring = before
    gone.append(weakref.ref(before))
    del before
    garbage_collection.tune_gc()
    after = Link()
    after.ring = after
    gone.append(weakref.ref(after))
    del after
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_tune_gc_then_collections_are_rare() -> None:
    garbage_collection.tune_gc()
    assert gc.get_threshold() == garbage_collection.THRESHOLDS
    assert gc.isenabled()


def test_tune_gc_then_a_middle_collection_has_few_objects() -> None:
    garbage_collection.tune_gc()
    young, middle, _ = gc.get_threshold()
    assert young * middle <= 50_000
