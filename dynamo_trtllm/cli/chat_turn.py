"""Send one turn of a terminal chat to a frontend over HTTP, and print its streamed answer."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, TextIO

_CONNECT_TIMEOUT_S: Final = 10.0
_SILENCE_TIMEOUT_S: Final = 600.0  # longest wait for the next byte: a long prompt in a long queue
_DONE: Final = "[DONE]"
_DATA: Final = "data:"


class ChatFailed(Exception):
    """No answer, or not all of it. The message is one line and says what to do where that is known."""


def models(url: str) -> list[str]:
    """Names of the models that are served."""
    with closing(_connect(url)) as connection:
        response = _request(connection, url, "GET", "/v1/models", None)
        listed = _json(response.read())
        return [str(model.get("id")) for model in listed.get("data") or ()]


def stream_chat(url: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The events of one streamed answer. Close it to end the answer early."""
    with closing(_connect(url)) as connection:
        content = json.dumps(body).encode()
        response = _request(connection, url, "POST", "/v1/chat/completions", content)
        try:
            yield from events(response)
        except (OSError, http.client.HTTPException) as exc:
            raise ChatFailed(f"the connection to {url} broke: {_reason(exc)}") from exc


def events(lines: Iterable[bytes]) -> Generator[dict[str, Any], None, None]:
    """Server-sent events up to `[DONE]`. Raises ChatFailed for an error among them, and for an end without it."""
    for line in lines:
        text = line.decode(errors="replace").strip()
        if not text.startswith(_DATA):
            continue
        data = text.removeprefix(_DATA).strip()
        if data == _DONE:
            return
        event = _json(data)
        if event.get("error"):
            raise ChatFailed(error_text(event))
        yield event
    raise ChatFailed("the answer ended early: the server closed the connection")


def error_text(body: Mapping[str, Any]) -> str:
    """The message of OpenAI's error envelope."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, Mapping) else None
    return " ".join(str(message or body).split())


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.connect()
    except OSError as exc:
        raise ChatFailed(
            f"no frontend answers at {url} ({_reason(exc)}); start one, or give its address with --url"
        ) from exc
    connection.sock.settimeout(_SILENCE_TIMEOUT_S)
    return connection


def _request(
    connection: http.client.HTTPConnection, url: str, method: str, path: str, content: bytes | None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"} if content is not None else {}
    try:
        connection.request(method, urllib.parse.urlsplit(url).path + path, body=content, headers=headers)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response
        said = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as exc:
        raise ChatFailed(f"the connection to {url} broke: {_reason(exc)}") from exc
    try:
        said = error_text(_json(said))
    except ChatFailed:
        said = " ".join(said.split())[:200]
    raise ChatFailed(f"{url} answered {response.status}: {said}")


def _json(data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise ChatFailed("the server's answer is not JSON; is --url the address of a frontend?") from exc
    if not isinstance(value, dict):
        raise ChatFailed("the server's answer is no JSON object; is --url the address of a frontend?")
    return value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # would move the cursor or color what follows
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()  # the name of a tool that is called
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Shown:
    kind: Kind
    text: str


@dataclass(slots=True)
class ChatTurn:
    """What came of one answer so far. Times are of this side: TTFT includes the way there and back."""

    clock: Callable[[], float] = time.perf_counter
    content: str = ""
    finish: str | None = None
    tokens: int | None = None  # of the answer, reasoning included, as the server counts
    began: float = field(init=False)
    first: float | None = None
    last: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def add(self, event: Mapping[str, Any]) -> Iterator[Shown]:
        """The pieces of a `chat.completion.chunk`."""
        usage = event.get("usage")
        if usage:
            self.tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            for piece in _pieces(choice.get("delta") or {}):
                self.last = self.clock()
                self.first = self.last if self.first is None else self.first
                if piece.kind is Kind.CONTENT:
                    self.content += piece.text
                yield piece

    def report(self) -> str:
        """One line: how soon, how fast, and why it ended where that is not the usual."""
        if self.first is None:
            words = ["no text came"]
        else:
            words = [f"TTFT {(self.first - self.began) * 1e3:.0f} ms"]
        if self.tokens is not None:
            words.append(f"{self.tokens} tokens")
            seconds = self.last - (self.first or self.last)
            if self.tokens > 1 and seconds > 0:
                words.append(f"{(self.tokens - 1) / seconds:.1f} tokens/s")
        if self.finish not in (None, "stop"):
            words.append(f"ended by {self.finish}")
        return ", ".join(words)


def _pieces(delta: Mapping[str, Any]) -> Iterator[Shown]:
    for kind, name in ((Kind.REASONING, "reasoning_content"), (Kind.CONTENT, "content")):
        if delta.get(name):
            yield Shown(kind, delta[name])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        if function.get("name"):
            yield Shown(Kind.CALL, function["name"])
        if function.get("arguments"):
            yield Shown(Kind.ARGUMENTS, function["arguments"])


class Screen:
    """Writes a turn as it comes: reasoning dim (or labeled, where there are no colors), each part on its own line."""

    def __init__(self, out: TextIO, *, has_colors: bool) -> None:
        self._out = out
        self._has_colors = has_colors
        self._kind: Kind | None = None
        self._is_at_line_start = True

    def show(self, piece: Shown) -> None:
        if piece.kind is not self._kind:
            self._begin(piece.kind)
        text = _CONTROL.sub("", piece.text)
        if piece.kind is Kind.CALL:
            text += " "
        self._write(text)

    def end(self) -> None:
        """After the last piece, or where the answer was left."""
        self._style("")
        if not self._is_at_line_start:
            self._write("\n")
        self._kind = None

    def _begin(self, kind: Kind) -> None:
        if kind is not Kind.ARGUMENTS or self._kind is not Kind.CALL:
            self.end()
        self._kind = kind
        if kind is Kind.REASONING:
            self._style(_DIM)
            self._write("" if self._has_colors else "[reasoning] ")
        elif kind is Kind.CALL:
            self._style(_BOLD)
            self._write("[tool call] ")

    def _style(self, style: str) -> None:
        if self._has_colors:
            self._out.write(_PLAIN + style)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._is_at_line_start = text.endswith("\n")
            self._out.flush()
