"""The short form of a request id, with which people find a request's lines in the logs."""

from __future__ import annotations

import pytest

from dynamo_trtllm.observability.logging import short_id


@pytest.mark.parametrize(
    ("request_id", "short"),
    [
        ("0123456789abcdef", "01234567"),
        ("0123456789abcdef-2", "01234567-2"),  # the third of several choices
        ("mine-0123456789abcdef", "01234567"),
        ("probe-5", "probe-5"),
    ],
)
def test_short_id_has_unique_beginning_and_choice(request_id: str, short: str) -> None:
    assert short_id(request_id) == short
