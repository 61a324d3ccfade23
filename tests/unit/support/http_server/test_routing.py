"""Which handler gets a request, and what is answered if none does."""

from __future__ import annotations

import json

import pytest

from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.server import Route, Router
from tests.kit.cases import each_case
from tests.kit.memory_http import MemoryClient


async def show(request: HttpRequest, response: HttpResponse) -> None:
    response.send_json(200, [request.path_params, request.query()])


ROUTER = Router(
    [
        Route("GET", "/a", show),
        Route("GET", "/r/{id}", show),
        Route("DELETE", "/r/{id}", show),
        Route("POST", "/r/{id}/cancel", show),
        Route("GET", "/m/{name:path}/ready", show),
        Route("GET", "/m/{name:path}", show),
    ],
    "; see /docs",
)


async def ask(method: str, target: str) -> tuple[int, str, bytes]:
    client = MemoryClient(ROUTER)
    client.send(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await client.until_answered()
    head, _, body = client.received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


@each_case(
    ("target", "params"),
    [
        ("/a", {}),
        ("http://x/a", {}),
        ("/r/1", {"id": "1"}),
        ("/r/a%20%C5%82", {"id": "a ł"}),
        ("/m/", {"name": ""}),
        ("/m/lab/tiny", {"name": "lab/tiny"}),
        ("/m/lab%2Ftiny/ready", {"name": "lab/tiny"}),
    ],
)
async def test_path_parameters_are_decoded(target: str, params: dict[str, str]) -> None:
    status, _, body = await ask("GET", target)
    assert (status, json.loads(body)[0]) == (200, params)


async def test_query_then_every_value_of_a_parameter_also_an_empty_one() -> None:
    _, _, body = await ask("GET", "/a?x=1&x=2%20&y=&z[]=3")
    assert json.loads(body)[1] == {"x": ["1", "2 "], "y": [""], "z[]": ["3"]}


@each_case(
    ("method", "target", "status", "allow"),
    [
        ("GET", "/b", 404, None),
        ("GET", "/a/", 404, None),
        ("GET", "//a", 404, None),
        ("GET", "/r/1/2", 404, None),
        ("POST", "/a", 405, "GET, HEAD"),
        ("OPTIONS", "/r/1", 405, "GET, DELETE, HEAD"),
        ("HEAD", "/r/1/cancel", 405, "POST"),
    ],
)
async def test_unrouted_request_is_404_or_405(
    method: str, target: str, status: int, allow: str | None
) -> None:
    got, head, body = await ask(method, target)
    assert got == status
    assert (f"Allow: {allow}" in head.split("\r\n")) == (allow is not None)
    if method != "HEAD":
        assert target in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/other", "see /docs"),
        ("/v1/chat/completions" + "s" * 60, "see /docs"),
    ],
)
async def test_unknown_path_names_the_one_that_is_near(target: str, hint: str) -> None:
    client = MemoryClient(Router([Route("POST", "/v1/chat/completions", show)], "; see /docs"))
    client.send(f"POST {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await client.until_answered()
    _, _, body = client.received.partition(b"\r\n\r\n")
    message = json.loads(body)["error"]["message"]
    assert message == f"not found: POST {target}; {hint}"


async def test_head_then_the_headers_of_get_and_no_body() -> None:
    _, head, body = await ask("GET", "/a")
    status, only, nothing = await ask("HEAD", "/a")
    assert (status, nothing) == (200, b"")
    assert f"Content-Length: {len(body)}" in head.split("\r\n")
    assert f"Content-Length: {len(body)}" in only.split("\r\n")


async def test_error_after_start_is_logged_and_closes(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: HttpRequest, response: HttpResponse) -> None:
        response.start_events({})
        raise InvalidRequest("too late")

    client = MemoryClient(Router([Route("GET", "/a", fail)]))
    client.send(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.until_answered()
    assert "too late" in caplog.text
    assert client.transport.is_closing()


async def ask_with(*lines: str) -> tuple[int, str]:
    """Return the status and the text of the response to a request with these headers."""
    client = MemoryClient(ROUTER)
    client.send("\r\n".join(["GET /a HTTP/1.1", "Host: x", *lines, "\r\n"]).encode())
    await client.until_answered()
    return int(client.received.split()[1]), client.received.decode()


@each_case(
    "name",
    ["Authorization", "X-SLO-TTFT-MS", "X-Api-Key", "Content-Type"],
)
async def test_header_with_two_values_is_400_that_names_it(name: str) -> None:
    status, text = await ask_with(f"{name}: first", f"{name}: second")
    assert status == 400
    assert f"the header {name.lower()} was sent with two different values; send it once" in text
    assert "second" not in text
    assert "\r\nConnection: close" not in text


async def test_header_that_is_repeated_with_one_value_counts_once() -> None:
    status, text = await ask_with("X-Request-Id: one", "x-request-id: one")
    assert status == 200
    assert "\r\nX-Request-Id: one\r\n" in text


@each_case("name", ["X-Request-Id", "traceparent", "User-Agent", "X-Session-Id"])
async def test_label_of_a_request_may_be_repeated_by_a_proxy(name: str) -> None:
    status, text = await ask_with(f"{name}: first", f"{name}: second")
    assert status == 200
    assert ("\r\nX-Request-Id: first\r\n" in text) == (name == "X-Request-Id")


async def test_header_that_is_not_read_may_have_two_values() -> None:
    assert (await ask_with("Accept: text/html", "Accept: */*"))[0] == 200


async def test_header_with_two_values_beside_an_upgrade_is_400() -> None:
    repeated = ["Authorization: a", "Authorization: b"]
    status, text = await ask_with("Upgrade: h2c", "Content-Length: 0", *repeated)
    assert (status, "the header authorization" in text) == (400, True)
