from __future__ import annotations

import io
import json

from dynamo_trtllm.launch.console import Console, LineSplitter


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_line_when_not_a_terminal_then_names_are_padded_and_plain():
    stream = io.StringIO()
    console = Console(stream, ["frontend", "w"])
    console.line("w", "text")
    console.say("two\nlines")
    assert stream.getvalue() == "w        | text\nlaunch   | two\nlaunch   | lines\n"


def test_line_when_a_terminal_then_each_name_has_its_color():
    stream = Terminal()
    console = Console(stream, ["a", "b"])
    console.line("a", "x")
    console.line("b", "x")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("\x1b[36m")
    assert second.startswith("\x1b[33m")
    assert first.endswith("\x1b[0m x")


def test_line_when_json_then_each_is_an_object_with_the_name_of_its_process() -> None:
    stream = Terminal()
    console = Console(stream, ["frontend", "prefill-2"], is_json=True)
    console.line("prefill-2", '{"time": "t", "level": "error", "process": "prefill", "message": "own"}')
    console.line("frontend", '{"process": "frontend-3", "message": "of one of its processes"}')
    console.line("prefill-2", "\x1b[31mof a library")
    console.line("prefill-2", "[" * 100_000)
    console.say("two\nlines")
    own, member, library, nested, *said = map(json.loads, stream.getvalue().splitlines())
    assert own == {"time": "t", "level": "error", "process": "prefill-2", "message": "own"}
    assert member["process"] == "frontend-3"
    assert (library["process"], library["message"], library["level"]) == ("prefill-2", "\x1b[31mof a library", "info")
    assert len(nested["message"]) < 4_100
    assert [(line["process"], line["message"]) for line in said] == [("launch", "two"), ("launch", "lines")]


def test_feed_when_lines_come_in_pieces_then_they_come_out_whole():
    splitter = LineSplitter()
    text = "one\r\nzwei \u00fc\n\nlast".encode()
    lines = [line for i in range(len(text)) for line in splitter.feed(text[i : i + 1])]
    assert lines == ["one", "zwei \u00fc", ""]
    assert list(splitter.end()) == ["last"]
    assert list(splitter.end()) == []


def test_feed_when_a_line_has_no_end_then_it_is_cut_at_a_megabyte():
    splitter = LineSplitter()
    assert list(splitter.feed(b"x" * (1 << 20))) == []
    assert [len(line) for line in splitter.feed(b"x")] == [(1 << 20) + 1]


def test_feed_when_bytes_are_not_utf8_then_they_are_replaced():
    assert list(LineSplitter().feed(b"\xff\n")) == ["\ufffd"]
