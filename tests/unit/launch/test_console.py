from __future__ import annotations

import io

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
