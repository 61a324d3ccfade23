"""Send HTTP requests on asyncio, each on its own connection.

The launcher, the command line and the export of traces use this module. Unlike with `http.client`,
which blocks a thread, a request can be cancelled at any step. The client follows no redirect, uses
no proxy and stores no cookies.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from urllib.parse import SplitResult

import httptools

from dynamo_trtllm.support.tls import client_context, untrusted

_CONNECT_TIMEOUT_S = 10.0
# Longest wait for the next bytes. It is this long because a long prompt may wait in a long queue.
# Callers that need shorter limits set their own.
_SILENCE_TIMEOUT_S = 600.0
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_HTTP_PORT = 80
_HTTPS_PORT = 443


async def request(
    url: str,
    method: str,
    content: bytes = b"",
    headers: Mapping[str, str] = {},
    *,
    max_bytes: int = _MAX_BODY_BYTES,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of the response.

    Args:
        url: the URL of the request.
        method: the method in upper case. HEAD is not supported.
        content: the body.
        headers: headers beside those that every request has.
        max_bytes: longest body of the response.
        tls: decides which https:// servers are trusted. See `connect`.

    Raises:
        OSError: the connection fails, the response is incomplete or not HTTP, or its body is longer
            than `max_bytes`.
        ValueError: the URL is not valid.
    """
    async with await connect(url, tls) as connection:
        response = await connection.request(method, content, headers)
        return response.status, await response.read(max_bytes)


async def connect(url: str, tls: ssl.SSLContext | None = None) -> Connection:
    """Connect to the server of an http:// or https:// URL.

    Args:
        url: the URL of the requests.
        tls: decides which https:// servers are trusted, and has the certificate of the client.
            Default: the context that `client_context` returns without a certificate.

    Raises:
        OSError: there is no connection within 10 s.
        ValueError: the URL is not valid.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        # The URL is not in the text, because it may have a password.
        raise ValueError("the URL has no host, or a scheme other than http and https")
    default_port = _HTTP_PORT
    context: ssl.SSLContext | None = None
    if parts.scheme == "https":
        default_port = _HTTPS_PORT
        context = tls or client_context(url)
    port = parts.port or default_port
    try:
        async with _limited(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    except ssl.SSLCertVerificationError as exc:
        host = parts.hostname
        # Only the context of `own_server_context` does not check the host name. It trusts the
        # certificate of one file. `untrusted` advises to set SSL_CERT_FILE, which has no effect on
        # this context.
        trusts_one_file = context is not None and not context.check_hostname
        if trusts_one_file:
            raise ConnectionError(
                f"the certificate of {host} is not trusted: {exc.verify_message}"
            ) from exc
        raise untrusted(host, exc) from exc
    return Connection(parts, reader, writer)


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header that sends an API key; no header without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Connection:
    """A connection for one request. The end of its `async with` block closes it."""

    def __init__(
        self, url: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._url = url
        self._reader = reader
        self._writer = writer

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def request(
        self, method: str, content: bytes = b"", headers: Mapping[str, str] = {}
    ) -> Response:
        """Send a request for the connection's URL, and return the response once its head is there.

        If the URL has a user and a password, they are sent as HTTP Basic authentication.

        Raises:
            OSError: the connection is lost, or the response is not HTTP.
        """
        target = self._url.path or "/"
        if self._url.query:
            target += f"?{self._url.query}"
        credentials, _, host = self._url.netloc.rpartition("@")
        all_headers = {
            "Host": host,
            "Connection": "close",
            "Content-Length": str(len(content)),
            **headers,
        }
        if credentials:
            encoded = base64.b64encode(urllib.parse.unquote(credentials).encode())
            all_headers["Authorization"] = f"Basic {encoded.decode()}"
        head = f"{method} {target} HTTP/1.1\r\n"
        for name, value in all_headers.items():
            head += f"{name}: {value}\r\n"
        self._writer.write(head.encode() + b"\r\n" + content)
        response = Response(self._reader, f"the response to {method} {target}")
        await response.read_head()
        return response


class Response:
    """A response to a request, as far as it was read.

    Attributes:
        status: HTTP status.
        headers: values by lower-case name. If a name comes twice, the last value counts.
    """

    def __init__(self, reader: asyncio.StreamReader, name: str) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._reader = reader
        self._name = name  # for errors
        self._parsed = _ParsedResponse()

    async def read_head(self) -> None:
        """Read until the status is known. Raises OSError."""
        read_bytes = 0
        while not self._parsed.status:
            read_bytes += await self._read_more()
            if read_bytes > _MAX_HEAD_BYTES and not self._parsed.status:
                raise ConnectionError(
                    f"{self._name} has a head of more than {_MAX_HEAD_BYTES} bytes"
                )
        self.status = self._parsed.status
        self.headers = self._parsed.headers

    async def read(self, max_bytes: int = _MAX_BODY_BYTES) -> bytes:
        """Return the body.

        Raises:
            OSError: the connection is lost, or the body is longer than `max_bytes`.
        """
        body = bytearray()
        while True:
            body += self._parsed.take_body()
            if len(body) > max_bytes:
                raise ConnectionError(f"{self._name} is longer than {max_bytes} bytes")
            if self._parsed.is_complete:
                return bytes(body)
            await self._read_more()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the body as they arrive. Raises OSError."""
        last_line = b""  # not complete yet
        while True:
            received = last_line + self._parsed.take_body()
            *complete_lines, last_line = received.split(b"\n")
            for line in complete_lines:
                yield line
            if self._parsed.is_complete:
                break
            await self._read_more()
        if last_line:
            yield last_line

    async def _read_more(self) -> int:
        """Read and parse the next bytes. Return their number."""
        async with _limited(_SILENCE_TIMEOUT_S):
            data = await self._reader.read(_READ_BYTES)
        is_closed = not data
        if is_closed and not self._parsed.body_ends_at_close:
            raise ConnectionError(f"{self._name} is incomplete: the server closed the connection")
        try:
            self._parsed.feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise ConnectionError(f"{self._name} can't be parsed: {exc}") from exc
        return len(data)


class _ParsedResponse:
    """The parts of a response. httptools reports each part by calling a method `on_...`."""

    def __init__(self) -> None:
        self.status = 0  # 0: the head is not complete
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._announces_end = False  # the headers say where the body ends
        self._body: list[bytes] = []  # the parts that were not taken yet
        self._parser = httptools.HttpResponseParser(self)

    @property
    def body_ends_at_close(self) -> bool:
        """Return True if the server ends the body by closing the connection."""
        has_head = self.status > 0
        return has_head and not self._announces_end

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. b"": the server has closed the connection."""
        if data:
            self._parser.feed_data(data)
        else:
            self.is_complete = True

    def take_body(self) -> bytes:
        """Return the bytes of the body that were not taken yet."""
        body = b"".join(self._body)
        self._body.clear()
        return body

    def on_header(self, name: bytes, value: bytes) -> None:
        lower_name = name.decode("latin-1").lower()
        self.headers[lower_name] = value.decode("latin-1")
        if lower_name in ("content-length", "transfer-encoding"):
            self._announces_end = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        # After an informational response (1xx) comes the response itself.
        if status >= 200:
            self.status = status
        else:
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        # httptools calls this for an informational response, too. The status is then still 0.
        self.is_complete = self.status > 0


@asynccontextmanager
async def _limited(limit_s: float) -> AsyncIterator[None]:
    """Limit the time of a block. Unlike the error of asyncio, the error here names the limit."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError as exc:
        if limit.expired():
            raise TimeoutError(f"no answer within {limit_s:g} s") from exc
        raise
