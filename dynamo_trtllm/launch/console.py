"""The launcher's output: whole lines of many processes, each with the name of its process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from dynamo_trtllm.observability.logging import LINE_CHARS, json_line
from dynamo_trtllm.sanitize import shorten

LAUNCHER = "launch"
_COLORS = ("36", "33", "32", "35", "34", "31")
_LONGEST_LINE_BYTES = 1 << 20


class Console:
    """Writes to `stream`; in color only on a terminal. Unknown names get no padding.

    With `is_json` every line is a JSON object: a process's line that is an object keeps its fields, and any other
    line becomes the `message` of an object.
    """

    def __init__(self, stream: TextIO, names: Sequence[str], *, is_json: bool = False) -> None:
        self._stream = stream
        self._is_json = is_json
        self._width = max(len(name) for name in (LAUNCHER, *names))
        shown = stream.isatty()
        self._colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)} if shown else {}

    def say(self, text: str) -> None:
        """A line, or lines, of the launcher itself."""
        for line in text.splitlines():
            self.line(LAUNCHER, line)

    def line(self, name: str, text: str) -> None:
        """One line of one process."""
        if self._is_json:
            self._stream.write(f"{_json_entry(name, text)}\n")
            self._stream.flush()
            return
        prefix = f"{name:<{self._width}} |"
        if name in self._colors:
            prefix = f"\x1b[{self._colors[name]}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix} {text}\n")
        self._stream.flush()


def _json_entry(name: str, text: str) -> str:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        message = shorten(text, LINE_CHARS)
        return json_line(time_s=time.time(), level="info", process=name, logger="output", message=message)
    own = str(entry.get("process", ""))
    return json.dumps(entry | {"process": own if own.startswith(f"{name}-") else name})  # a process of a frontend


class LineSplitter:
    """Bytes as they come from a pipe, lines out. A line of a megabyte without an end is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        yield from (_text(line) for line in lines)

    def end(self) -> Iterator[str]:
        """What came after the last line end."""
        if self._rest:
            yield _text(self._rest)
            self._rest = b""


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
