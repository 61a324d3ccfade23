"""The file with the lines of a deployment: its bounded size, and its reader."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_trtllm.launch import log_file as module
from dynamo_trtllm.launch.log_file import LogReader, log_file, older, split_line
from tests.kit.waiting import SOON_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.log"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file ends after a few lines."""
    monkeypatch.setattr(module, "MAX_BYTES", 30)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def texts(reader: LogReader) -> list[str]:
    return [split_line(line)[1] for line in reader.lines()]


def written(path: Path) -> str:
    """Return all lines. The writer may begin a new file just now."""
    text = ""
    for each in (older(path), path):
        with suppress(FileNotFoundError):
            text += each.read_text()
    return text


def test_lines_are_in_the_file_with_their_process(path: Path) -> None:
    with log_file(path, "launch") as add:
        add("decode", "one | two")
        add("launch", "é\udcff")
    assert path.read_text() == "decode | one | two\nlaunch | é?\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert split_line(b"decode | one | two") == ("decode", "one | two")


@pytest.mark.usefixtures("short")
def test_files_have_a_bounded_size_and_the_latest_lines(path: Path) -> None:
    with log_file(path, "launch") as add:
        for number in range(102):
            add("w", f"{number:03}")
            wait_until(lambda: f"{number:03}" in written(path))  # noqa: B023
        size = sum(each.stat().st_size for each in path.parent.iterdir())
    assert size <= 2 * 30 + 10
    assert sorted(each.name for each in path.parent.iterdir()) == ["lines.log", "lines.log.1"]
    with LogReader(path) as reader:
        assert texts(reader) == [f"{number:03}" for number in range(96, 102)]


@pytest.mark.usefixtures("short")
def test_reader_follows_into_the_next_file(path: Path) -> None:
    with log_file(path, "launch") as add:
        add("w", "0")
        wait_until(lambda: "0" in written(path))
        with LogReader(path) as reader:
            assert texts(reader) == ["0"]
            for number in range(1, 8):
                add("w", str(number))
                wait_until(lambda: f"w | {number}" in written(path))  # noqa: B023
            assert texts(reader) == [str(number) for number in range(1, 8)]
            assert texts(reader) == []


def test_reader_waits_for_the_end_of_a_line(path: Path) -> None:
    with path.open("wb", buffering=0) as file, LogReader(path) as reader:
        file.write(b"w | be")
        assert texts(reader) == []
        file.write(b"gun\nw | next")
        assert texts(reader) == ["begun"]


@pytest.mark.usefixtures("short")
def test_file_that_cannot_be_replaced_stays_bounded(path: Path) -> None:
    with log_file(path, "launch") as add:
        os.mkdir(older(path))
        for number in range(20):
            add("w", f"{number:03}")
            wait_until(lambda: os.path.getsize(path) <= 40)
    assert path.stat().st_size <= 40


def test_reader_reads_what_was_added_just_before_the_next_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"w | 0\n")
    look = LogReader._has_new_file
    late_lines = [b"w | 1\n"]

    def add_and_look(reader: LogReader) -> bool:
        """The writer ends the file after the reader has read it, and before it looks."""
        while late_lines:
            with path.open("ab") as file:
                file.write(late_lines.pop())
            path.replace(older(path))
            path.write_bytes(b"w | 2\n")
        return look(reader)

    monkeypatch.setattr(LogReader, "_has_new_file", add_and_look)
    with LogReader(path) as reader:
        assert texts(reader) == ["0", "1", "2"]
