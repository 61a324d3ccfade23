"""The arithmetic of a GPU run: what counts as equal, ratios and bars, phases, prompts,
arguments.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from benchmarks.gpu import main, overhead, tokens, topology_8gpu
from benchmarks.gpu.deployment import phases
from benchmarks.gpu.overhead import OURS, THEIRS, ArmResults
from benchmarks.gpu.parity import Answers, Reference, common_prefix_share, differences, equal
from benchmarks.gpu.parity import rows as parity_rows
from benchmarks.gpu.scenario import parse_phases, shape_rows
from benchmarks.load_client import Load


def test_equal_when_one_is_an_error_then_it_equals_nothing() -> None:
    assert equal({1: "a", 2: "b", 3: None}, {1: "a", 2: "c", 3: None, 4: "d"}) == 1


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [("ab", "ab", 1.0), ("abcd", "abxd", 0.5), ("", "", 1.0), ("ab", None, 0.0), ("a", "ab", 0.5)],
)
def test_common_when_texts_part_then_it_is_the_share_before(
    one: str, other: str | None, share: float
) -> None:
    assert common_prefix_share(one, other) == common_prefix_share(other, one) == share


@pytest.mark.parametrize(
    ("alone", "loaded", "met"),
    [("ab", "ab", [True, True]), ("xb", "ab", [False, True]), ("ab", None, [True, False])],
)
def test_parity_when_answers_part_then_its_bar_is_missed(
    alone: str, loaded: str | None, met: list[bool]
) -> None:
    wanted = Answers({1: "ab", 2: "c"}, {1: "ab", 2: "c"})
    again = Answers({1: "ab", 2: "c"}, {1: "ab", 2: "d"})
    found = Answers({1: alone, 2: "c"}, {1: loaded, 2: "x"})
    rows = parity_rows(Reference(wanted, again), found, 32)
    assert [row.met for row in rows] == [met[0], None, met[1], None]
    assert "2 different answers" in rows[0].value
    assert rows[3].value.startswith("1 of 2; 50% of a text")


def test_different_answers_report_the_prompt_length() -> None:
    found = differences({1: "ab", 2: "ax"}, {1: "ab", 2: "ab"}, [100, 200])
    assert found == [{"prompt_tokens": 200, "common": 0.5}]


def test_prompts_differ_and_repeat_with_the_seed() -> None:
    found = tokens.prompts(4, 50, seed=1)
    assert {len(prompt) for prompt in found} == {50}
    assert len({tuple(prompt) for prompt in found}) == 4
    assert found == tokens.prompts(4, 50, seed=1)
    assert found != tokens.prompts(4, 50, seed=2)


def test_prompts_include_both_length_bounds() -> None:
    lengths = [len(prompt) for prompt in tokens.prompts_between(64, 100, 16_000, seed=1)]
    assert (lengths[0], lengths[-1]) == (100, 16_000)
    assert lengths == sorted(lengths)


def test_completions_get_prompt_ids_unchanged() -> None:
    load = Load(url="http://h:1", model="m", osl=3, extra={"temperature": 0})
    client = tokens.TokensClient(load, [[1, 2], [3]])
    head, _, body = client._request(2).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    sent = orjson.loads(body)
    assert (sent["prompt"], sent["max_tokens"], sent["temperature"], sent["ignore_eos"]) == (
        [3],
        3,
        0,
        True,
    )


def measured(tokens_per_s: list[float], ttft_ms: list[float], errors: int = 0) -> ArmResults:
    found = ArmResults()
    found.tokens_per_s = tokens_per_s
    found.ttft_ms = {8192: ttft_ms}
    found.errors = errors
    return found


@pytest.mark.parametrize(
    ("ours", "added", "met"),
    [(99.0, 9.0, [True, True]), (97.0, 9.0, [False, True]), (99.0, 11.0, [True, False])],
)
def test_overhead_when_compared_then_rounds_meet_the_bars_or_not(
    ours: float, added: float, met: list[bool]
) -> None:
    found = {
        OURS: measured([1.0, ours, 200.0], [added, 100.0 + added, 900.0]),
        THEIRS: measured([100.0, 100.0, 100.0], [100.0]),
    }
    rows = overhead.rows(found)
    assert [row.met for row in rows[:2]] == met
    assert f"{ours / 100:.3f}" in rows[0].value
    assert rows[2].met is True


def test_overhead_when_one_arm_did_not_answer_then_no_bar_is_met() -> None:
    rows = overhead.rows({OURS: measured([1.0], [1.0], errors=2), THEIRS: ArmResults()})
    assert [row.met for row in rows] == [False, False]


@pytest.mark.parametrize(
    ("gpus", "places", "count"), [(0, 2, 2), (1, 2, 2), (2, 2, 2), (2, 1, 1), (8, 2, 2)]
)
def test_sittings_of_two_halves_alternate_the_arms(gpus: int, places: int, count: int) -> None:
    found = overhead._placements(gpus, places)
    assert len(found) == count
    assert all(len(sitting) == (2 if gpus > 1 else 1) for sitting in found)
    if gpus > 1 and places == 2:
        assert found[0] != found[1]


def test_phases_of_models_are_added_up() -> None:
    text = (
        'dynamo_trtllm_phase_seconds_bucket{model="a",phase="prefill",le="1"} 3\n'
        'dynamo_trtllm_phase_seconds_sum{model="a",phase="prefill"} 1.5\n'
        'dynamo_trtllm_phase_seconds_count{model="a",phase="prefill"} 3.0\n'
        'dynamo_trtllm_phase_seconds_sum{model="b",phase="prefill"} 0.5\n'
        'dynamo_trtllm_phase_seconds_count{model="b",phase="prefill"} 1.0\n'
        'dynamo_trtllm_phase_seconds_sum{model="a",phase="kv_transfer"} 0.25\n'
        'dynamo_trtllm_phase_seconds_count{model="a",phase="kv_transfer"} 5.0\n'
    )
    assert parse_phases(text) == {"prefill": (2.0, 4.0), "kv_transfer": (0.25, 5.0)}


def test_start_phases_report_the_last_log() -> None:
    lines = [
        "decode | Graph capturing finished in 40 secs",
        "x",
        "decode | Graph capturing finished in 48 secs",
    ]
    assert phases(lines) == {"CUDA graphs captured": "Graph capturing finished in 48 secs"}


def test_shapes_report_tokens_per_gpu_and_silent_arms() -> None:
    quantiles = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
    good: dict[str, Any] = {
        "tokens_per_s": 100.0,
        "ttft_ms": quantiles,
        "itl_ms": quantiles,
        "errors": {},
    }
    silent = {
        "tokens_per_s": 0.0,
        "ttft_ms": {},
        "itl_ms": {},
        "errors": {"connect": 2},
        "phase_ms": {},
    }
    rows = shape_rows(
        "aggregated",
        {"1/2 at 3": good | {"phase_ms": {"prefill": 5.0}}, "4/5 at 6": silent},
        gpus=2,
    )
    assert [row.what for row in rows] == [
        "1/2 at 3, aggregated",
        "1/2 at 3, aggregated: mean ms per request",
        "4/5 at 6, aggregated",
    ]
    assert rows[0].value.startswith("50 tokens/s/GPU")
    assert "connect" in rows[2].value


@pytest.mark.parametrize(
    "argv", [["--only", "parity,nothing"], ["--victims", "frontend"], ["--engine-args", "[1]"]]
)
def test_arguments_that_name_missing_things_are_rejected(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.arguments(argv)
    assert ended.value.code == 2
    assert "unknown" in (said := capsys.readouterr().err) or "JSON object" in said


def test_arguments_shapes_replace_the_guides() -> None:
    args = main.arguments(["--shapes", "10/20/3,40/50/6", "--engine", "mock"])
    assert main.sizes_of(args).shapes == ((10, 20, 3), (40, 50, 6))


def test_topology_help_has_the_flags_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = []
    for arguments in (topology_8gpu.arguments, main.arguments):
        with pytest.raises(SystemExit):
            arguments(["--help"])
        flags.append(set(re.findall(r"--[a-z-]+", capsys.readouterr().out)))
    assert flags[1] <= flags[0]


def test_topology_defaults_to_guide_shapes_and_one_kill() -> None:
    args = topology_8gpu.arguments(["--out", "/o", "--gpus", "0,1"])
    assert args.only == ["startup", "parity", "shapes", "kill"]
    assert args.victims == ["prefill"]
    assert main.sizes_of(args).shapes == topology_8gpu.SHAPES
    assert str(args.out) == "/o/steps"
    assert args.budget_s == 1500
    assert topology_8gpu.arguments(["--budget-s", "60"]).budget_s == 60
    assert args.gpus == "0,1"
