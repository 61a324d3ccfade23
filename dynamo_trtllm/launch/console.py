"""Write the output of many processes line by line, each line with the name of its process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import TextIO

from dynamo_trtllm.observability.logging import LINE_CHARS, json_line
from dynamo_trtllm.sanitize import shorten

LAUNCHER = "launch"
_COLORS = ("36", "33", "32", "35", "34", "31")


class Console:
    """The launcher's output stream. It uses colors only on a terminal.

    With `is_json` every line is a JSON object. A line of a process that is an object keeps its fields; any other line
    becomes the `message` of an object.

    Args:
        stream: Stream to write to.
        names: Process names, for padding and colors.
        is_json: Write JSON objects instead of text.
    """

    def __init__(self, stream: TextIO, names: Sequence[str], *, is_json: bool = False) -> None:
        self._stream = stream
        self._is_json = is_json
        self._width = max(len(name) for name in (LAUNCHER, *names))
        shown = stream.isatty()
        self._colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)} if shown else {}

    def say(self, text: str) -> None:
        """Write one or more lines of the launcher itself."""
        for line in text.splitlines():
            self.line(LAUNCHER, line)

    def line(self, name: str, text: str) -> None:
        """Write one line of one process."""
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


async def next_line(reader: asyncio.StreamReader) -> str | None:
    """Return the next line of a pipe, or None at its end. A line longer than the limit of the reader is cut."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        line = exc.partial
    except asyncio.LimitOverrunError as exc:
        line = await reader.read(exc.consumed + 1)
    return line.decode(errors="replace").removesuffix("\n").rstrip("\r") if line else None
