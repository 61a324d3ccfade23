"""A frontend, asked over HTTP with the standard library. Blocks; raises ChatFailed with one line for people."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from typing import Any, Final

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
