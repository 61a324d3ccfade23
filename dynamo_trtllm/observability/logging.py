"""Log to stderr as text or JSON. Entry points call `setup`; an import configures nothing.

A logged value may come from a client or a peer. The formatters make it safe to show: they shorten
it, mask passwords and escape characters that could forge a line.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from dynamo_trtllm.protocol.sanitize import escape_controls, mask_credentials, shorten

# Set when a request enters a process. Every line that is logged for the request has it.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")

VALUE_CHARS: Final = 1_000  # maximum length of a value in a message
LINE_CHARS: Final = 4_000  # maximum length of a message and of a line of a traceback
# maximum length of a request id, because peers of a worker may send longer ones
_ID_CHARS: Final = 200
# If a traceback is longer, its first and its last 100 lines are logged.
_TRACEBACK_LINES: Final = 200
_OWN_PACKAGE: Final = "dynamo_trtllm."
# The part that the frontend appends to ids of clients.
_UNIQUE_PART = re.compile(r"([0-9a-f]{8})[0-9a-f]{8}(-[0-9]+)?$")


def short_id(request_id: str) -> str:
    """Return the short form of a request id for logs.

    It has the first 8 digits of the unique part, and the choice's index. Workers log the complete
    id.
    """
    match = _UNIQUE_PART.search(request_id)
    if match is None:
        return request_id
    choice = match[2] or ""
    return match[1] + choice


def setup(level: str, process_name: str, log_format: str = "text") -> None:
    """Configure logging of this process. A second call replaces the first configuration.

    Args:
        level: minimum log level: debug, info, warning or error.
        process_name: name of the process on every line, such as "prefill-1".
        log_format: "text" or "json".
    """
    root = logging.getLogger()
    for earlier in list(root.handlers):
        if isinstance(earlier, _OwnHandler):
            root.removeHandler(earlier)
    formatter_class = JsonFormatter if log_format == "json" else TextFormatter
    handler = _OwnHandler(sys.stderr)
    handler.setFormatter(formatter_class(process_name))
    root.addHandler(handler)
    # Other packages log warnings and errors only, except at level debug.
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("dynamo_trtllm").setLevel(level.upper())
    logging.captureWarnings(True)


def log_thread_stacks(logger: logging.Logger) -> None:
    """Log what each thread of this process does: one error message per thread, with its stack.

    Unlike `faulthandler`, which holds the GIL while it writes, this blocks only its own thread if
    nothing reads stderr.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        message = f"stack of thread {names.get(ident, ident)}"
        stack = "".join(traceback.format_stack(frame)).rstrip("\n")
        record = logger.makeRecord(
            logger.name, logging.ERROR, __file__, 0, message, (), None, sinfo=stack
        )
        logger.handle(record)


def json_line(
    *, time_s: float, level: str, process: str, logger: str, message: str, **more: str | None
) -> str:
    """Return one log entry as a JSON object in one line of ASCII.

    `time_s` is in seconds since the epoch.
    """
    entry = {
        "time": _iso(time_s),
        "level": level,
        "process": process,
        "logger": logger,
        "message": message,
        **more,
    }
    return json.dumps(entry).replace("\x7f", "\\u007f")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the stubs
    """The handler of `setup`. A second `setup` replaces it and leaves other handlers unchanged."""


class _OwnFormatter(logging.Formatter):
    """A formatter that names the process."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name


class TextFormatter(_OwnFormatter):
    """Formatter that writes one line per log record.

    It has the time, level, process, request id if any, module and message. A traceback follows,
    indented so that it looks different.
    """

    def format(self, record: logging.LogRecord) -> str:
        about = [_iso(record.created), record.levelname, self._process_name]
        id_text = _request_id_text()
        if id_text != "-":
            about.append(id_text)
        module = record.name.removeprefix(_OWN_PACKAGE)
        lines = [escape_controls(f"{' '.join(about)} {module}: {_message(record)}")]
        lines += [f"  {line}" for line in _traceback(record)]
        return "\n".join(lines)


class JsonFormatter(_OwnFormatter):
    """Formatter that writes one JSON object per line.

    The encoder escapes all characters but printable ASCII.
    """

    def format(self, record: logging.LogRecord) -> str:
        id_text = _request_id_text()
        return json_line(
            time_s=record.created,
            level=record.levelname.lower(),
            process=self._process_name,
            logger=record.name,
            message=_message(record),
            request_id=None if id_text == "-" else id_text,
            exception="\n".join(_traceback(record)) or None,
        )


class _Shortened:
    """A value of a log record, shortened to VALUE_CHARS characters in `%s` and `%r`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return shorten(str(self._value), VALUE_CHARS)

    def __repr__(self) -> str:
        return shorten(repr(self._value), VALUE_CHARS)


def _iso(time_s: float) -> str:
    text = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _request_id_text() -> str:
    """Return the shortened id of the request that this task serves; "-": none."""
    return shorten(request_id.get(), _ID_CHARS)


def _message(record: logging.LogRecord) -> str:
    text = str(record.msg)
    args = record.args
    if isinstance(args, Mapping):
        text = text % {name: _shortened(value) for name, value in args.items()}
    elif args:
        text = text % tuple(map(_shortened, args))
    return mask_credentials(shorten(text.rstrip("\n"), LINE_CHARS))


def _shortened(value: Any) -> Any:
    return value if isinstance(value, int | float) else _Shortened(value)  # `%d` takes numbers only


def _traceback(record: logging.LogRecord) -> list[str]:
    """Return the lines of the record's exception and stack, each safe to show."""
    lines = []
    for chunk in _traceback_chunks(record):
        for line in _lines_of(chunk):
            masked = mask_credentials(shorten(line, LINE_CHARS))
            lines.append(escape_controls(masked))
    if len(lines) <= _TRACEBACK_LINES:
        return lines
    half = _TRACEBACK_LINES // 2
    return [*lines[:half], "...", *lines[-half:]]


def _traceback_chunks(record: logging.LogRecord) -> Iterator[str]:
    if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None:
        yield from traceback.TracebackException(*record.exc_info).format()
    if record.stack_info:
        yield from record.stack_info.splitlines()


def _lines_of(chunk: str) -> list[str]:
    """Split stack frames only. Line breaks in an exception's message may come from a client."""
    text = chunk.strip("\n")
    is_frame = text.lstrip(" |+-").startswith('File "')
    return text.split("\n") if is_frame else [text]
