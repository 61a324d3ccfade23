"""Result files and the tables of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu.report import section, table
from benchmarks.gpu.result import Result, Row, make_result, read, write
from benchmarks.gpu.topology_8gpu import merged

ROOT = Path(__file__).parents[3]


def made(step: str = "parity", *rows: Row, date: str = "2026-01-02T03:04:05+00:00") -> Result:
    return Result(
        schema=1,
        step=step,
        date=date,
        commit="abc",
        machine={"gpus": "2 x H", "cpus": "8"},
        versions={"vllm": "1"},
        setup={"engine": "vllm", "layers": 4, "engine_arguments": {"a": 1}},
        seconds=1.5,
        rows=list(rows) or [Row(what="same", value="3 of 3", bar="all", met=True)],
        detail={"same": 3},
    )


def test_result_when_written_then_it_is_read_back_whole(tmp_path: Path) -> None:
    write(made(), tmp_path / "new" / "parity.json")
    assert read(tmp_path / "new" / "parity.json") == made()


@pytest.mark.parametrize(
    "change", [{"seconds": "long"}, {"rows": [{"what": "x"}]}, {"another": 1}, {"date": None}]
)
def test_result_of_another_form_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    data = msgspec.to_builtins(made()) | change
    (tmp_path / "x.json").write_bytes(msgspec.json.encode(data))
    with pytest.raises(msgspec.ValidationError):
        read(tmp_path / "x.json")


def test_result_has_time_place_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123abc")
    found = make_result("parity", setup={}, seconds=1.23, rows=[], detail={})
    assert (found.commit, found.seconds) == ("0123abc", 1.2)
    assert found.date.endswith("+00:00")
    assert found.machine["cpus"]


def test_table_reports_a_missed_bar_and_escapes_cells() -> None:
    text = table(
        [
            made(
                "kill",
                Row(what="a|b", value="line\nline", bar="x", met=False),
                Row(what="c", value="d"),
            )
        ]
    )
    assert text.splitlines()[2:] == [
        "| kill | a\\|b | line line | x | **no** |",
        "| kill | c | d |  |  |",
    ]


def test_section_ends_with_newest_run_and_its_machine(tmp_path: Path) -> None:
    write(made("parity", date="2026-05-01T00:00:00+00:00"), tmp_path / "a" / "parity.json")
    write(made("cancels", date="2026-05-01T00:01:00+00:00"), tmp_path / "a" / "cancels.json")
    write(made("parity", date="2026-04-01T00:00:00+00:00"), tmp_path / "b" / "parity.json")
    write(made("parity"), tmp_path / "a" / "steps" / "parity.json")  # parts of another result
    text = section(tmp_path)
    assert text.index("### b") < text.index("### a") < text.index("| cancels |")
    assert text.count("| parity |") == 2
    assert "2 x H; 8 CPUs" in text
    assert "engine vllm, layers 4" in text
    assert "engine arguments" not in text


def test_results_of_this_repository_have_tables() -> None:
    folder = ROOT / "benchmarks" / "results" / "gpu"
    text = section(folder)
    assert [
        name for name in folder.iterdir() if name.is_dir() and f"### {name.name}\n" not in text
    ] == []


def test_topology_rows_name_their_step() -> None:
    found = merged(
        [
            made("parity"),
            made("kill-prefill", Row(what="back", value="never", bar="at all", met=False)),
        ]
    )
    assert [(row.what, row.met) for row in found.rows] == [
        ("parity: same", True),
        ("kill-prefill: back", False),
    ]
    assert found.seconds == 3.0
    assert set(found.detail) == {"parity", "kill-prefill"}
