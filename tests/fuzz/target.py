"""Define what a fuzz target is, and what several targets need."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Final, TypeVar

S = TypeVar("S", bytes, Sequence[int])

MAX_PARTS: Final = 1000
MIN_SECRET_CHARS: Final = 12  # a shorter part of a secret may stand in a text by chance


class Form(StrEnum):
    """The form of the inputs of a target. Most mutations keep it."""

    BYTES = auto()
    JSON = auto()
    MESSAGE_PACK = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser, and the properties of its results.

    Args:
        summary: what is fuzzed, for `--list`.
        check: runs the parser with an input. Any exception is a finding.
        files: the files of the project whose coverage is reported, relative to dynamo_trtllm.
        seeds: returns inputs to begin with, beside those of the corpus.
        words: parts of inputs that mutations insert.
        form: the form of the inputs.
        max_bytes: of an input.
    """

    summary: str
    check: Callable[[bytes], None]
    files: tuple[str, ...]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()
    form: Form = Form.BYTES
    max_bytes: int = 2048


def random_of(data: bytes) -> random.Random:
    """Return a generator of random numbers that depends on the input alone.

    So an input is all that is needed to reproduce a finding.
    """
    return random.Random(zlib.crc32(data))


def cut(data: S, draw: random.Random) -> Iterator[S]:
    """Split bytes or token ids at random places, into parts of similar sizes.

    There are not many more than a thousand parts, because each takes its time.
    """
    shortest = 1 + len(data) // MAX_PARTS
    longest = draw.choice((shortest, 3 * shortest, 20 * shortest, max(1, len(data))))
    at = 0
    while at < len(data):
        size = draw.randint(shortest, max(shortest, longest))
        yield data[at : at + size]
        at += size


def secret_for(data: bytes) -> str:
    """Return a secret of which this input has no part, because it depends on the whole input.

    A target puts it where a user would put a secret, and nowhere else. So an error that shows a
    part of it has revealed the secret. An input itself could have the same text in another place,
    such as the name of a flag, where an error may show it.
    """
    return f"sk-{hashlib.sha256(data).hexdigest()[:40]}"


def check_hides(secret: str, text: str) -> None:
    """Check that no part of a secret is in a text.

    Raises:
        AssertionError: the text has MIN_SECRET_CHARS or more of its characters in a row.
    """
    for at in range(len(secret) - MIN_SECRET_CHARS + 1):
        part = secret[at : at + MIN_SECRET_CHARS]
        assert part not in text, f"an error text has a part of a secret: {text!r}"


class LoggedErrors(logging.Handler):
    """Collects log records of level ERROR, which report bugs: no input may cause one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._records: list[logging.LogRecord] = []
        logging.getLogger("dynamo_trtllm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def check(self) -> None:
        """Raise AssertionError if a record was logged since the last call."""
        records = self._records
        self._records = []
        for record in records:
            cause = record.exc_info[1] if record.exc_info else None
            raise AssertionError(f"logged: {record.getMessage()}") from cause


def event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for all inputs of a process, which reports unhandled exceptions.

    A loop for each input would take longer than most inputs.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_log_unhandled)
    return loop


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    logging.getLogger("dynamo_trtllm").error(
        "unhandled: %s",
        context.get("message"),
        exc_info=context.get("exception"),  # type: ignore[arg-type]
    )
