"""Generates requests from `/openapi.json`, and checks the answers against it.

Importing schemathesis takes seconds of CPU, so only the test that needs it imports this module.

The router plays all sorts of answers and errors, but none that is a 500: one would be a fault of
the edge.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.tokenization.conversation import Conversation
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import ModelNotFound
from dynamo_trtllm.protocol.messages import FinishReason, GenerateRequest, TokenIds
from dynamo_trtllm.protocol.streams import OnChunk
from tests.kit.frontend_app import (
    CALL,
    CARD,
    CONTENT,
    REASONING,
    Catalog,
    CharacterRenderer,
    FakeFrontend,
    ScriptedRouter,
    chunk,
    stop,
)
from tests.kit.memory_http import asgi

CHECKED = [
    negative_data_rejection,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
SCRIPTS: list[list[Any]] = [
    [chunk("Hel"), chunk("lo", finish=FinishReason.LENGTH)],
    [chunk("why", ids=[REASONING]), chunk("{", ids=[CALL]), stop("}")],
    [chunk("why", ids=[REASONING]), chunk("so", ids=[CONTENT]), stop()],
    [chunk("ab", logprobs=True), stop()],
    [stop()],
    [errors.NoInstances("no decode worker")],
    [errors.DeadlineExceeded("late")],
    [chunk("a"), errors.Disconnected("lost")],
]


class ShowsNames(CharacterRenderer):
    def render(self, conversation: Conversation) -> TokenIds:
        names = "".join(message.name or "" for message in conversation.messages)
        return self.encode(names) + super().render(conversation)


class AnyModel(Catalog):
    """A catalog that serves every model, apart from some names."""

    def get(self, name: str, tenant: Tenant | None = None) -> ServedModel:
        if len(name) % 5 == 4:
            raise ModelNotFound(f"model {name!r} not found", field="model")
        return ServedModel(CARD, self.renderer)


class Varied(ScriptedRouter):
    """A router with another script for each prompt."""

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        self.script = SCRIPTS[(sum(request.token_ids) + request.sampling.max_tokens) % len(SCRIPTS)]
        await super().play(request, trace, on_chunk)


def served() -> FakeFrontend:
    catalog = AnyModel()
    catalog.renderer = ShowsNames()
    return FakeFrontend(Varied([]), FrontendConfig(), catalog)


def map_body(context: Any, body: Any) -> Any:
    """A response that is not kept is one 404 like any other: most bodies shall get further."""
    if (
        isinstance(body, dict)
        and isinstance(previous := body.get("previous_response_id"), str)
        and len(previous) % 4
    ):
        return {name: value for name, value in body.items() if name != "previous_response_id"}
    return body


def operations() -> list[Any]:
    """Return the operations of the API, without cases for every keyword of its schemas."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", asgi(served().app))
    schema.hook(map_body)
    return [operation.ok() for operation in schema.get_all_operations()]


def bounded(examples: int) -> hypothesis.settings:
    """The same cases in every run."""
    return hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=5000,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def is_allowed(case: schemathesis.Case) -> bool:
    """Return whether only unknown fields of the body, which are ignored, violate the schema."""
    if not isinstance(case.body, dict):
        return False
    (body,) = case.operation.body
    known = {
        name: value
        for name, value in case.body.items()
        if name in body.resolved_schema["properties"]
    }
    return bool(body.is_valid(known) and not body.is_valid(case.body))


def check(operation: Any, examples: int) -> None:
    """Send requests that the schema allows, and some that it forbids."""
    cases = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

    @bounded(examples)
    @hypothesis.given(case=st.one_of(cases))
    def check_answer(case: schemathesis.Case) -> None:
        answer = case.call()
        assert answer.status_code != 500, answer.text
        # A text that is longer than its limit may also be too long for any body. An unknown field
        # counts as absent if it is null.
        is_rejected_unread = answer.status_code == 413
        has_nulls = isinstance(case.body, dict) and None in case.body.values()
        checks = list(CHECKED)
        if is_rejected_unread or has_nulls or is_allowed(case):
            checks.remove(negative_data_rejection)
        case.validate_response(answer, checks=checks)

    check_answer()
