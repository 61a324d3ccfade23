"""Every error class has its own row, and the row decides the answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.protocol.errors import (
    Cancelled,
    ConfigError,
    DynamoError,
    InvalidRequest,
    Overloaded,
    QueryOfDeath,
)
from dynamo_trtllm.protocol.http_status import STATUS, to_response
from tests.kit.cases import each_case

DOCS = Path(__file__).parents[3] / "docs"


def walk(cls: type[DynamoError]) -> list[type[DynamoError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in walk(child))]


@each_case("cls", [c for c in walk(DynamoError) if c.__module__ == "dynamo_trtllm.protocol.errors"])
def test_class_of_the_tree_then_it_has_a_row_of_its_own(cls: type[DynamoError]) -> None:
    assert cls in STATUS
    response = to_response(cls("change this"), openai_error)
    assert response.status == STATUS[cls]
    assert response.body["error"]["code"] == cls.code
    assert ("Retry-After" in response.headers) == (response.status in (429, 503))


def test_docs_list_every_code_with_its_status() -> None:
    rows = [
        line.split("|")
        for line in (DOCS / "api.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    listed = {
        (int(status), code)
        for _, statuses, *rest in rows
        for status in re.findall(r"\d{3}", statuses)
        for code in re.findall(r"`(\w+)`", " ".join(rest))
    }
    leaves = [cls for cls in STATUS if cls is InvalidRequest or not cls.__subclasses__()]
    # one that ends the start
    wanted = {(STATUS[cls], cls.code) for cls in leaves if cls is not ConfigError}
    assert wanted <= listed


def test_retryable_classes_then_no_client_error_but_429() -> None:
    for cls in STATUS:
        if cls.retryable:
            assert STATUS[cls] >= 500 or issubclass(cls, Overloaded)


@pytest.mark.parametrize(
    ("error", "num_sent"), [(Cancelled("x"), 1), (QueryOfDeath("x"), 1), (Overloaded("x"), 2)]
)
def test_sdk_sends_no_cancelled_request_again(error: DynamoError, num_sent: int) -> None:
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        response = to_response(error, openai_error, retry_after_s=0)
        return httpx.Response(response.status, json=response.body, headers=response.headers)

    http_client: Any = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(
        base_url="http://frontend/v1", api_key="none", max_retries=1, http_client=http_client
    )
    with pytest.raises(openai.APIStatusError):
        client.responses.create(model="m", input="hi")
    assert len(sent) == num_sent


def test_subclass_without_a_row_then_its_parents() -> None:
    class Narrower(InvalidRequest):
        pass

    assert to_response(Narrower("x", field="n"), openai_error).status == 400
    assert to_response(Narrower("x", field="n"), openai_error).body["error"]["param"] == "n"


def test_error_quoting_megabytes_is_cut_in_the_middle() -> None:
    quoted = "x" * 1_000_000
    error = InvalidRequest(f"{quoted} is not a known field; leave it out", field=quoted)
    body = to_response(error, openai_error).body["error"]
    for message in (error.message, str(error), body["message"]):
        assert message.startswith("xxx")
        assert message.endswith("is not a known field; leave it out")
    assert len(error.message) < 4_100
    assert len(body["message"]) < 1_100
    assert error.field == body["param"]
    assert len(body["param"] or "") < 210
