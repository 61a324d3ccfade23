"""Find the handler of a request by its path and method."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dynamo_trtllm.api.common import error_body
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.http_server.errors import INVALID
from dynamo_trtllm.http_server.exchange import Handler, HttpRequest, HttpResponse


class Route(NamedTuple):
    """A handler of one method of one path. In the path, {x} is a part without slashes, and {x:path} any text."""

    method: str
    path: str
    handler: Handler


class Router:
    """The handler of all requests. Routes of GET serve HEAD, too."""

    def __init__(self, routes: Sequence[Route], hint: str = "") -> None:
        """Create the router. The first path that matches decides. `hint` ends the error for an unknown path."""
        self.routes = routes
        self._hint = hint
        by_path: dict[str, dict[str, Handler]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route.handler
        self._exact = {path: methods for path, methods in by_path.items() if "{" not in path}
        self._patterns = [(_compile(path), methods) for path, methods in by_path.items() if "{" in path]

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Run the handler. Answers its errors, unknown paths and unknown methods with an error response.

        Raises:
            DynamoError: the handler failed after it had started the response.
        """
        methods = self._exact.get(request.path) or self._match(request)
        handler = methods.get("GET" if request.method == "HEAD" else request.method)
        about = f"{request.method} {request.path}"
        if not methods:
            body = error_body(f"not found: {about}{self._hint}", type=INVALID, code="unknown_url")
            response.send_json(404, body)
        elif handler is None:
            body = error_body(
                f"{request.method} is not allowed on {request.path}", type=INVALID, code="method_not_allowed"
            )
            allowed = [*methods, "HEAD"] if "GET" in methods else methods
            response.send_json(405, body, {"Allow": ", ".join(allowed)})
        else:
            try:
                await handler(request, response)
            except DynamoError as error:
                if response.started:
                    raise
                response.send_error(error)

    def _match(self, request: HttpRequest) -> Mapping[str, Handler]:
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(request.path):
                request.path_params = match.groupdict()
                return methods
        return {}


def _compile(path: str) -> re.Pattern[str]:
    """Return the pattern of a path with parameters."""
    parts = re.split(r"{(\w+)(:path)?}", path)
    pattern = "".join(
        re.escape(text) + (f"(?P<{name}>{'.*' if is_path else '[^/]+'})" if name else "")
        for text, name, is_path in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True)
    )
    return re.compile(pattern, re.DOTALL)
