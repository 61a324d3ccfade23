"""The body of every error answer. Which error gets which status and type is in `frontend/errors`."""

from __future__ import annotations

from typing import TypedDict

LONGEST = 1000  # characters of an error's words: what a request holds may be megabytes, and is quoted


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": _cut(message), "type": type, "param": param and _cut(param), "code": code}}


def _cut(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}"
