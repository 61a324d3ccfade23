"""Parse the requests that a client sends, within limits in size."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import httptools

from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.support.http_server import request_head
from dynamo_trtllm.support.http_server.limits import ConnectionLimits
from dynamo_trtllm.support.http_server.request_head import MAX_HEADERS, READ_HEADERS, Headers

# Every body may have so many bytes of chunk sizes, chunk extensions and trailers. A body with more
# of them must have at least as much data beyond this number.
_FRAMING_BYTES = 16 << 10


class RequestHead(NamedTuple):
    """The head of a request, as it was parsed."""

    method: bytes
    raw_path: bytes  # the path, which is not decoded
    raw_query: bytes
    version: str  # the version of HTTP
    headers: Headers
    num_bytes: int  # size of the head, as far as the parser has reported it
    keeps_alive: bool  # the connection may stay open after the response


class RequestEvents(Protocol):
    """The receiver of parsed requests.

    If a method raises a `DynamoError`, `RequestParser.feed` raises it, too.
    """

    def on_begin(self) -> None:
        """Note that a request has begun."""

    def check_accepting(self) -> None:
        """Check that requests are accepted. Raises Draining."""

    def on_head(self, head: RequestHead) -> None:
        """Take the head of a request. Raises Overloaded."""

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""

    def on_complete(self) -> None:
        """Note that the body has ended."""


class RequestParser:
    """The parser of the requests of one connection.

    If a head asks for an upgrade of the protocol, it is replaced by a head without this (see
    `without_upgrade`).
    """

    awaits_head = True  # True before and during a request's head
    received_bytes = 0  # number of bytes of an incomplete head that were received
    _parsed_bytes = 0  # size of the head and the trailers, as far as the parser has reported it
    _num_headers = 0  # number of headers and trailers of the newest request
    # Received bytes of the newest body, including chunk sizes, chunk extensions and trailers.
    _body_bytes = 0
    # Received bytes of the data of the newest body.
    _data_bytes = 0

    def __init__(self, limits: ConnectionLimits, events: RequestEvents) -> None:
        self._limits = limits
        self._keeps_all_headers = limits.keeps_all_headers
        self._events = events
        self._parser = httptools.HttpRequestParser(self)
        # A client may send more data after a request with `Connection: close`. This is no error,
        # but such data gets no answer.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers = Headers()
        # The head without an upgrade, which the parser gets next.
        self._plain_head: bytes | None = None

    @property
    def headers(self) -> Headers:
        """The headers of a head that has not arrived as a whole."""
        return self._headers

    def close(self) -> None:
        """Break the reference cycles of this object. After this, nothing can be parsed."""
        del self._parser
        del self._events

    def feed(self, part: memoryview) -> bool:
        """Parse a part of what the client sends.

        Return False if the following data may be of another protocol.

        Raises:
            InvalidRequest: the data is not HTTP/1.1.
            DynamoError: a check of the head has failed, or the receiver has raised this error.
        """
        if self.awaits_head:
            self.received_bytes += len(part)
        else:
            self._body_bytes += len(part)
        try:
            return self._parse(part)
        except httptools.HttpParserError as exc:
            # The parser wraps the errors of the methods below. The wrapped error is not stored in a
            # variable, because error and frame would then refer to each other.
            if isinstance(exc.__context__, DynamoError):
                raise exc.__context__ from None
            raise errors.InvalidRequest("the request is not valid HTTP/1.1") from exc

    def check_size(self) -> None:
        """Check the size of the newest head or body, as far as it was received.

        Raises:
            PayloadTooLarge: the body is too large.
            InvalidRequest: the body has too many bytes of chunk sizes, extensions and trailers.
            HeadTooLarge: the head is too large.
        """
        limits = self._limits
        if self._body_bytes > limits.max_body_bytes + limits.max_header_bytes:
            text = (
                f"the request body is larger than the limit of {limits.max_body_bytes} bytes,"
                " including chunk sizes, extensions and trailers"
            )
            raise errors.PayloadTooLarge(text)
        if self._body_bytes - self._data_bytes > _FRAMING_BYTES + self._data_bytes:
            text = (
                "the chunk sizes, chunk extensions and trailers of the request take more bytes than"
                f" its body, and more than {_FRAMING_BYTES} bytes; send larger chunks"
            )
            raise errors.InvalidRequest(text)
        if self.awaits_head and self.received_bytes > limits.max_header_bytes:
            raise request_head.head_too_large(limits.max_header_bytes)

    def _parse(self, view: memoryview) -> bool:
        """Feed the parser. Return the result of `feed`."""
        while view:
            try:
                self._parser.feed_data(view)
                return True
            except httptools.HttpParserUpgrade as exc:
                if self._plain_head is None:
                    return False
                view = view[exc.args[0] :]
            head = self._plain_head
            self._plain_head = None
            self._parsed_bytes = 0
            self._parser.feed_data(head)
        return True

    # --- called by the parser, within `feed` ------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = Headers()
        self._num_headers = 0
        # If the part begins with the end of another request, it is not known how many bytes of it
        # belong to this request. At least one byte does.
        if not self.received_bytes:
            self.received_bytes = 1
        self._events.on_begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))
        request_head.check_target(self._url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise request_head.too_many_headers()
        name = name.lower()
        is_read = name in READ_HEADERS or self._keeps_all_headers
        if is_read and self.awaits_head:  # after the head, this would be a trailer
            self._headers.add(name, value)

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        url = httptools.parse_url(self._url)
        request_head.check_head(version, self._headers)
        self._events.check_accepting()
        method = self._parser.get_method()
        asks_for_upgrade = self._parser.should_upgrade()
        if asks_for_upgrade:
            self._plain_head = request_head.without_upgrade(
                method, self._url, version, self._headers
            )
            if self._plain_head is not None:
                return
        head = RequestHead(
            method=method,
            raw_path=url.path or b"/",
            raw_query=url.query or b"",
            version=version,
            headers=self._headers,
            num_bytes=self._parsed_bytes,
            keeps_alive=(
                version == "1.1" and self._parser.should_keep_alive() and not asks_for_upgrade
            ),
        )
        self._events.on_head(head)
        self.awaits_head = False
        self.received_bytes = 0
        self._parsed_bytes = 0
        self._body_bytes = 0
        self._data_bytes = 0
        self._url = b""
        self._headers = Headers()  # the request keeps the former ones

    def on_body(self, part: bytes) -> None:
        self._data_bytes += len(part)
        self._events.on_body(part)

    def on_message_complete(self) -> None:
        if self._plain_head is None:
            self.awaits_head = True
            self._events.on_complete()

    def _count(self, num_bytes: int) -> None:
        """Count bytes of a head. Raises HeadTooLarge."""
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self._limits.max_header_bytes:
            raise request_head.head_too_large(self._limits.max_header_bytes)
