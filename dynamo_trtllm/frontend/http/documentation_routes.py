"""Serve `/openapi.json`, and `/docs`, the page that shows it."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.resources import files

import orjson

from dynamo_trtllm.frontend.http.openapi import document
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse

_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def openapi(_: HttpRequest, response: HttpResponse) -> None:
    response.send(200, await asyncio.to_thread(_openapi))


@cache
def _openapi() -> bytes:
    return orjson.dumps(document())


async def docs(_: HttpRequest, response: HttpResponse) -> None:
    """Answer with a page that shows `/openapi.json`. It loads nothing from other servers."""
    page = files("dynamo_trtllm.frontend").joinpath("docs.html").read_bytes()
    response.send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_POLICY})
