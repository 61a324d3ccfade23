"""The headers of a request in one string: what is found in it."""

from __future__ import annotations

import pytest

from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.http_server.request_head import Headers, check_head


def headers_of(*pairs: tuple[bytes, bytes]) -> Headers:
    headers = Headers()
    for name, value in pairs:
        headers.add(name, value)
    return headers


def test_headers_then_the_first_value_of_a_name_is_found_and_no_part_of_another() -> None:
    headers = headers_of((b"X-A", b"x-b:1"), (b"X-B", b""), (b"x-b", b"2"), (b"Host", b"a:80"), (b"Y", b"\xe9 \t"))
    assert headers.first(b"x-a") == "x-b:1"
    assert headers.first(b"x-b") == ""
    assert headers.first(b"host") == "a:80"
    assert headers.first(b"y") == "é \t"
    assert headers.first(b"a") is None
    assert headers.first(b"x-") is None
    assert (headers.count(b"x-b"), headers.count(b"b")) == (2, 0)
    assert list(headers.pairs())[:2] == [(b"x-a", b"x-b:1"), (b"x-b", b"")]


def test_head_when_a_header_has_a_line_break_then_400() -> None:
    headers = headers_of((b"Host", b"x"), (b"X-A", b"1\nx-request-id:2"))
    with pytest.raises(InvalidRequest, match="contains a line break"):
        check_head("1.1", headers, 2)
