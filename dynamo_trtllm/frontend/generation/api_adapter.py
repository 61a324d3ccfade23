"""Define the interface between a generating endpoint and the code that runs it. Handles no JSON and no transport.

`frontend/http/request_handler` does what all endpoints share. An `ApiAdapter` reads one endpoint's body and
writes its responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dynamo_trtllm.api.common import ResponseMeta, Stats
from dynamo_trtllm.api.request_model import GenerationRequest
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.generation.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan, RequestContext
from dynamo_trtllm.tokenization.base import Renderer, ServedModel

B = TypeVar("B", bound=GenerationRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(Generic[B]):
    """A request that was parsed and planned."""

    meta: ResponseMeta
    body: B
    plan: GenerationPlan

    @property
    def renderer(self) -> Renderer:
        return self.plan.choices[0].renderer

    @property
    def answers(self) -> int:
        """The number of choices that the client gets."""
        return len(self.plan.choices) // self.plan.candidates * self.plan.keep


class SseEncoder(Protocol):
    """An encoder of one streamed response as server-sent events. Pure: it returns bytes and sends nothing."""

    def start(self) -> bytes:
        """Return the events before the first delta. Called once, right before it."""
        ...

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of one choice's delta, b"" for an empty delta. `delta.finish` ends the choice."""
        ...

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        """Return the last events of the stream: totals if the client asked for them, and the end mark."""
        ...

    def error(self, error: DynamoError) -> bytes:
        """Return the events that end a stream with an error after its headers were sent."""
        ...


class Aggregator(Protocol):
    """A builder of one complete response from deltas."""

    def push(self, delta: ChoiceDelta) -> None: ...

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        """Return the response body. Called once, after each choice's delta with `finish`."""
        ...


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API."""

    @property
    def endpoint(self) -> str:
        """The value of the metric label `endpoint`."""
        ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def body(self) -> type[B]: ...

    @property
    def prompt(self) -> frozenset[str]:
        """The body's fields that are not needed any more after planning."""
        ...

    async def plan(self, body: B, served: ServedModel, context: RequestContext, *, off_loop: bool) -> GenerationPlan:
        """Plan the request. With `off_loop` the body is large and the work is done in a thread.

        Raises:
            RequestError: the request is wrong or not supported.
        """
        ...

    def encoder(self, prepared: PreparedRequest[B]) -> SseEncoder: ...

    def aggregator(self, prepared: PreparedRequest[B]) -> Aggregator: ...

    async def on_complete(self, prepared: PreparedRequest[B], answer: SseEncoder | Aggregator) -> None:
        """Handle a complete response before its last part is sent. `answer` comes from `encoder` or `aggregator`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessAdapter(Generic[B]):
    """An adapter of an endpoint without stored state."""

    endpoint: str
    id_prefix: str
    body: type[B]
    prompt: frozenset[str]
    prepare: Callable[[B, ServedModel, RequestContext], GenerationPlan]
    encoder: Callable[[PreparedRequest[B]], SseEncoder]
    aggregator: Callable[[PreparedRequest[B]], Aggregator]

    async def plan(self, body: B, served: ServedModel, context: RequestContext, *, off_loop: bool) -> GenerationPlan:
        if off_loop:
            return await in_thread(self.prepare, body, served, context)
        return self.prepare(body, served, context)

    async def on_complete(self, prepared: PreparedRequest[B], answer: SseEncoder | Aggregator) -> None:
        pass
