"""Log lines of one process: one format, to stderr. Configured by entry points only, never on import."""

from __future__ import annotations

import contextvars
import logging
import sys

# Set where a request enters a process; every line logged while it is served carries it.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(process_name)s %(request_id)s %(name)s: %(message)s"
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


class _Context(logging.Filter):
    """Puts the process's name and the request's id on each record."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_name = self._process_name
        record.request_id = request_id.get()
        return True


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only in the stubs
    """Ours, so that a second `setup` replaces it and leaves other handlers alone."""


def setup(level: str, process_name: str) -> None:
    """Log to stderr from `level` (debug, info, warning, error) on. `process_name`: as in "prefill-1"; idempotent."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _OwnHandler)]:
        root.removeHandler(handler)
    handler = _OwnHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, TIME_FORMAT))
    handler.addFilter(_Context(process_name))
    root.addHandler(handler)
    # Other packages speak from warnings on; asked for debug, they are heard too.
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("dynamo_trtllm").setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # one line per finished request is ours
    logging.captureWarnings(True)
