"""Runs many short cases as one test.

pytest and pytest-xdist take 5 ms of CPU time for a test, which is more than most cases take.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

_PARAM: Final = type(pytest.param())
_MAX_CHARS: Final = 300  # of a case, in the report of its failure


def each_case(
    names: str | Sequence[str], cases: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test function for each case, and report all cases that fail.

    This is `pytest.mark.parametrize` for cases that take milliseconds. The cases share the fixtures
    of the test. Use `parametrize` where a case needs a mark, or fixtures of its own.

    Args:
        names: the parameters that a case sets, as for `parametrize`.
        cases: their values, as for `parametrize`.
    """
    known = [_Case(names, values) for values in cases]
    assert known, "a test without cases tests nothing"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(**fixtures: Any) -> None:
                failures: list[BaseException] = []
                for case in known:
                    with case.noting(failures):
                        await test(**case.values, **fixtures)
                _report(failures, len(known))

            run: Callable[..., Any] = run_async
        else:

            @functools.wraps(test)
            def run_all(**fixtures: Any) -> None:
                failures: list[BaseException] = []
                for case in known:
                    with case.noting(failures):
                        test(**case.values, **fixtures)
                _report(failures, len(known))

            run = run_all
        signature = inspect.signature(test)
        others = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.name not in known[0].values
        ]
        # pytest takes what is left for fixtures
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


class _Case:
    """The arguments of one call of the test."""

    def __init__(self, names: str | Sequence[str], values: Any) -> None:
        self._id = ""
        if isinstance(values, _PARAM):
            assert not values.marks, "a case can't have marks; use pytest.mark.parametrize"
            self._id = str(values.id)
            values = (
                values.values if not isinstance(names, str) or "," in names else values.values[0]
            )
        split = names.replace(" ", "").split(",") if isinstance(names, str) else names
        row = (values,) if len(split) == 1 and isinstance(names, str) else tuple(values)
        self.values: dict[str, Any] = dict(zip(split, row, strict=True))

    @contextmanager
    def noting(self, failures: list[BaseException]) -> Iterator[None]:
        """Add the failure of this case to the others."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - raised by `_report`
            exc.add_note(f"in the case {self}")
            failures.append(exc)

    def __str__(self) -> str:
        text = self._id or ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        return text[:_MAX_CHARS]


def _report(failures: Sequence[BaseException], count: int) -> None:
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {count} cases failed", failures)
