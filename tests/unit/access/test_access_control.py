"""Requests with and without API keys, through the app of a frontend."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.access.api_keys import ApiKey, digest_of
from dynamo_trtllm.access.keys_file import add_key, remove_key
from dynamo_trtllm.observability.metrics import ClientLoad, read_client_loads
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case
from tests.kit.frontend_app import MODEL, FakeFrontend, chunk, front, stop
from tests.kit.memory_http import MemoryClient
from tests.unit.frontend.responses_client import ask, check_error

KEY = "sk-key-of-the-settings"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
WRONG = f"{KEY}x"
Serve = Callable[..., FakeFrontend]


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def with_key(tmp_path: Path) -> Serve:
    """Return a frontend with one key in a file, the name of which is `alice`."""

    def serve(key: str = KEY, **about: Any) -> FakeFrontend:
        path = tmp_path / "keys.jsonl"
        add_key(path, ApiKey(name="alice", sha256=digest_of(key).hex(), **about))
        return front(chunk("a"), stop(), api_keys_file=path)

    return serve


async def chat(served: FakeFrontend, key: str = KEY, **fields: Any) -> httpx.Response:
    path = "/v1/chat/completions"
    return await ask(served, "POST", path, json=CHAT | fields, headers=bearer(key))


@each_case(
    "headers",
    [
        {},
        bearer(WRONG),
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY.upper()),
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"x-api-key": WRONG},
        bearer("k" * 50_000),
        {"Authorization": b"Bearer \xff\xfe"},
        {"Authorization": "Basic eDp5", "x-api-key": KEY},
        {"Authorization": "", "x-api-key": KEY},
        {"Authorization": "Bearer", "x-api-key": KEY},
        {"Authorization": f"Bearer {KEY}".encode() + b"\xa0"},
        {"Authorization": b"Bearer \x85" + KEY.encode()},
        {"x-api-key": KEY.encode() + b"\x85"},
    ],
)
async def test_request_without_a_valid_key_gets_401(headers: Any) -> None:
    served = front(stop("a"), api_key=(KEY,))
    response = await ask(served, "POST", "/v1/chat/completions", json=CHAT, headers=headers)
    check_error(response, 401, "invalid_api_key")
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text
    assert not served.router.requests


@each_case(
    "headers",
    [
        bearer(),
        {"authorization": f"bearer  {KEY} "},
        {"authorization": f"Bearer \t{KEY}\t"},
        {"x-api-key": KEY},
        {"x-api-key": f"\t {KEY} "},
        {"Authorization": f"Bearer {KEY}", "x-api-key": WRONG},
    ],
)
async def test_request_with_a_valid_key_is_served(headers: Any) -> None:
    served = front(stop("a"), api_key=("another-key-of-ours", KEY))
    response = await ask(served, "POST", "/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 200


@each_case(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}/ready"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/tokenize"),
        ("GET", "/version"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        ("GET", "/live/"),
        ("PUT", "/v1/models"),
    ],
)
async def test_every_other_path_needs_a_key(method: str, path: str) -> None:
    response = await ask(front(api_key=(KEY,)), method, path)
    assert response.status_code == 401
    assert (await ask(front(api_key=(KEY,)), method, path, headers=bearer())).status_code != 401


async def test_page_of_the_api_needs_no_key_and_has_no_data() -> None:
    response = await ask(front(api_key=(KEY,)), "GET", "/docs")
    assert response.status_code == 200
    assert MODEL not in response.text


@pytest.mark.parametrize("scope", ["api", "status", "all"])
async def test_description_of_the_api_is_for_every_key(with_key: Serve, scope: str) -> None:
    response = await ask(with_key(scope=scope), "GET", "/openapi.json", headers=bearer())
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/live", "/ready"])
async def test_probes_need_no_key(path: str) -> None:
    assert (await ask(front(api_key=(KEY,)), "GET", path)).status_code == 200


async def test_wrong_key_is_rejected_before_the_body_arrives() -> None:
    served = front(api_key=(KEY,))
    client = MemoryClient(served.app)
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n{")
    await asyncio.wait_for(client.until_answered(), 10)
    assert client.received.startswith(b"HTTP/1.1 401 ")
    client.leave()


async def test_preflight_of_a_browser_needs_no_key() -> None:
    served = front(api_key=(KEY,), cors_origins="https://ui.example")
    origin = {"Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    response = await ask(served, "OPTIONS", "/v1/chat/completions", headers=origin)
    assert response.status_code == 200
    response = await ask(served, "GET", "/v1/models", headers=origin)
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://ui.example"


async def test_errors_of_messages_have_the_form_of_its_api() -> None:
    served = front(api_key=(KEY,))
    response = await ask(served, "POST", "/v1/messages", json={}, headers={"x-api-key": WRONG})
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("scope", "api", "status"), [("api", 200, 403), ("status", 403, 200), ("all", 200, 200)]
)
async def test_scope_decides_which_paths_a_key_is_for(
    with_key: Serve, scope: str, api: int, status: int
) -> None:
    served = with_key(scope=scope)
    for path, expected in (("/v1/models", api), ("/metrics", status), ("/health", status)):
        response = await ask(served, "GET", path, headers=bearer())
        assert response.status_code == expected
        if expected == 403:
            check_error(response, 403, "permission_denied")


async def test_expired_key_gets_401(with_key: Serve) -> None:
    served = with_key(expires=datetime.now(UTC) - timedelta(seconds=1))
    check_error(await chat(served), 401, "invalid_api_key")


async def test_key_that_expires_later_is_served(with_key: Serve) -> None:
    served = with_key(expires=datetime.now(UTC) + timedelta(hours=1))
    assert (await chat(served)).status_code == 200


async def test_other_models_than_those_of_the_key_get_403(with_key: Serve) -> None:
    served = with_key(models=("another",))
    check_error(await chat(served), 403, "permission_denied", "model")
    for path in (f"/v1/models/{MODEL}", f"/v1/models/{MODEL}/ready"):
        response = await ask(served, "GET", path, headers=bearer())
        check_error(response, 403, "permission_denied", "model")
    body = {"model": MODEL, "prompt": "a"}
    response = await ask(served, "POST", "/tokenize", json=body, headers=bearer())
    check_error(response, 403, "permission_denied", "model")
    assert (await ask(served, "GET", "/v1/models", headers=bearer())).json()["data"] == []
    assert not served.router.requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models/nope"),
        ("GET", "/v1/models/nope/ready"),
    ],
)
async def test_error_of_an_unknown_model_lists_only_models_of_the_key(
    with_key: Serve, method: str, path: str
) -> None:
    served = with_key(models=("nope", "theirs"))
    served.catalog.served["theirs"] = served.catalog.served[MODEL]
    text = [{"role": "user", "content": "hi"}]
    fields = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": text, "max_tokens": 1},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    body = {"model": "nope", **fields.get(path, {"messages": text})}
    sent = {"json": body} if method == "POST" else {}
    response = await ask(served, method, path, headers=bearer(), **sent)
    assert response.status_code == 404
    assert "available models: theirs" in response.text
    assert MODEL not in response.text


async def test_models_of_the_key_are_served(with_key: Serve) -> None:
    served = with_key(models=("another", MODEL))
    assert (await chat(served)).status_code == 200
    listed = (await ask(served, "GET", "/v1/models", headers=bearer())).json()["data"]
    assert [model["id"] for model in listed] == [MODEL]


@pytest.mark.parametrize(
    ("own", "wanted", "used"),
    [(5, None, 5), (5, 7, 7), (-2, None, -2), (-2, -1, -1), (-2, 0, 0), (0, 0, 0), (0, 3, 3)],
)
async def test_key_sets_the_priority_of_its_requests(
    with_key: Serve, own: int, wanted: int | None, used: int
) -> None:
    served = with_key(priority=own)
    fields = {} if wanted is None else {"priority": wanted}
    assert (await chat(served, **fields)).status_code == 200
    assert served.router.requests[0].priority == used


@pytest.mark.parametrize(("own", "wanted"), [(0, -1), (5, 4), (5, 0), (-2, -3)])
async def test_lower_priority_value_than_that_of_the_key_gets_403(
    with_key: Serve, own: int, wanted: int
) -> None:
    served = with_key(priority=own)
    check_error(await chat(served, priority=wanted), 403, "permission_denied", "priority")


async def test_too_many_requests_get_429_with_the_time_to_wait(with_key: Serve) -> None:
    served = with_key(requests_per_minute=2)
    first = await chat(served)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await chat(served)).status_code == 200
    response = await chat(served)
    check_error(response, 429, "rate_limit_exceeded")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert 55 < int(response.headers["retry-after"]) <= 64
    assert len(served.router.requests) == 2


async def test_tokens_of_prompt_and_output_count(with_key: Serve) -> None:
    served = with_key(tokens_per_minute=20)
    first = await chat(served, max_tokens=10)
    used = first.json()["usage"]["total_tokens"]
    assert 0 < used < 10  # the answer was shorter than it might have been
    second = await chat(served)
    remaining = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 20 - 2 * used <= remaining <= 20 - used
    for _ in range(20 // used):
        last = await chat(served)
    check_error(last, 429, "rate_limit_exceeded")
    assert last.headers["x-ratelimit-limit-tokens"] == "20"
    assert last.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_request_that_never_fits_gets_400_without_retry(with_key: Serve) -> None:
    served = with_key(tokens_per_minute=20, concurrent_generations=2)
    for fields, problem in (({"max_tokens": 50}, "20 tokens per minute"), ({"n": 3}, "the 2 conc")):
        response = await chat(served, **fields)
        check_error(response, 400, "exceeds_key_limit", "n" if "n" in fields else None)
        assert problem in response.json()["error"]["message"]
        assert "retry-after" not in response.headers
    assert (await chat(served)).status_code == 200


async def test_metrics_name_keys_in_use_but_no_addresses(with_key: Serve) -> None:
    served = with_key(weight=2.0)
    used = (await chat(served)).json()["usage"]
    loads = read_client_loads(served.metrics.render().decode())
    tokens = loads["alice"].tokens
    assert loads == {"alice": ClientLoad(weight=2.0, tokens=tokens, waiting=0, running=0)}
    assert tokens > used["prompt_tokens"]
    without = front(chunk("a"), stop())
    assert (await chat(without)).status_code == 200
    assert read_client_loads(without.metrics.render().decode()) == {}


async def test_choices_at_once_are_limited_until_they_end(with_key: Serve) -> None:
    served = with_key(concurrent_generations=3)
    check_error(await chat(served, n=4), 400, "exceeds_key_limit", "n")
    for _ in range(3):
        assert (await chat(served, n=3)).status_code == 200


async def test_choices_of_a_running_request_count(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="alice", sha256=digest_of(KEY).hex(), concurrent_generations=1))
    go_on = asyncio.Event()
    served = front(chunk("a"), go_on, stop(), api_keys_file=path)
    running = asyncio.create_task(chat(served))
    while not served.router.requests:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0)
    check_error(await chat(served), 429, "rate_limit_exceeded")
    go_on.set()
    assert (await running).status_code == 200
    assert (await chat(served)).status_code == 200


async def test_changed_file_is_used(with_key: Serve, tmp_path: Path) -> None:
    served = with_key()
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="bob", sha256=digest_of(WRONG).hex()))
    assert (await chat(served, WRONG)).status_code == 401
    await served.built.access.reload()
    assert (await chat(served, WRONG)).status_code == 200
    remove_key(path, "alice")
    await served.built.access.reload()
    assert (await chat(served)).status_code == 401
    assert b'api_keys_reloads_total{outcome="ok"} 2.0' in served.metrics.render()


@pytest.mark.parametrize("fault", ["wrong", "missing", "writable"])
async def test_file_with_a_fault_keeps_the_keys_before(
    with_key: Serve, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = with_key()
    path = tmp_path / "keys.jsonl"
    good = path.read_bytes()
    if fault == "wrong":
        path.write_bytes(good + b"{}\n")
    elif fault == "missing":
        path.unlink()
    else:
        path.chmod(0o666)
    for _ in range(3):
        await served.built.access.reload()
    assert (await chat(served)).status_code == 200
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1  # and not once a second
    assert str(path) in errors[0].getMessage()
    assert b'api_keys_reloads_total{outcome="failed"} 1.0' in served.metrics.render()
    path.unlink(missing_ok=True)
    path.write_bytes(good)
    path.chmod(0o600)
    await served.built.access.reload()
    assert b'api_keys_reloads_total{outcome="ok"} 1.0' in served.metrics.render()


@pytest.mark.parametrize(
    ("about", "field"),
    [
        (ApiKey(name="bob", sha256=digest_of(KEY).hex(), scope="status"), "sha256"),
        (ApiKey(name=f"api-key-{digest_of(KEY).hex()[:8]}", sha256="0" * 64), "name"),
    ],
)
async def test_key_of_the_file_that_is_in_the_settings_is_an_error(
    tmp_path: Path, about: ApiKey, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    add_key(path, ApiKey(name="alice", sha256=digest_of(WRONG).hex()))
    served = front(chunk("a"), stop(), api_keys_file=path, api_key=(KEY,))
    add_key(path, about)
    problem = f"{path} line 2: {field} is that of a key in --api-key or DYN_TRTLLM_API_KEY; remove"
    with pytest.raises(ConfigError, match=re.escape(problem)):
        AccessControl(served.config)
    await served.built.access.reload()
    assert problem in caplog.text
    for key in (KEY, WRONG):
        assert (await chat(served, key)).status_code == 200
    response = await ask(served, "GET", "/v1/models", headers=bearer())
    assert response.status_code == 200


def test_file_with_a_fault_at_the_start_is_an_error(tmp_path: Path) -> None:
    config = front().config.model_copy(update={"api_keys_file": tmp_path / "missing"})
    with pytest.raises(ConfigError, match="missing"):
        AccessControl(config)


async def test_logs_and_metrics_have_the_name_and_not_the_key(
    with_key: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dynamo_trtllm")
    served = with_key()
    await chat(served)
    await chat(served, WRONG)
    await chat(served, max_tokens=0)
    assert " key=alice " in caplog.text
    metrics = served.metrics.render().decode()
    assert 'access_denied_total{code="invalid_api_key"} 1.0' in metrics
    for text in (caplog.text, metrics, repr(served.config), repr(front(api_key=(KEY,)).config)):
        assert KEY not in text
        assert digest_of(KEY).hex() not in text


async def test_without_keys_everything_is_open() -> None:
    served = front(stop("a"))
    assert (await chat(served, WRONG)).status_code == 200
    assert (await ask(served, "GET", "/metrics")).status_code == 200
