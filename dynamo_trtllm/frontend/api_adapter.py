"""The interface between a generating endpoint and the code that runs it. Handles no JSON and no transport.

`generate_endpoint` and `request_handler` do what all endpoints share. An `ApiAdapter` reads one endpoint's body and
writes its responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NotRequired, Protocol, TypedDict, TypeVar

from dynamo_trtllm.api.request_model import GenerationRequest
from dynamo_trtllm.errors import DynamoError
from dynamo_trtllm.frontend.admission import in_thread
from dynamo_trtllm.frontend.detokenizer import ChoiceDelta, Usage
from dynamo_trtllm.frontend.model_registry import ServedModel
from dynamo_trtllm.frontend.preprocess import GenerationPlan, RequestContext
from dynamo_trtllm.tokenization.base import Renderer

B = TypeVar("B", bound=GenerationRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMeta:
    """What every object of an answer begins with. `created`: seconds since the epoch."""

    id: str
    model: str
    created: int
    client: str = ""  # the client's network address; "": not known


class Phases(TypedDict):
    """Seconds."""

    queue: float
    prefill: float
    handoff: float
    decode_wait: float


class Stats(TypedDict):
    """Who served a request and where its time went: for clients that send `x-dynamo-stats: 1`."""

    prefill_instance: str | None  # hexadecimal, as in subjects; several are joined by commas
    decode_instance: str | None
    kv_bytes: int
    transport: str
    queued_s: float  # in the frontend, before anything ran; part of `ttft_s`
    ttft_s: float
    tokens_per_s: float | None
    phase_s: Phases
    choices: NotRequired[list[Stats]]  # with several choices each one's own, in their order; above: all together


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest(Generic[B]):
    """One request, read and planned."""

    meta: ResponseMeta
    body: B
    plan: GenerationPlan

    @property
    def renderer(self) -> Renderer:
        return self.plan.choices[0].renderer

    @property
    def answers(self) -> int:
        """How many choices the client gets."""
        return len(self.plan.choices) // self.plan.candidates * self.plan.keep


class SseEncoder(Protocol):
    """The server-sent events of one streamed answer. Pure: bytes out, nothing sent."""

    def start(self) -> bytes:
        """Before the first piece; called once, right before it."""
        ...

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Of one choice; a piece with `finish` ends that choice. No bytes for a piece that adds nothing."""
        ...

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        """After the last choice has ended: totals, when the client asked for them, and the end mark."""
        ...

    def error(self, error: DynamoError) -> bytes:
        """Ends a stream whose headers have left, at any point."""
        ...


class Aggregator(Protocol):
    """Pieces to one whole answer."""

    def push(self, delta: ChoiceDelta) -> None: ...

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        """Called once, after each choice has had its piece with `finish`."""
        ...


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API."""

    @property
    def endpoint(self) -> str:
        """The metric label."""
        ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def body(self) -> type[B]: ...

    @property
    def prompt(self) -> frozenset[str]:
        """The body's fields that are no longer needed once the plan is made."""
        ...

    async def plan(self, body: B, served: ServedModel, context: RequestContext, *, off_loop: bool) -> GenerationPlan:
        """Raises what the client did wrong. `off_loop`: the body is large, do the work in a thread."""
        ...

    def encoder(self, prepared: PreparedRequest[B]) -> SseEncoder: ...

    def aggregator(self, prepared: PreparedRequest[B]) -> Aggregator: ...

    async def on_complete(self, prepared: PreparedRequest[B], answer: SseEncoder | Aggregator) -> None:
        """The answer is complete and not yet wholly sent. `answer`: what `events` or `aggregator` gave for the job."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatelessAdapter(Generic[B]):
    """A dialect that looks nothing up and keeps nothing."""

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
