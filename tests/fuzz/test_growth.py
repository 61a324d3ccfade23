"""A target whose work grows faster than its input is found. Work is counted here, not timed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz import growth, mutations
from tests.fuzz.growth import InputTimes, TooMuchWork, check_growth
from tests.fuzz.target import Form, Target

UNIT_S = 1e-4  # of work


class Work:
    """A clock that counts work instead of time."""

    def __init__(self, of: Callable[[bytes], float]) -> None:
        self._of = of
        self._total = 0.0

    def check(self, data: bytes) -> None:
        self._total += self._of(data)

    def clock(self) -> float:
        return self._total * UNIT_S

    def target(self, form: Form = Form.BYTES) -> Target:
        return Target(summary="", check=self.check, files=(), seeds=list, form=form)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bytes], float]], Work]:
    def make(of: Callable[[bytes], float]) -> Work:
        work = Work(of)
        monkeypatch.setattr(growth, "cpu_clock", work.clock)
        return work

    return make


def grow_all(target: Target) -> None:
    """Check larger variants of an input, each larger in another place."""
    for seed in range(20):
        check_growth(target, bytes(range(20)), random.Random(seed))


def test_proportional_work_is_accepted(
    counted: Callable[[Callable[[bytes], float]], Work],
) -> None:
    target = counted(len).target()
    grow_all(target)


def test_quadratic_work_is_found(counted: Callable[[Callable[[bytes], float]], Work]) -> None:
    target = counted(lambda data: len(data) ** 2 / 1000).target()
    with pytest.raises(TooMuchWork, match="times as long"):
        grow_all(target)


def test_what_is_loaded_once_is_accepted(
    counted: Callable[[Callable[[bytes], float]], Work],
) -> None:
    loads = iter([10**5])  # units: 10 s
    grow_all(counted(lambda data: len(data) + next(loads, 0)).target())


def test_input_that_is_always_slow_is_found(
    counted: Callable[[Callable[[bytes], float]], Work],
) -> None:
    target = counted(lambda data: 10**5 + len(data)).target()
    with pytest.raises(TooMuchWork, match=r"10\.\d s for \d+ bytes"):
        grow_all(target)


def test_one_slow_input_among_many_is_found(
    counted: Callable[[Callable[[bytes], float]], Work],
) -> None:
    target = counted(lambda data: 10**5 if data == b"slow" else len(data)).target()
    times = InputTimes(target)
    for number in range(1000):
        times.run(b"%d" % number)
    with pytest.raises(TooMuchWork, match="4 bytes take"):
        times.run(b"slow")


def test_memory_out_of_proportion_is_found() -> None:
    def check(data: bytes) -> None:
        bytearray(len(data) * 4000)

    target = Target(summary="", check=check, files=(), seeds=list)
    with pytest.raises(TooMuchWork, match="MiB"):
        grow_all(target)


@pytest.mark.parametrize("form", [Form.JSON, Form.MESSAGE_PACK])
def test_mutations_of_a_value_can_be_read(form: Form) -> None:
    value = {"a": [1, 2.5, "x", None, {"b": True}], "c": {}}
    changed = set()
    for seed in range(100):
        copy = mutations.read(mutations.write(value, form), form)
        data = mutations.write(mutations.mutate(copy, ["word"], random.Random(seed)), form)
        changed.add(json.dumps(mutations.read(data, form)))
    assert len(changed) > 60


def test_mutated_value_has_nothing_of_other_mutations() -> None:
    def mutations_of_one_input() -> list[str]:
        value: Any = {"a": [[], {}]}
        texts = []
        for seed in range(200):
            value = mutations.mutate(value, [], random.Random(seed))
            texts.append(repr(value))
            if len(texts[-1]) > 1000:
                value = {"a": [[], {}]}
        return texts

    assert mutations_of_one_input() == mutations_of_one_input()
