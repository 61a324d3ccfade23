"""The headers of a request that the server keeps: what is found in them, and which head is
rejected.
"""

from __future__ import annotations

import pytest

from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.support.http_server.request_head import Headers, check_head, without_upgrade


def headers_of(*pairs: tuple[bytes, bytes]) -> Headers:
    headers = Headers()
    for name, value in pairs:
        headers.add(name, value)
    return headers


def test_headers_return_the_first_value() -> None:
    headers = headers_of(
        (b"x-request-id", b"1"), (b"x-request-id", b"2"), (b"origin", b""), (b"host", b"\xe9 \t")
    )
    assert headers.first(b"x-request-id") == "1"
    assert headers.first(b"origin") == ""
    assert headers.first(b"host") == "é \t"
    assert headers.first(b"traceparent") is None


@pytest.mark.parametrize("hosts", [0, 2, 3])
def test_head_when_not_one_host_then_400_with_their_number(hosts: int) -> None:
    with pytest.raises(InvalidRequest, match=f"has {hosts} Host headers"):
        check_head("1.1", headers_of(*[(b"host", b"x")] * hosts))


def test_header_when_it_has_a_line_break_then_400() -> None:
    with pytest.raises(InvalidRequest, match="contains a line break"):
        headers_of((b"host", b"1\nx-request-id:2"))


def test_head_of_upgrade_keeps_all_needed_values() -> None:
    headers = headers_of(
        (b"upgrade", b"h2c"),
        (b"transfer-encoding", b"gzip"),
        (b"connection", b"Upgrade"),
        (b"transfer-encoding", b"chunked"),
    )
    head = without_upgrade(b"POST", b"/x", "1.1", headers)
    assert (
        head
        == b"POST /x HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\nconnection: Upgrade\r\n\r\n"
    )
    headers.add(b"upgrade", b"WebSocket")
    with pytest.raises(InvalidRequest, match="WebSocket"):
        without_upgrade(b"POST", b"/x", "1.1", headers)
