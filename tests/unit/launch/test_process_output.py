from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.launch.process_output import ProcessOutput, next_line
from dynamo_trtllm.support.subprocesses import RunFailed


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line_outside_a_terminal_is_padded_and_plain():
    stream = io.StringIO()
    output = ProcessOutput(stream, ["frontend", "w"])
    output.line("w", "text")
    output.say("two\nlines")
    assert stream.getvalue() == "w        | text\nlaunch   | two\nlaunch   | lines\n"


@pytest.mark.parametrize("is_json", [True, False])
def test_line_on_full_disk_gives_one_line_on_stderr(
    is_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        output = ProcessOutput(io.TextIOWrapper(full, write_through=True), ["w"], is_json=is_json)
        for _ in range(3):
            output.line("w", "text")
    assert output.failure is None
    assert (
        capsys.readouterr().err
        == "launch: the output can't be written: No space left on device; lines are lost\n"
    )


def test_line_when_a_terminal_then_each_name_has_its_color():
    stream = Terminal()
    output = ProcessOutput(stream, ["a", "b"])
    output.line("a", "x")
    output.line("b", "x")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("\x1b[36m")
    assert second.startswith("\x1b[33m")
    assert first.endswith("\x1b[0m x")


def test_line_with_no_color_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    ProcessOutput(stream, ["a"]).line("a", "x")
    assert stream.getvalue() == "a      | x\n"


def test_info_line_on_a_terminal_has_at_most_100_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    output = ProcessOutput(stream, ["frontend"])
    begin = "2026-11-29T16:40:01.123Z {} frontend frontend.requests: request 1 "
    output.line("frontend", begin.format("INFO") + "x" * 400)
    output.line("frontend", begin.format("INFO").replace("end f", "end 034b f") + "ended")
    output.line("frontend", begin.format("ERROR") + "x" * 400)
    long, short, error = stream.getvalue().splitlines()
    assert len(long) == 100
    assert long.startswith("frontend | 16:40:01 request 1 xxx")
    assert long.endswith("x…")
    assert short == "frontend | 16:40:01 034b request 1 ended"
    assert error.endswith("x" * 400)


def test_lines_are_kept_in_a_file_whole_and_once(tmp_path: Path) -> None:
    stream = Terminal()
    output = ProcessOutput(stream, ["a"])
    path = tmp_path / "lines.log"
    line = "2026-11-29T16:40:01Z INFO a x.y: " + "x" * 400
    with output.keeping_lines(path) as kept:
        assert kept == str(path)
        with output.hiding_lines():
            output.line("a", line)
    assert path.read_text() == f"a | {line}\n"
    with output.keeping_lines(tmp_path / "no" / "folder") as kept:
        assert kept == ""
    assert "dynamo-trtllm logs has no lines of this deployment" in stream.getvalue()


def test_hidden_lines_are_written_if_the_run_fails() -> None:
    stream = io.StringIO()
    output = ProcessOutput(stream, ["a"])

    def fail() -> None:
        with output.hiding_lines():
            output.line("a", "why")
            raise RunFailed("it failed")

    with output.hiding_lines():
        output.line("a", "hidden")
        output.write("shown\n")
    with pytest.raises(RunFailed):
        fail()
    assert stream.getvalue() == "shown\na      | why\n"


def test_json_line_has_the_process_name() -> None:
    stream = Terminal()
    output = ProcessOutput(stream, ["frontend", "prefill-2"], is_json=True)
    output.line(
        "prefill-2", '{"time": "t", "level": "error", "process": "prefill", "message": "own"}'
    )
    output.line("frontend", '{"process": "frontend-3", "message": "of one of its processes"}')
    output.line("prefill-2", "\x1b[31mof a library")
    output.line("prefill-2", "[" * 100_000)
    output.say("two\nlines")
    own, member, library, nested, *said = map(json.loads, stream.getvalue().splitlines())
    assert own == {"time": "t", "level": "error", "process": "prefill-2", "message": "own"}
    assert member["process"] == "frontend-3"
    assert (library["process"], library["message"], library["level"]) == (
        "prefill-2",
        "\x1b[31mof a library",
        "info",
    )
    assert len(nested["message"]) < 4_100
    assert [(line["process"], line["message"]) for line in said] == [
        ("launch", "two"),
        ("launch", "lines"),
    ]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


ROUTINE = "2026-01-01T00:00:00.000Z INFO prefill x: routine"
SHORT = "prefill  | 00:00:00 routine"  # on a terminal
WARNING = "2026-01-01T00:00:00.000Z WARNING prefill - x: looked at"


def shown(stream: io.StringIO) -> str:
    """What was written, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_starting_without_extra_cli_writes_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    output = ProcessOutput(terminal, ["prefill"])
    with output.starting():
        output.report_ready("prefill", 1.0, "as instance ab")
        assert shown(terminal) == "launch  | prefill is ready after 1.00 s as instance ab\n"


def test_starting_on_a_terminal_shows_live_lines_and_panel(terminal: Terminal) -> None:
    output = ProcessOutput(terminal, ["frontend", "prefill"])
    with output.starting():
        output.report_phase("prefill", "loading: loading weights 43%, 3.1 GiB of GPU memory used")
        output.report_phase("frontend", "")
        output.report_ready("etcd", 0.25, "at 127.0.0.1:1")
        output.line("prefill", ROUTINE)
        output.line("prefill", WARNING)
        assert output.end_start("Ready", [("URL", "http://localhost:8000/v1")])
    output.line("prefill", ROUTINE)
    lines = [line.rstrip() for line in shown(terminal).splitlines()]
    assert "✓ etcd       0.2 s ready at 127.0.0.1:1" in lines
    assert any(re.fullmatch(r"… frontend +\d+\.\d s importing", line) for line in lines)
    assert any(
        re.fullmatch(r"… prefill +\d\.\d s loading: loading weights 43%, 3\.1 GiB .*", line)
        for line in lines
    )
    assert "  URL  http://localhost:8000/v1" in lines
    assert f"prefill  | {WARNING}" in lines
    assert lines.count(SHORT) == 1  # the one after the start


def test_starting_failure_writes_the_hidden_lines(terminal: Terminal) -> None:
    output = ProcessOutput(terminal, ["prefill"])

    def start() -> None:
        with output.starting():
            output.line("prefill", ROUTINE)
            assert ROUTINE not in shown(terminal)
            raise RunFailed("no")

    with pytest.raises(RunFailed):
        start()
    assert shown(terminal).endswith(f"prefill | {ROUTINE}\n")


def test_starting_stopped_by_the_user_hides_lines(terminal: Terminal) -> None:
    output = ProcessOutput(terminal, ["prefill"])
    with output.starting():
        output.line("prefill", ROUTINE)
    assert ROUTINE not in shown(terminal)
    assert not output.end_start()


@pytest.mark.parametrize("kind", ["pipe", "dumb", "json"])
def test_starting_without_live_lines_writes_each_line(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("TERM", "dumb" if kind == "dumb" else "xterm")
    stream = io.StringIO() if kind == "pipe" else Terminal()
    output = ProcessOutput(stream, ["prefill"], is_json=kind == "json")
    with output.starting():
        output.report_phase("prefill", "loading")
        output.report_ready("prefill", 1.25, "as instance 1")
        output.line("prefill", ROUTINE)
        assert not output.end_start("Ready", [("URL", "u")])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "prefill is ready after 1.25 s as instance 1" in lines[0]
    assert "routine" in lines[1]


async def lines_of(*parts: bytes, limit: int = 1 << 20) -> list[str]:
    reader = asyncio.StreamReader(limit=limit)
    reading = asyncio.create_task(read(reader))
    for part in parts:
        reader.feed_data(part)
        await asyncio.sleep(0)
    reader.feed_eof()
    return await reading


async def read(reader: asyncio.StreamReader) -> list[str]:
    lines = []
    while (line := await next_line(reader)) is not None:
        lines.append(line)
    return lines


async def test_next_line_joins_pieces() -> None:
    text = "one\r\nzwei \u00fc\n\nlast".encode()
    assert await lines_of(*(text[i : i + 1] for i in range(len(text)))) == [
        "one",
        "zwei \u00fc",
        "",
        "last",
    ]
    assert await lines_of(b"all\n") == ["all"]
    assert await lines_of() == []


async def test_next_line_over_limit_is_cut_without_loss() -> None:
    cut = await lines_of(b"x" * 30, b"y" * 30 + b"\nnext\n", limit=50)
    assert "".join(cut) == "x" * 30 + "y" * 30 + "next"
    assert cut[-1] == "next"
    assert await lines_of(b"x" * 60 + b"\n", limit=50) == ["x" * 60]
    assert len(await lines_of(b"x" * 60, b"x" * 60, limit=50)) == 2


async def test_next_line_replaces_bytes_that_are_not_utf8() -> None:
    assert await lines_of(b"\xff\n") == ["\ufffd"]
