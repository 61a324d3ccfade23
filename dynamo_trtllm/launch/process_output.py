"""Write the output of many processes line by line, each line with the name of its process.

While a deployment starts on a terminal, a live line for each process shows its phase instead.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dynamo_trtllm.config.load import is_color_disabled
from dynamo_trtllm.config.parser import is_installed
from dynamo_trtllm.launch.log_file import log_file
from dynamo_trtllm.observability.logging import LINE_CHARS, json_line
from dynamo_trtllm.protocol.sanitize import shorten

if TYPE_CHECKING:
    from rich.console import Console as Terminal

LAUNCHER = "launch"
_SERVERS = ("etcd", "nats")
_HIDDEN_LINES = 200  # the last hidden lines, which are written if the start fails
_ROUTINE = re.compile(r"\S+ (INFO|DEBUG) ")  # log lines that the live lines replace
# A log line: time, level, process, request id if any, logger and message.
_LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT(?P<time>\d\d:\d\d:\d\d)\S* (?:INFO|DEBUG) \S+ (?P<request>\S+ )?\S+:"
    r" (?P<message>.*)"
)
_MAX_TERMINAL_CHARS = 100  # longest INFO line on a terminal
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the output may be writable again later
_COLORS = ("36", "33", "32", "35", "34", "31")


class ProcessOutput:
    """The launcher's output stream.

    It uses colors only on a terminal, and not if NO_COLOR is set.

    With `is_json` every line is a JSON object. A line of a process that is an object keeps its
    fields; any other line becomes the `message` of an object.

    Lines are lost while the disk is full. If the reader of the output has exited, `failure` is set,
    and nothing is written any more.

    Args:
        stream: stream to write to.
        names: process names, for padding and colors.
        is_json: write JSON objects instead of text.

    Attributes:
        has_terminal: the stream is a terminal.
        has_colors: colors may be used.
    """

    def __init__(self, stream: TextIO, names: Sequence[str], *, is_json: bool = False) -> None:
        self._stream = stream
        self._is_json = is_json
        self._width = max(len(name) for name in (LAUNCHER, *names))
        self.has_terminal = stream.isatty()
        self.has_colors = self.has_terminal and not is_color_disabled()
        self._names = names
        self._colors: dict[str, str] = {}  # colors by process name
        if self.has_colors:
            self._colors = dict(zip(names, itertools.cycle(_COLORS), strict=False))
        self._panel: StartPanel | None = None
        self._hidden: deque[tuple[str, str]] | None = None  # None: lines are written
        self._is_full = False
        self._add_to_file: Callable[[str, str], None] | None = None
        self.failure: OSError | None = None
        self._on_failure: Callable[[], None] | None = None

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call `call` once, when the reader of the output has exited."""
        self._on_failure = call

    @contextmanager
    def keeping_lines(self, path: Path) -> Iterator[str]:
        """Also write all lines to a file, including hidden lines.

        Yield the path. If the file can't be created, write a line that says so, and yield "".
        """
        with ExitStack() as stack:
            try:
                self._add_to_file = stack.enter_context(log_file(path, LAUNCHER))
            except OSError as exc:
                self.say(f"dynamo-trtllm logs has no lines of this deployment: {exc}")
            try:
                yield "" if self._add_to_file is None else str(path)
            finally:
                self._add_to_file = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """On a terminal, show live lines and hide routine output.

        This lasts until `end_start` or the end of the context. If an exception ends the context
        before `end_start`, the hidden lines are written.
        """
        if self.has_terminal and not self._is_json and is_installed("rich"):
            from rich.console import Console as Terminal

            terminal = Terminal(file=self._stream, highlight=False)
            if not terminal.is_dumb_terminal:
                self._panel = StartPanel(terminal, (*_SERVERS, *self._names))
        panel = self._panel
        try:
            yield
        except BaseException:
            if panel is not None and self.end_start():
                for name, text in panel.routine_lines:
                    self._show(name, text, is_whole=True)
            raise
        finally:
            self.end_start()

    @contextmanager
    def hiding_lines(self) -> Iterator[None]:
        """Hide the lines of all processes and of the launcher; `write` still writes.

        If the context ends with an exception, the last lines are written.
        """
        hidden: deque[tuple[str, str]] = deque(maxlen=_HIDDEN_LINES)
        self._hidden = hidden
        try:
            yield
        except BaseException:
            self._hidden = None
            for name, text in hidden:
                self._show(name, text, is_whole=True)
            raise
        finally:
            self._hidden = None

    def end_start(self, title: str = "", rows: Sequence[tuple[str, str]] = ()) -> bool:
        """Replace the live lines by a panel with these rows, if any.

        Return False if there are no live lines.
        """
        panel = self._panel
        if panel is None:
            return False
        self._panel = None
        panel.close(title, rows)
        return True

    def report_phase(self, name: str, phase: str) -> None:
        """Show the phase of a process that is not ready.

        Args:
            name: name of the process.
            phase: its phase. Empty while the process does not answer, because it still imports.
        """
        if self._panel is not None:
            self._panel.show(name, phase or "importing")

    def report_ready(self, name: str, after_s: float, where: str) -> None:
        """Show or write that a process is ready.

        Args:
            name: name of the process.
            after_s: seconds since its start.
            where: its address or instance id, with a preposition.
        """
        if self._panel is not None:
            self._panel.show(name, f"ready {where}", after_s)
        else:
            self.say(f"{name} is ready after {after_s:.2f} s {where}")

    def say(self, text: str) -> None:
        """Write one or more lines of the launcher itself."""
        for line in text.splitlines():
            self.line(LAUNCHER, line)

    def line(self, name: str, text: str) -> None:
        """Write one line of one process."""
        if self._add_to_file is not None:
            self._add_to_file(name, text)
        self._show(name, text)

    def _show(self, name: str, text: str, *, is_whole: bool = False) -> None:
        """Show a line. A terminal shows it in short, unless `is_whole`: it explains a failure."""
        if self._hidden is not None:
            self._hidden.append((name, text))
        else:
            self._try(partial(self._write_line, name, text, is_whole=is_whole))

    def write(self, text: str) -> None:
        """Write text as it is."""
        self._try(partial(self._write, text))

    def _try(self, write: Callable[[], None]) -> None:
        """Write, unless the output has failed. Note a failure."""
        if self.failure is not None:
            return
        try:
            write()
        except OSError as exc:
            if exc.errno not in _FULL:
                self.failure = exc
                if self._on_failure is not None:
                    self._on_failure()
            elif not self._is_full:
                self._is_full = True
                with suppress(OSError):
                    sys.stderr.write(
                        f"{LAUNCHER}: the output can't be written: {exc.strerror}; lines are lost\n"
                    )

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _write_line(self, name: str, text: str, *, is_whole: bool) -> None:
        if self._is_json:
            self._write(f"{_json_entry(name, text)}\n")
            return
        if self._panel is not None and _ROUTINE.match(text):
            self._panel.routine_lines.append((name, text))
            return
        prefix = f"{name:<{self._width}} |"
        if name in self._colors:
            prefix = f"\x1b[{self._colors[name]}m{prefix}\x1b[0m"
        if self._panel is not None:
            self._panel.write_above(f"{prefix} {text}")
            return
        if self.has_terminal and not is_whole:
            text = _short(text, _MAX_TERMINAL_CHARS - self._width - len(" | "))
        self._write(f"{prefix} {text}\n")


