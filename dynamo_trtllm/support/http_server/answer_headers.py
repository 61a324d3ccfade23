"""The headers that every response has: the id of the request, and those for allowed origins."""

from __future__ import annotations

import re
import secrets
from collections.abc import Set

from dynamo_trtllm.support.http_server.exchange import Exchange, HttpResponse
from dynamo_trtllm.support.http_server.request_head import Headers

_ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(headers: Headers) -> str:
    """Return the id of a request: that of `X-Request-Id`, or a new one."""
    given = headers.first(b"x-request-id") or ""
    return given if _ECHOED_ID.fullmatch(given) else secrets.token_hex(16)


def is_allowed(origin: str | None, origins: Set[str]) -> bool:
    """Return True if browsers let pages of this origin call the server (CORS).

    Args:
        origin: the origin of the page; None: the request does not come from a page.
        origins: the allowed origins; "*": all.
    """
    return origin is not None and not origins.isdisjoint({"*", origin})


def origin_headers(origin: str | None, origins: Set[str]) -> dict[str, str]:
    """Return the headers with which a browser shows a response to a page.

    Args:
        origin: the origin of the page; None: the request does not come from a page.
        origins: the allowed origins; "*": all.
    """
    if not origins:
        return {}
    # Sent with every response: a cache must not return one for an origin to another origin.
    headers = {"Vary": "Origin"}
    if origin is not None and is_allowed(origin, origins):
        headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
        headers["Access-Control-Expose-Headers"] = "*"
    return headers


def set_answer_headers(
    response: HttpResponse, replaced: Exchange | None, head: Headers, origins: Set[str]
) -> None:
    """Set the headers of a response that no handler sends, and its request id.

    Args:
        response: the response.
        replaced: the exchange whose response it replaces; None: the head was not accepted.
        head: the headers of the head that was not accepted, as far as they have arrived.
        origins: the allowed origins; "*": all.
    """
    if replaced is not None and replaced.response.request_id:  # the handler has begun
        response.take_over(replaced.response)
        return
    headers = head if replaced is None else replaced.request.headers
    response.request_id = request_id_of(headers)
    response.headers["X-Request-Id"] = response.request_id
    response.headers |= origin_headers(headers.first(b"origin"), origins)
