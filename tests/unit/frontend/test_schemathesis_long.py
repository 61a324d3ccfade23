"""The same as test_schemathesis.py, with many more requests.

Collected with `--long` only: see conftest.py.
"""

from __future__ import annotations

import pytest
import schemathesis

from tests.unit.frontend.test_schemathesis import bounded, check_answer, described

schema = described(coverage=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@schema.parametrize()
@bounded(400)
def test_generated_requests_are_answered_as_described(case: schemathesis.Case) -> None:
    check_answer(case)
