"""Which decisions of a planner become lines of its log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from dynamo_trtllm.planner.decide import (
    DRAINING,
    Decision,
    DecisionOutcome,
)
from dynamo_trtllm.planner.decision_log import DecisionLog
from dynamo_trtllm.protocol.shares import DECODE_ONLY, PREFILL_ONLY

CHANGE = Decision(outcome=DecisionOutcome.CHANGE, reason="more prompts", changes={1: PREFILL_ONLY})
OTHER_CHANGE = Decision(
    outcome=DecisionOutcome.CHANGE, reason="more streams", changes={1: DECODE_ONLY}
)
FITS = Decision(outcome=DecisionOutcome.FITS, reason="both limits are kept")
NOTHING_BETTER = Decision(outcome=DecisionOutcome.NOTHING_BETTER, reason="all are busy")
NO_LOADS = Decision(outcome=DecisionOutcome.NO_LOADS, reason="1 of 2 has reported")
TOO_SHORT = Decision(
    outcome=DecisionOutcome.NOTHING_BETTER, reason="busy", unreachable=("a token takes 9 ms",)
)


def logged(
    caplog: pytest.LogCaptureFixture, decisions: Sequence[Decision], *, is_advice: bool = False
) -> list[str]:
    """Return the lines from the level INFO on."""
    caplog.set_level(logging.DEBUG, "dynamo_trtllm.planner.decision_log")
    decision_log = DecisionLog(is_advice=is_advice)
    for decision in decisions:
        decision_log.add(decision, "m")
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.INFO]


def test_load_at_a_limit_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, [FITS, NOTHING_BETTER] * 10)
    assert lines == ["m: decided fits: both limits are kept"]
    others = [one for one in caplog.records if one.levelno == logging.DEBUG]
    assert len(others) == 19


def test_each_change_of_shares_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, [FITS, CHANGE, FITS, CHANGE])
    assert lines[1:] == ["m: decided change: more prompts"] * 2


def test_reasons_without_a_prediction_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, [NO_LOADS, NO_LOADS, FITS, NO_LOADS])
    assert [line.split()[2] for line in lines] == ["no_loads:", "fits:", "no_loads:"]


def test_same_advice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, [CHANGE, FITS, CHANGE, OTHER_CHANGE, CHANGE], is_advice=True)
    assert lines == [
        "m: would change 1=1/0: more prompts",
        "m: would change 1=0/1: more streams",
        "m: would change 1=1/0: more prompts",
    ]


def test_advice_names_a_limited_number_of_workers(caplog: pytest.LogCaptureFixture) -> None:
    many = msgspec.structs.replace(CHANGE, changes=dict.fromkeys(range(10, 60), DRAINING))
    (line,) = logged(caplog, [many], is_advice=True)
    assert line.startswith("m: would change a=0.25/0 b=0.25/0 ")
    assert line.endswith("29=0.25/0 and 18 more: more prompts")


def test_unreachable_limit_is_a_warning_until_shares_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = logged(caplog, [TOO_SHORT, FITS, TOO_SHORT, CHANGE, TOO_SHORT])
    assert lines.count("m: a token takes 9 ms") == 2
