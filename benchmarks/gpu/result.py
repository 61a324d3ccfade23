"""Reads and writes the result file of a step: measured values, targets and setup."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec

from . import machine

SCHEMA = 1


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the table."""

    what: str
    value: str
    bar: str = ""  # the target
    met: bool | None = None  # None: no target


class Result(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The result of a step."""

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


def make_result(
    step: str, *, setup: dict[str, Any], seconds: float, rows: list[Row], detail: dict[str, Any]
) -> Result:
    """Return a result with the current date, commit and machine."""
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
    """Write a result file, replacing an existing one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read(path: Path) -> Result:
    """Read a result file. Raise msgspec.ValidationError if it is invalid."""
    return msgspec.json.decode(path.read_bytes(), type=Result)
