"""One request, two requests."""

from __future__ import annotations

from dynamo_trtllm.cli.plan import _rate
from dynamo_trtllm.protocol.counted import counted, counted_are
from tests.kit.cases import each_case


@each_case(
    ("count", "text"), [(0, "0 tokens"), (1, "1 token"), (1.0, "1.0 token"), (2, "2 tokens")]
)
def test_only_one_is_singular(count: float, text: str) -> None:
    assert counted(count, "token") == text


def test_count_may_be_shown_otherwise_and_have_a_verb() -> None:
    assert counted(1000, "request", "1,000") == "1,000 requests"
    assert [counted_are(count, "line") for count in (1, 2)] == ["1 line is", "2 lines are"]


def test_rate_of_plan_has_the_singular_for_one() -> None:
    assert [_rate(rate) for rate in (0.5, 1.0, 2.0)] == [
        "0.5 requests/s",
        "1 request/s",
        "2 requests/s",
    ]
