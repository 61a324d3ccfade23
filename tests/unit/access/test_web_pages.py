"""Requests that web pages make browsers send to a frontend without API keys."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case
from tests.kit.frontend_app import MODEL, front, stop
from tests.unit.frontend.responses_client import ask, check_error

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-key-of-the-settings"
LOCAL = "localhost:8000"


@each_case(
    "host",
    [
        "127.0.0.1:8000",
        "localhost",
        "LocalHost:1",
        "[::1]:8000",
        "10.1.2.3",
        "gpu-host",
        "a.localhost",
    ],
)
async def test_local_names_and_addresses_are_served(host: str) -> None:
    response = await ask(front(), "GET", "/v1/models", headers={"Host": host})
    assert response.status_code == 200


@each_case(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"],
)
@each_case("path", ["/v1/models", "/metrics", "/docs", "/live"])
async def test_name_of_another_server_gets_403(host: str, path: str) -> None:
    response = await ask(front(), "GET", path, headers={"Host": host})
    check_error(response, 403, "permission_denied")
    assert "--allowed-hosts" in response.json()["error"]["message"]


@each_case(
    ("settings", "host", "status"),
    [
        ({"allowed_hosts": "api.example,b.example"}, "API.example:443", 200),
        ({"allowed_hosts": "api.example"}, "b.example", 403),
        ({"allowed_hosts": "api.example", "api_key": (KEY,)}, "b.example", 403),
        ({"allowed_hosts": "*"}, "b.example", 200),
        ({"api_key": (KEY,)}, "b.example", 200),
        ({"http_host": "0.0.0.0", "allow_anonymous": True}, "b.example", 200),
        ({"http_host": "0.0.0.0", "allow_anonymous": True, "allowed_hosts": "a.b"}, "b.b", 403),
    ],
)
async def test_names_are_those_of_the_settings(
    settings: dict[str, object], host: str, status: int
) -> None:
    headers = {"Host": host, "Authorization": f"Bearer {KEY}"}
    response = await ask(front(**settings), "GET", "/v1/models", headers=headers)
    assert response.status_code == status


@each_case(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:3000"},  # another program's page on this machine
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@each_case(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("DELETE", "/v1/responses/resp_1"),
    ],
)
async def test_request_of_another_page_gets_403(
    headers: dict[str, str], method: str, path: str
) -> None:
    served = front(stop("a"))
    response = await ask(served, method, path, json=CHAT, headers={"Host": LOCAL} | headers)
    check_error(response, 403, "permission_denied")
    assert not served.router.requests


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({"Origin": f"http://{LOCAL}", "Sec-Fetch-Site": "same-origin"}, {}),  # /docs
        ({"Sec-Fetch-Site": "none"}, {}),
        ({"Origin": "https://ui.example"}, {"cors_origins": "https://ui.example"}),
        ({"Origin": "https://ui.example"}, {"cors_origins": "*"}),
        # A page does not know the key.
        ({"Origin": "https://ui.example", "Authorization": f"Bearer {KEY}"}, {"api_key": (KEY,)}),
    ],
)
async def test_request_of_an_allowed_page_is_served(
    headers: dict[str, str], settings: dict[str, object]
) -> None:
    served = front(stop("a"), **settings)
    path = "/v1/chat/completions"
    response = await ask(served, "POST", path, json=CHAT, headers={"Host": LOCAL} | headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_body_with_a_type_that_pages_may_send_gets_415(content_type: str | None) -> None:
    served = front(stop("a"))
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await ask(served, "POST", "/v1/chat/completions", content=b"{}", headers=headers)
    check_error(response, 415, "unsupported_media")
    assert "application/json" in response.json()["error"]["message"]


@each_case("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-host", ""])
@each_case("workers", [1, 2])
def test_other_address_without_keys_is_an_error(host: str, workers: int) -> None:
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        Frontend(FrontendConfig(http_host=host, workers=workers)).run()


async def test_embedded_frontend_on_other_address_needs_keys() -> None:
    # No environment variable sets the keys of an embedded frontend.
    with pytest.raises(ConfigError, match=r"\(in Python: api_key\) or .*--allow-anonymous"):
        await Frontend(FrontendConfig(http_host="0.0.0.0")).serve()


@each_case(
    "settings",
    [
        {"http_host": "127.0.0.2"},
        {"http_host": "localhost"},
        {"http_host": "::1"},
        {"http_host": "0.0.0.0", "api_key": (KEY,)},
        {"http_host": "0.0.0.0", "api_keys_file": "keys.jsonl"},
        {"http_host": "0.0.0.0", "allow_anonymous": True},
        {},
    ],
)
def test_loopback_or_keys_or_a_flag_are_no_error(settings: dict[str, object]) -> None:
    FrontendConfig.model_validate(settings).check_exposure()


def test_keys_that_nothing_would_check_are_an_error() -> None:
    with pytest.raises(ConfigError, match="contradicts --api-key"):
        FrontendConfig(api_key=(KEY,), allow_anonymous=True)
