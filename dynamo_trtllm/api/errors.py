"""The body of every error answer. Which error gets which status and type is in `http_server/errors`."""

from __future__ import annotations

from typing import TypedDict

from dynamo_trtllm.sanitize import shorten

LONGEST = 1000  # characters of an error's words: what a request holds may be megabytes, and is quoted


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": shorten(message, LONGEST), "type": type, "param": param, "code": code}}
