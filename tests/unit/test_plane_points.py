"""Which loads the plane benchmark runs, and the command lines that it starts them with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plane.dynamo import Dynamo
from benchmarks.plane.measure import arguments
from benchmarks.plane.ours import Ours
from benchmarks.plane.points import (
    COMPARED,
    IDLE_STEP_S,
    POINTS,
    STEP_S,
    Engines,
    Point,
    by_engines,
    select,
)
from benchmarks.plane.report import BARS


def value(words: tuple[str, ...] | list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_select_when_named_then_those_in_that_order() -> None:
    assert [point.name for point in select(["burst-32", "paced-1"], quick=False)] == [
        "burst-32",
        "paced-1",
    ]


def test_select_quick_keeps_a_request_per_stream() -> None:
    for point in select([], quick=True):
        whole = next(other for other in POINTS if other.name == point.name)
        assert point.streams <= point.requests <= whole.requests
        assert point.streams == whole.streams


def test_select_when_unknown_then_key_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        select(["nowhere"], quick=False)


def test_by_engines_alternates_the_kinds() -> None:
    points = [
        Point(name=str(at), pace_s=at % 2, streams=1, requests=1, pairs=1 + at // 4)
        for at in range(6)
    ]
    grouped = [(engines, [point.name for point in group]) for engines, group in by_engines(points)]
    assert grouped == [
        (Engines(0, 1), ["0", "2"]),
        (Engines(1, 1), ["1", "3"]),
        (Engines(0, 2), ["4"]),
        (Engines(1, 2), ["5"]),
    ]


def test_env_of_ours_prefers_another_checkout() -> None:
    ours = Ours()
    other = Ours(Path("/other"))
    assert "PYTHONPATH" not in ours.env("e", "n")
    env = other.env("e", "n")
    assert (env["PYTHONPATH"], env["PYTHONSAFEPATH"], env["NATS_SERVER"]) == ("/other", "1", "n")
    assert ours.name != other.name


def test_bars_when_read_then_all_are_at_compared_points() -> None:
    assert {bar.point for bar in BARS} <= set(COMPARED) <= {point.name for point in POINTS}


def test_arguments_of_many_streams_share_clients() -> None:
    (point,) = select(["slow-3600"], quick=False)
    words = list(arguments(point, "http://h:1", {"frontend": 7}))
    assert (value(words, "--processes"), value(words, "--pid")) == ("4", "frontend=7")
    assert "--fresh-connections" not in words


def test_arguments_when_churn_then_connections_are_fresh() -> None:
    (point,) = select(["churn-32"], quick=False)
    assert "--fresh-connections" in arguments(point, "http://h:1", {})


def test_arguments_when_idle_then_another_client() -> None:
    (point,) = select(["idle-1000"], quick=False)
    words = arguments(point, "http://h:1", {})
    assert (words[1], value(list(words), "--seconds")) == ("benchmarks.plane.idle", "10.0")


@pytest.mark.parametrize(
    ("pace_s", "role", "step"), [(0.04, "decode", "0.04"), (IDLE_STEP_S, "prefill", "0.0")]
)
def test_worker_of_ours_when_paced_then_the_engine_steps_at_it(
    pace_s: float, role: str, step: str
) -> None:
    assert f'"step_s":{step},' in value(list(Ours().worker(role, pace_s)), "--override-engine-args")


def test_dynamo_worker_speed_is_a_ratio_to_its_step() -> None:
    theirs = Dynamo(Path("somewhere"), "fastokens")
    assert float(value(list(theirs.worker("decode", STEP_S)), "--speedup-ratio")) == 1.0
    assert float(value(list(theirs.worker("decode", 2 * STEP_S)), "--speedup-ratio")) == 0.5
    assert float(value(list(theirs.worker("decode", 0.0)), "--speedup-ratio")) > 1000
