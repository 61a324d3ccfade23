"""Send HTTP requests on asyncio, each on its own connection.

The launcher, the command line and the export of traces use this module. A request can be cancelled
at any step, unlike one of the standard library's client, which blocks a thread. The client follows
no redirect, uses no proxy and keeps no cookies.
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
# Longest wait for the next bytes: a long prompt in a long queue. Callers set shorter limits.
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
        method: the method in upper case.
        content: the body.
        headers: are added to those of every request.
        max_bytes: longest body of the response.
        tls: decides which servers are trusted. See `connect`.

    Raises:
        OSError: there is no connection, the response is not complete HTTP, or its body is longer
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
            Default: that of `client_context`, without a certificate.

    Raises:
        OSError: there is no connection within 10 s.
        ValueError: the URL is not valid.
    """
    parts = urllib.parse.urlsplit(url)
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
        host = parts.hostname or ""
        # This is the context of a launcher, which trusts one certificate, whatever the name of the
        # server. The advice of `untrusted` would not help.
        if context is not None and not context.check_hostname:
            raise ConnectionError(
                f"the certificate of {host} is not trusted: {exc.verify_message}"
            ) from exc
        raise untrusted(host, exc) from exc
    return Connection(parts, reader, writer)


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header that sends an API key; no header without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


class Connection:
    """A connection for one request. It is closed at the end of its context."""

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

        User and password of the URL are sent as HTTP Basic authentication.

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
        headers: values by names in lower case; of a name that comes twice, the last value.
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
        rest = b""
        while True:
            *complete_lines, rest = (rest + self._parsed.take_body()).split(b"\n")
            for line in complete_lines:
                yield line
            if self._parsed.is_complete:
                break
            await self._read_more()
        if rest:
            yield rest

    async def _read_more(self) -> int:
        """Read and parse the next bytes. Return their number."""
        async with _limited(_SILENCE_TIMEOUT_S):
            data = await self._reader.read(_READ_BYTES)
        if not data and not self._parsed.ends_with_connection:
            raise ConnectionError(f"{self._name} is incomplete: the server closed the connection")
        try:
            self._parsed.feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            raise ConnectionError(f"{self._name} can't be parsed: {exc}") from exc
        return len(data)


class _ParsedResponse:
    """The parts of a response, which httptools reports by calls of the methods `on_...`."""

    def __init__(self) -> None:
        self.status = 0  # 0: the head is not complete
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._has_length = False
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def ends_with_connection(self) -> bool:
        """Return True if the end of the connection is the end of the body."""
        return self.status > 0 and not self._has_length

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; none at the end of the connection."""
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
            self._has_length = True

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
        # The status is still 0 at the end of an informational response.
        self.is_complete = self.status > 0


@asynccontextmanager
async def _limited(limit_s: float) -> AsyncIterator[None]:
    """Limit the time of a block. The error says the limit, which asyncio's does not."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError as exc:
        if limit.expired():
            raise TimeoutError(f"no answer within {limit_s:g} s") from exc
        raise
