"""One result file per step: what was measured, where, and against which bar. The form that tables are made of."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu import machine

SCHEMA = 1


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the table. `met` is None where nothing is asked."""

    what: str
    value: str
    bar: str = ""
    met: bool | None = None


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A step of a run."""

    schema: int
    step: str
    date: str  # ISO, UTC
    commit: str
    machine: dict[str, str]
    versions: dict[str, str]
    setup: dict[str, Any]  # engine, layers, GPUs, arguments
    seconds: float
    rows: list[Row]
    detail: dict[str, Any]  # the numbers behind the rows


def result(step: str, *, setup: dict[str, Any], seconds: float, rows: list[Row], detail: dict[str, Any]) -> Result:
    """Of now and here."""
    return Result(
        schema=SCHEMA,
        step=step,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=machine.commit(),
        machine=machine.machine(),
        versions=machine.versions(),
        setup=setup,
        seconds=round(seconds, 1),
        rows=rows,
        detail=detail,
    )


def write(found: Result, path: Path) -> None:
    """Replaces what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read(path: Path) -> Result:
    """Raises msgspec.ValidationError naming the field for a file of another form."""
    return msgspec.json.decode(path.read_bytes(), type=Result)
