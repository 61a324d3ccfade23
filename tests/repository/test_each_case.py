"""`each_case` runs every case, reports every failure, and leaves the fixtures to pytest."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.cases import each_case

SEEN: list[object] = []


@pytest.fixture
def ten() -> int:
    return 10


@each_case("number", [1, 2])
@each_case(("text", "size"), [("a", 1), pytest.param("bc", 2, id="two")])
def test_stacked_cases_run_in_every_combination(
    text: str, size: int, number: int, ten: int
) -> None:
    assert (len(text), ten) == (size, 10)
    SEEN.append((text, number))


def test_combinations_when_all_have_run_then_each_was_there_once() -> None:
    assert SEEN == [("a", 1), ("bc", 1), ("a", 2), ("bc", 2)]


@each_case("number", [1, 2])
async def test_coroutine_when_it_has_cases_then_it_is_awaited(number: int) -> None:
    await asyncio.sleep(0)
    assert number


def failing() -> Callable[..., Any]:
    @each_case("number", [0, 1, 2])
    def test(number: int, other: int) -> None:
        assert number == other

    return test


def test_all_failing_cases_are_reported_with_their_values() -> None:
    with pytest.raises(ExceptionGroup, match="2 of 3 cases failed") as several:
        failing()(other=1)
    notes = [exc.__notes__ for exc in several.value.exceptions]
    assert notes == [["in the case number=0"], ["in the case number=2"]]
    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases failed"):
        failing()(other=7)


def test_case_that_does_not_raise_is_reported_alone() -> None:
    @each_case("number", [0, 1])
    def test(number: int) -> None:
        with pytest.raises(ZeroDivisionError):
            divmod(1, number)

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as alone:
        test()
    assert alone.value.__notes__ == ["in the case number=1"]


def test_signature_when_read_by_pytest_then_it_has_fixtures_only() -> None:
    assert list(inspect.signature(failing()).parameters) == ["other"]


def test_case_with_a_mark_is_refused() -> None:
    with pytest.raises(AssertionError, match="marks"):
        each_case("number", [pytest.param(1, marks=pytest.mark.long)])
