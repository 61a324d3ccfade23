"""Send one turn of a terminal chat to a frontend over HTTP, and print its streamed answer."""

from __future__ import annotations

import base64
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

from dynamo_trtllm.sanitize import mask_address

_CONNECT_TIMEOUT_S: Final = 10.0
_SILENCE_TIMEOUT_S: Final = 600.0  # longest wait for the next byte: a long prompt in a long queue
_DONE: Final = "[DONE]"
_DATA: Final = "data:"


class ChatFailed(Exception):
    """The answer is missing or incomplete. The message is one line, with advice where there is any."""


def models(url: str) -> list[str]:
    """Return the names of the frontend's models. Raise ChatFailed if it gives no valid answer."""
    with closing(_connect(url)) as connection:
        response = _request(connection, url, "GET", "/v1/models", None)
        listed = _json(response.read())
        return [str(model.get("id")) for model in listed.get("data") or ()]


def stream_chat(url: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Send a chat completion request and yield the events of its stream. Close the generator to stop the answer.

    Args:
        url: Address of the frontend.
        body: Request body, with `stream` set.

    Raises:
        ChatFailed: There is no connection, the server returns an error, or the stream breaks.
    """
    with closing(_connect(url)) as connection:
        content = json.dumps(body).encode()
        response = _request(connection, url, "POST", "/v1/chat/completions", content)
        try:
            yield from events(response)
        except (OSError, http.client.HTTPException) as exc:
            raise ChatFailed(f"connection to {mask_address(url)} lost: {_reason(exc)}") from exc


def events(lines: Iterable[bytes]) -> Generator[dict[str, Any], None, None]:
    """Yield the server-sent events before `[DONE]`. Raise ChatFailed for an error event or a missing `[DONE]`."""
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
    raise ChatFailed("the answer is incomplete: the server closed the connection")


def error_text(body: Mapping[str, Any]) -> str:
    """Return the message of an OpenAI error object as one line."""
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
            f"no frontend answers at {mask_address(url)} ({_reason(exc)}); start one, or give its address with --url"
        ) from exc
    connection.sock.settimeout(_SILENCE_TIMEOUT_S)
    return connection


def _request(
    connection: http.client.HTTPConnection, url: str, method: str, path: str, content: bytes | None
) -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    headers = {"Content-Type": "application/json"} if content is not None else {}
    if "@" in parts.netloc:
        credentials = urllib.parse.unquote(parts.netloc.rpartition("@")[0]).encode()
        headers["Authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
    try:
        connection.request(method, parts.path + path, body=content, headers=headers)
        response = connection.getresponse()
        if response.status == http.HTTPStatus.OK:
            return response
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as exc:
        raise ChatFailed(f"connection to {mask_address(url)} lost: {_reason(exc)}") from exc
    try:
        text = error_text(_json(text))
    except ChatFailed:
        text = " ".join(text.split())[:200]
    raise ChatFailed(f"{mask_address(url)} answered {response.status}: {text}")


def _json(data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise ChatFailed("the server's answer is not JSON; check that --url is the address of a frontend") from exc
    if not isinstance(value, dict):
        raise ChatFailed("the server's answer is not a JSON object; check that --url is the address of a frontend")
    return value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # may move the cursor or change colors
_DIM, _BOLD, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class Kind(Enum):
    """Kinds of text in an answer."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()  # the name of a tool
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Shown:
    """A delta of an answer, to be printed."""

    kind: Kind
    text: str


@dataclass(slots=True)
class ChatTurn:
    """The answer received so far. Times are measured in this process, so TTFT includes the network."""

    clock: Callable[[], float] = time.perf_counter
    content: str = ""
    finish: str | None = None
    tokens: int | None = None  # output tokens as reported by the server, reasoning included
    began: float = field(init=False)
    first: float | None = None
    last: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def add(self, event: Mapping[str, Any]) -> Iterator[Shown]:
        """Yield the deltas of a `chat.completion.chunk`."""
        usage = event.get("usage")
        if usage:
            self.tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            for delta in _deltas(choice.get("delta") or {}):
                self.last = self.clock()
                self.first = self.last if self.first is None else self.first
                if delta.kind is Kind.CONTENT:
                    self.content += delta.text
                yield delta

    def report(self) -> str:
        """Return one line with TTFT, tokens, speed, and the finish reason if it is not `stop`."""
        if self.first is None:
            words = ["no text"]
        else:
            words = [f"TTFT {(self.first - self.began) * 1e3:.0f} ms"]
        if self.tokens is not None:
            words.append(f"{self.tokens} tokens")
            seconds = self.last - (self.first or self.last)
            if self.tokens > 1 and seconds > 0:
                words.append(f"{(self.tokens - 1) / seconds:.1f} tokens/s")
        if self.finish not in (None, "stop"):
            words.append(f"finish reason: {self.finish}")
        return ", ".join(words)


def _deltas(delta: Mapping[str, Any]) -> Iterator[Shown]:
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
    """Prints an answer while it streams. Each part begins a line; reasoning is dim, or labeled without colors."""

    def __init__(self, out: TextIO, *, has_colors: bool) -> None:
        self._out = out
        self._has_colors = has_colors
        self._kind: Kind | None = None
        self._is_at_line_start = True

    def show(self, delta: Shown) -> None:
        """Print one delta, without control characters."""
        if delta.kind is not self._kind:
            self._begin(delta.kind)
        text = _CONTROL.sub("", delta.text)
        if delta.kind is Kind.CALL:
            text += " "
        self._write(text)

    def end(self) -> None:
        """Reset colors and end the line, after the last delta or an interrupted answer."""
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
