"""Serve the console: its page at `/`, the files of the page, and the data that it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Final

import msgspec

from dynamo_trtllm.access.access_control import CONSOLE_FILES, CONSOLE_PAGE
from dynamo_trtllm.frontend.console.feed import ConsoleFeed
from dynamo_trtllm.frontend.console.reader import ConsoleReader
from dynamo_trtllm.frontend.console.request_events import RequestEventReader
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.server import Route

_CONTENT_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".html": "text/html; charset=utf-8",
}
_PAGE: Final = "index.html"
# The page runs its own files only, connects to this server only, and can't be framed.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(eq=False)
class ConsoleRoutes:
    """The routes of the console.

    Args:
        feed: sends the data once a second.
        events: reads the timeline of one request.
        check: raises a DynamoError if the sender of a request may not read the console any more.
    """

    _feed: ConsoleFeed
    _events: RequestEventReader
    _check: Callable[[HttpRequest], None]

    def routes(self) -> list[Route]:
        """Return all routes. The routes of the page and its files need no API key."""
        page_files = [
            Route("GET", f"{CONSOLE_FILES}{name}", partial(_send_file, name))
            for name in sorted(_files())
            if name != _PAGE
        ]
        return [
            Route("GET", CONSOLE_PAGE, partial(_send_file, _PAGE)),
            *page_files,
            Route("GET", "/console/events", self.stream),
            Route("GET", "/console/requests/{id}", self.request_events),
        ]

    async def stream(self, request: HttpRequest, response: HttpResponse) -> None:
        """Send server-sent events until the client leaves, or may not read any more.

        Raises:
            Overloaded: too many consoles are open.
            ClientDisconnected: the client has left.
        """
        reader = ConsoleReader(response, partial(self._check, request))
        hello = self._feed.join(reader)
        try:
            response.cancel_on_disconnect()
            response.on_drain = reader.end
            response.start_events({})
            response.write(hello)
            last_event = await reader.until_ended()
            # The response ends anyway, so a disconnect need not cancel this any more.
            response.continue_on_disconnect()
            response.keeps_alive = False
            if reader.error is not None:
                response.fail(reader.error)
            else:
                await response.send_events(last_event, last=True)
        finally:
            self._feed.leave(reader)

    async def request_events(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer with the timeline of a request.

        Raises:
            InvalidRequest: the id is too long.
            Overloaded: too many timelines are being read.
        """
        response.cancel_on_disconnect()
        history = await self._events.read(request.path_params["id"])
        response.send(200, msgspec.json.encode(history))


async def _send_file(name: str, _: HttpRequest, response: HttpResponse) -> None:
    suffix = name[name.rindex(".") :]
    response.send(200, _files()[name], _CONTENT_TYPES[suffix], _HEADERS)


@cache
def _files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = files("dynamo_trtllm.frontend.console").joinpath("page")
    return {file.name: file.read_bytes() for file in folder.iterdir()}
