"""Read parameters of a request's query."""

from __future__ import annotations

from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.number_text import is_digits
from dynamo_trtllm.support.http_server.exchange import HttpRequest


def last_value(request: HttpRequest, name: str, default: str) -> str:
    """Return the last value of a query parameter."""
    return request.query().get(name, [default])[-1]


def read_limit(request: HttpRequest, *, default: int, most: int) -> int:
    """Return the query parameter `limit`. Raise InvalidRequest if it is out of range."""
    limit = last_value(request, "limit", str(default))
    is_number = is_digits(limit) and len(limit) <= len(str(most))
    if not is_number or not 1 <= int(limit) <= most:
        raise InvalidRequest(
            f"limit must be a number from 1 to {most}, not {limit!r}", field="limit"
        )
    return int(limit)
