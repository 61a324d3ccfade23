"""Reads and writes the results of a run: a JSON file, the records of all requests, and a CSV
file.
"""

from __future__ import annotations

import csv
import gzip
import statistics
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..stream import RequestRecord
from ..summary import LoadSummary
from .shapes import Level, Shape
from .steady import Steady

RUN_FILE = "run.json"
RECORDS_FILE = "records.jsonl.gz"
CSV_FILE = "summary.csv"
REPORT_FILE = "report.html"


class Point(msgspec.Struct, kw_only=True):
    """One repetition at one level of the load."""

    level: Level
    repetition: int
    origin_s: float  # the client's clock at its first request
    figures: LoadSummary
    steady: Steady | None
    good: int | None = None  # requests that met all goals; None: there are no goals
    # mean seconds per request in each phase, from the server's metrics
    phase_s: dict[str, float] = {}


class Run(msgspec.Struct, kw_only=True):
    """A run without its records."""

    shape: Shape
    url: str
    model: str
    driver: str  # "client" or "aiperf"
    began_at: str  # ISO 8601
    gpus: int | None
    machine: dict[str, str]
    goals_ms: dict[str, float] = {}  # longest times of a good request, by the names of goodput.py
    points: list[Point] = []


class Line(msgspec.Struct, kw_only=True):
    """One request of one point."""

    level: Level
    repetition: int
    record: RequestRecord


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and range of a metric over the repetitions."""

    median: float
    low: float
    high: float


Summary = dict[Level, dict[str, Spread]]  # by level of the load, by metric


def metrics_of(point: Point, gpus: int | None) -> dict[str, float]:
    """Return the metrics of a point, times in milliseconds. Metrics without values are left out."""
    figures = point.figures
    total = figures["ok"] + sum(figures["errors"].values())
    found = {
        "output_tokens_per_s": figures["tokens_per_s"],
        "requests_per_s": figures["requests_per_s"],
        "error_share": 1 - figures["ok"] / total if total else 1.0,
    }
    if point.good is not None:
        found["goodput_requests_per_s"] = point.good / figures["wall_s"]
        found["good_share"] = point.good / total if total else 0.0
    if point.steady is not None:
        found["steady_output_tokens_per_s"] = point.steady.output_tokens_per_s
    if gpus:
        found["output_tokens_per_s_per_gpu"] = figures["tokens_per_s"] / gpus
    for name, values in (
        ("ttft", figures["ttft_ms"]),
        ("itl", figures["itl_ms"]),
        ("tpot", figures["tpot_ms"]),
        ("e2e", figures["e2e_ms"]),
    ):
        found |= {
            f"{name}_{quantile}_ms": values[quantile]
            for quantile in ("p50", "p99")
            if quantile in values
        }
    if found.get("tpot_p50_ms"):
        found["output_tokens_per_s_per_user"] = 1000 / found["tpot_p50_ms"]
    return found


METRICS = (
    "output_tokens_per_s",
    "steady_output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "output_tokens_per_s_per_user",
    "requests_per_s",
    "goodput_requests_per_s",
    "good_share",
    "error_share",
    *(
        f"{name}_{quantile}_ms"
        for name in ("ttft", "itl", "tpot", "e2e")
        for quantile in ("p50", "p99")
    ),
)


def summary(run: Run) -> Summary:
    """Return median, lowest and highest value of each metric by level of the load."""
    found: Summary = {}
    for level in sorted({point.level for point in run.points}):
        rows = [metrics_of(point, run.gpus) for point in run.points if point.level == level]
        found[level] = {
            name: _spread([row[name] for row in rows])
            for name in METRICS
            if all(name in row for row in rows)
        }
    return found


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def save(run: Run, lines: Iterable[Line], folder: Path) -> None:
    """Write the three files and create the folder. Raise OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
    encoder = msgspec.json.Encoder(enc_hook=list)
    with gzip.open(folder / RECORDS_FILE, "wb", compresslevel=3) as file:
        for line in lines:
            file.write(encoder.encode(line) + b"\n")
    with (folder / CSV_FILE).open("w", newline="") as text:
        writer = csv.writer(text)
        writer.writerow([run.shape.level_name, "metric", "median", "low", "high"])
        for level, row in summary(run).items():
            writer.writerows(
                [level.value, name, s.median, s.low, s.high] for name, s in row.items()
            )


def load_run(folder: Path) -> Run:
    """Read a run. Raise ValueError if the folder has no valid run."""
    try:
        return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError) as exc:
        raise ValueError(f"{folder} has no run of {__package__}: {exc}") from exc


def load_lines(folder: Path) -> list[Line]:
    """Read the records. Raise ValueError if the folder has no valid records."""
    try:
        with gzip.open(folder / RECORDS_FILE, "rb") as file:
            return [_line(msgspec.json.decode(text)) for text in file]
    except (OSError, msgspec.DecodeError, TypeError, KeyError) as exc:
        raise ValueError(f"{folder} has no records of {__package__}: {exc}") from exc


def _line(found: dict[str, Any]) -> Line:
    """Build a line by hand: msgspec decoders don't support `array.array`."""
    record = found["record"]
    record["gaps_s"] = array("d", record["gaps_s"])
    return Line(
        level=Level(**found["level"]),
        repetition=found["repetition"],
        record=RequestRecord(**record),
    )
