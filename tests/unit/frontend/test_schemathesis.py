"""Generated requests: what `/openapi.json` forbids is rejected, and every answer is as described."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "examples", [5, pytest.param(400, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_generated_requests_then_answers_as_described(
    subtests: pytest.Subtests, examples: int
) -> None:
    from tests.unit.frontend import generated_requests

    for operation in generated_requests.operations():
        with subtests.test(operation.label):
            generated_requests.check(operation, examples)
