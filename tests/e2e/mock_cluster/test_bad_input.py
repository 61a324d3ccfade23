"""Bad requests and bad launch lines: one clear answer or one line each, and nothing else
disturbed.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.kit.cases import each_case
from tests.kit.cluster import Cluster, command, run_in_one, write_yaml

pytestmark = pytest.mark.timeout(180)

GOOD: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}


class Bad(NamedTuple):
    request: dict[str, Any]
    status: int
    code: str
    says: str
    method: str = "POST"
    path: str = CHAT
    param: str | None = None


def field(**changes: Any) -> dict[str, Any]:
    return {"json": GOOD | changes}


BAD = {
    "malformed JSON": Bad({"content": b'{"model": "mock",\n "messages": [}', "headers": JSON}, 400, "invalid_request",
                          r"line 2, column \d+"),
    "no JSON at all": Bad({"content": b"", "headers": JSON}, 400, "invalid_request", "JSON"),
    "not an object": Bad({"json": [1]}, 400, "invalid_request", "must be a JSON object, not a list"),
    "unknown model": Bad(field(model="mokc"), 404, "model_not_found", "mokc.*available models: mock", param="model"),
    "unknown field": Bad(field(max_tokenz=3), 400, "unsupported_parameter", "max_tokenz.*'max_tokens'",
                         param="max_tokenz"),
    "wrong type": Bad(field(max_tokens="5"), 400, "invalid_request", "max_tokens must be", param="max_tokens"),
    "no messages": Bad(field(messages=[]), 400, "invalid_request", "messages", param="messages"),
    "unsupported value": Bad(field(service_tier="turbo"), 400, "unsupported_parameter",
                             "service_tier is not supported", param="service_tier"),
    "wrong content type": Bad({"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415,
                              "unsupported_media", "application/json"),
    "packed body": Bad({"content": gzip.compress(json.dumps(GOOD).encode()),
                        "headers": JSON | {"Content-Encoding": "gzip"}}, 415, "unsupported_media", "gzip"),
    "byte that is no UTF-8": Bad({"content": json.dumps(GOOD).encode().replace(b"Hello", b"\xff"), "headers": JSON},
                                 400, "invalid_request", "UTF-8"),
    "half a character": Bad({"content": json.dumps(GOOD).replace("Hello", r"\ud800").encode(), "headers": JSON}, 400,
                            "invalid_request", "surrogate"),
    "nested without end": Bad({"content": b'{"model":' + b"[" * 100_000, "headers": JSON}, 400, "invalid_request",
                              "depth"),
    "number without end": Bad({"content": b'{"model":' + b"9" * 400_000 + b"}", "headers": JSON}, 400,
                              "invalid_request", ""),
    "more choices than there may be": Bad(field(n=10**6), 400, "invalid_request", "128", param="n"),
    "name without end": Bad(field(model="x" * 10**6), 400, "invalid_request", "^.{1,100}512 characters", param="model"),
    "prompt beyond the context": Bad({"json": {"model": "mock", "prompt": [7] * 131_100}}, 400,
                                     "context_length_exceeded", "131100 tokens.*131072", path=TEXT, param="prompt"),
    "answer beyond the context": Bad({"json": {"model": "mock", "prompt": [7], "max_tokens": 131_072}}, 400,
                                     "context_length_exceeded", "at most 131071", path=TEXT, param="max_tokens"),
    "id that is no token": Bad({"json": {"model": "mock", "prompt": [1, 999_999]}}, 400, "invalid_request",
                               "999999", path=TEXT, param="prompt"),
    "log-probabilities of the mock engine": Bad(field(logprobs=True), 400, "unsupported_parameter", "logprobs",
                                                param="logprobs"),
    "JSON of the mock engine": Bad(field(response_format={"type": "json_object"}), 400, "unsupported_parameter",
                                   "response_format", param="response_format"),
    "penalty of the mock engine": Bad(field(presence_penalty=1), 400, "unsupported_parameter", "presence_penalty",
                                      param="presence_penalty"),
    "unknown path": Bad({"json": GOOD}, 404, "unknown_url", "/v1/chat", path="/v1/chat"),
    "wrong method": Bad({}, 405, "method_not_allowed", "GET", method="GET"),
}  # fmt: skip


@pytest.fixture
def mock(mock_cluster: Cluster) -> Iterator[httpx.Client]:
    with mock_cluster.client() as client:
        yield client


def check_good(client: httpx.Client, model: str = "mock") -> None:
    answer = client.post(CHAT, json=GOOD | {"model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def check_error(answer: httpx.Response, status: int, code: str, says: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert re.search(says, error["message"]), error["message"]
    assert answer.headers["x-request-id"]
    return error


@each_case("name", BAD)
def test_bad_request_gives_one_error_and_next_is_served(mock: httpx.Client, name: str) -> None:
    bad = BAD[name]
    error = check_error(
        mock.request(bad.method, bad.path, **bad.request), bad.status, bad.code, bad.says
    )
    assert error["type"] == "invalid_request_error"
    assert error["param"] == bad.param
    check_good(mock)


def test_request_when_the_body_is_too_large_then_413(mock: httpx.Client) -> None:
    answer = mock.post(CHAT, content=b" " * ((8 << 20) + 1), headers=JSON)
    check_error(answer, 413, "payload_too_large", str(8 << 20))
    check_good(mock)


def test_request_when_a_role_has_no_worker_then_503_names_it(
    mock_cluster: Cluster, mock: httpx.Client
) -> None:
    # tests/unit/frontend/test_readiness.py has each of the roles
    name = "only-prefill"
    missing = "decode"
    worker = mock_cluster.mock("prefill", name)
    worker.instance()
    mock_cluster.frontend.wait_for(f"model {name} is loaded, but not available yet: .*{missing}")
    answer = mock.post(CHAT, json=GOOD | {"model": name})
    check_error(answer, 503, "no_instances", missing)
    assert int(answer.headers["Retry-After"]) >= 1
    assert missing in mock.get(f"/v1/models/{name}/ready").json()["message"]
    assert missing in mock.get("/health").json()["message"]
    check_good(mock)
    worker.stop()


Launch = Callable[[Path], list[str]]
WORKER = ["dynamo_trtllm", "--engine", "mock", "--model", "mock"]
FRONTEND = ["dynamo_trtllm.frontend", "--http-host", "127.0.0.1", "--http-port", "0"]

LINES: dict[str, tuple[Launch, str]] = {
    "worker's unknown flag": (
        lambda _: [*WORKER, "--max-num-token", "5"],
        "unknown flag --max-num-token; .*--max-num",
    ),
    "frontend's unknown flag": (
        lambda _: [*FRONTEND, "--htpp-host", "::"],
        "unknown flag --htpp-host; .*--http-host",
    ),
    "model path left out": (lambda _: ["dynamo_trtllm"], "--model-path is missing"),
    "unknown key": (
        lambda folder: [*WORKER, "--extra-engine-args", write_yaml(folder, "kv_block_sise: 32\n")],
        "kv_block_sise.*kv_block_size",
    ),
    "broken YAML": (
        lambda folder: [*WORKER, "--extra-engine-args", write_yaml(folder, "kv_block_size: [32\n")],
        "engine.yaml",
    ),
    "value out of range": (lambda _: [*WORKER, "--max-batch-size", "0"], "--max-batch-size is .*0"),
}


def test_launch_with_wrong_line_exits_with_2(
    mock_cluster: Cluster, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    wrong = []
    for number, (launch, _) in enumerate(LINES.values()):
        (folder := tmp_path / str(number)).mkdir()
        wrong.append(launch(folder))
    for (name, (_, says)), done in zip(
        LINES.items(), run_in_one(wrong, env=mock_cluster.env), strict=True
    ):
        with subtests.test(name):
            assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
            assert re.search(says, done.stderr), done.stderr


@pytest.mark.parametrize(
    "launch", [["dynamo_trtllm.frontend", "--http-port"], [*WORKER, "--system-port"]]
)
def test_launch_on_taken_port_names_it(mock_cluster: Cluster, launch: list[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        status, lines = command([*launch, str(port)], mock_cluster.env)
    assert (status, len(lines)) == (2, 1), lines
    assert f"{launch[-1]} {port}" in lines[0]


def test_launch_when_a_server_is_away_then_one_line_and_status_1(mock_cluster: Cluster) -> None:
    def check_ends(launch: list[str], variable: str) -> None:
        status, lines = command(launch, mock_cluster.env | {variable: address})
        errors = [line for line in lines if " INFO " not in line and ": waiting for " not in line]
        assert (status, len(errors)) == (1, 1), (launch, variable, lines)
        assert address in errors[0]

    with socket.socket() as held, ThreadPoolExecutor(2) as pool:
        # and not listening: connections are refused, and no other process gets the port
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        for check in [
            pool.submit(check_ends, launch, variable)
            for launch, variable in ((WORKER, "ETCD_ENDPOINTS"), (FRONTEND, "NATS_SERVER"))
        ]:
            check.result()