class StartPanel:
    """Live lines on a terminal, one for each process that starts: its name, phase and seconds."""

    def __init__(self, terminal: Terminal, names: Sequence[str]) -> None:
        from rich.live import Live

        self.routine_lines: deque[tuple[str, str]] = deque(maxlen=_HIDDEN_LINES)
        self._terminal = terminal
        self._began = time.monotonic()
        # The phase of each process, and the seconds after which it was ready; None: not ready yet.
        self._phases: dict[str, tuple[str, float | None]] = dict.fromkeys(names, ("waiting", None))
        self._live = Live(
            console=terminal,
            get_renderable=self._lines,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def show(self, name: str, phase: str, ready_after_s: float | None = None) -> None:
        """Show the phase of a process.

        `ready_after_s`: the seconds that its start took; None: it is not ready yet.
        """
        self._phases[name] = phase, ready_after_s

    def write_above(self, line: str) -> None:
        """Write a line that stays."""
        from rich.text import Text

        self._terminal.print(Text.from_ansi(line), soft_wrap=True)

    def close(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Remove the live lines, and show a panel if there are rows."""
        from rich.box import HORIZONTALS
        from rich.panel import Panel
        from rich.table import Table

        self._live.stop()
        if rows:
            table = Table.grid(padding=(0, 2))
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
            for subject, text in rows:
                table.add_row(subject, text)
            # No borders at the sides, so that lines can be copied.
            panel = Panel(
                table,
                HORIZONTALS,
                title=title,
                title_align="left",
                expand=False,
                border_style="green",
            )
            self._terminal.print(panel)

    def _lines(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        since_begin_s = time.monotonic() - self._began
        table = Table.grid(padding=(0, 1))
        for name, (phase, ready_after_s) in self._phases.items():
            if ready_after_s is None:
                mark = Text("…", style="yellow")
                shown_s = since_begin_s
            else:
                mark = Text("✓", style="green")
                shown_s = ready_after_s
            table.add_row(mark, name, f"{shown_s:5.1f} s", Text(phase, overflow="ellipsis"))
        return table


def _short(text: str, max_chars: int) -> str:
    """Return an INFO line as a terminal shows it, in one row.

    `dynamo-trtllm logs` shows the whole line. Other lines, such as errors, stay as they are.
    """
    found = _LOG_LINE.fullmatch(text)
    if found is None:
        return text
    line = f"{found['time']} {found['request'] or ''}{found['message']}"
    return line if len(line) <= max_chars else f"{line[: max_chars - 1]}…"


def _json_entry(name: str, text: str) -> str:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        message = shorten(text, LINE_CHARS)
        return json_line(
            time_s=time.time(), level="info", process=name, logger="output", message=message
        )
    # A frontend with several processes names each of them itself: NAME-1, NAME-2 and so on.
    own_name = str(entry.get("process", ""))
    if not own_name.startswith(f"{name}-"):
        entry["process"] = name
    return json.dumps(entry)


async def next_line(reader: asyncio.StreamReader) -> str | None:
    """Return the next line of a pipe, or None at its end.

    A line longer than the limit of the reader is cut.
    """
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as exc:
        line = exc.partial
    except asyncio.LimitOverrunError as exc:
        line = await reader.read(exc.consumed + 1)  # + 1: the newline, if it has arrived
    if not line:
        return None
    return line.decode(errors="replace").removesuffix("\n").rstrip("\r")
