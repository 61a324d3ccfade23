"""Creates a frontend with a scripted router and a renderer whose tokens are characters."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_trtllm.cluster.discovery.memory import InstanceRecords, MemoryDiscovery
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.response_schemas import ReadinessReport
from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.http.hooks import Hooks
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Tool
from dynamo_trtllm.frontend.tokenization.output import Channel, DeltaBuilder, StepOutput
from dynamo_trtllm.frontend.tokenization.renderer import NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.frontend.tokenization.text_parsers import text_output
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Instance,
    ModelDeploymentCard,
    PhaseTimings,
    Role,
    TokenIds,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.phases import Span
from dynamo_trtllm.protocol.streams import OnChunk
from dynamo_trtllm.support.http_server.server import Router
from tests.kit.generator_streams import PlayedRouter

# markers; every other id is a character's code point
REASONING = 1
CONTENT = 2
CALL = 3
END = 4
HALF = 5
MODEL = "lab/tiny"
CARD = ModelDeploymentCard(
    name=MODEL, context_length=100, vocab_size=0x3000, eos_token_ids=(END,), renderer="harmony"
)


class Characters:
    """The parser of `CharacterRenderer`: REASONING, CONTENT and CALL switch the channel.

    A forced call is returned with the first tokens.
    """

    def __init__(self, forced_ids: TokenIds = NO_FORCED_IDS) -> None:
        self._pipe = CONTENT
        self._calls = 0
        self._out = DeltaBuilder()
        self._read(forced_ids)

    def push(self, ids: TokenIds) -> StepOutput:
        self._read(ids)
        return self._out.take()

    def _read(self, ids: TokenIds) -> None:
        if self._pipe == CONTENT and min(ids, default=END) > HALF:
            # fast path without markers
            self._out.add(Channel.CONTENT, ids.tobytes().decode("utf-32-le"))
            return
        for token_id in ids:
            if token_id in (REASONING, CONTENT):
                self._pipe = token_id
            elif token_id == CALL:
                self._pipe = CALL
                self._out.begin_call(self._calls, "get_system_health")
                self._calls += 1
            elif token_id in (END, HALF):
                continue
            elif self._pipe == REASONING:
                self._out.add(Channel.REASONING, chr(token_id))
                self._out.reasoning_tokens += 1
            elif self._pipe == CALL:
                self._out.add_arguments(self._calls - 1, chr(token_id))
            else:
                self._out.add(Channel.CONTENT, chr(token_id))

    def finish(self) -> StepOutput:
        return StepOutput()


class PlainCharacters:
    """A parser that returns everything as content, without the hidden tokens."""

    def __init__(self, hidden: frozenset[int]) -> None:
        self._hidden = hidden

    def push(self, ids: TokenIds) -> StepOutput:
        return text_output(
            "".join(chr(token_id) for token_id in ids if token_id not in self._hidden)
        )

    def finish(self) -> StepOutput:
        return StepOutput()


class CharacterRenderer:
    stop_token_ids: tuple[int, ...] = (END,)
    call_stop_token_ids = ()
    call_opening = None
    variables = frozenset({"tools", "reasoning_effort"})
    is_loaded = True

    def __init__(self) -> None:
        self.inline_bytes = 1000
        self.conversations: list[Conversation] = []
        self.rendered_on_loop: list[bool] = []

    def preload(self) -> None: ...

    def render(self, conversation: Conversation) -> TokenIds:
        self.conversations.append(conversation)
        self.rendered_on_loop.append(threading.current_thread() is threading.main_thread())
        return self.encode("".join(message.content for message in conversation.messages))

    def encode(self, text: str, *, is_prompt: bool = True) -> TokenIds:
        return token_ids(map(ord, text))

    def token_text(self, token_id: int) -> str:
        return self.decode(token_ids([token_id]))

    def token_texts(self, ids: TokenIds) -> list[str]:
        return [f"<{token_id}>" for token_id in ids]

    def decode(self, ids: TokenIds) -> str:
        return "".join("\ufffd" if token_id == HALF else chr(token_id) for token_id in ids)

    def chat_parser(
        self, *, forced_ids: TokenIds = NO_FORCED_IDS, hidden: frozenset[int] | None = None
    ) -> Characters:
        return Characters(forced_ids)

    def builtin_tools(self, tools: Iterable[Tool]) -> frozenset[str]:
        return frozenset()

    def call_header(self, tool: Tool | None) -> TokenIds | None:
        return token_ids([CALL])

    def answer_header(self) -> tuple[str, TokenIds]:
        return chr(CONTENT), token_ids([CONTENT])

    def text_parser(
        self, hidden: frozenset[int] | None = None, *, before: Sequence[int] = ()
    ) -> PlainCharacters:
        return PlainCharacters(frozenset(range(HALF + 1)) if hidden is None else hidden)


class Catalog(ModelRegistry):
    """A registry of one model, the workers of which are those that a test sets."""

    def __init__(self, context_length: int = CARD.context_length) -> None:
        discovery = MemoryDiscovery(InstanceRecords())
        super().__init__(ClusterView(), discovery, InprocPlane(), "dynamo")
        self.renderer = CharacterRenderer()
        card = msgspec.structs.replace(CARD, context_length=context_length)
        self.served = self._served
        self.served[MODEL] = ServedModel(card, self.renderer)
        self.up: list[Instance] = []
        self.lacks: str | None = None
        self.preloaded: list[str] = []
        self.shown: ReadinessReport = {
            "num_pairs": 0,
            "num_quarantined": 0,
            "pairs": [],
            "mismatched": [],
            "rejected_records": [],
            "discovery_problem": "",
        }

    def preload(self, name: str) -> None:
        self.preloaded.append(name)

    def instances(self) -> list[Instance]:
        return self.up

    def not_ready_reason(self, name: str) -> str | None:
        return self.lacks

    def num_rejected(self) -> int:
        return len(self.shown["rejected_records"])

    def readiness(self, limit: int) -> ReadinessReport:
        return self.shown


@dataclass
class ScriptedRouter(PlayedRouter):
    """A router that plays `script`: it yields chunks, raises errors, and waits for events."""

    script: list[Chunk | BaseException | asyncio.Event]
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    yielded: int = 0

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        self.requests.append(request)
        self.running += 1
        self.begun.set()
        try:
            trace.prefill_instance = 0xAB
            trace.prefill_stats = PhaseTimings(queue_s=0.5, prefill_s=1.0, cached_tokens=2)
            trace.decode_instance = 0xCD
            trace.spans += [
                Span("prefill", time.monotonic(), Role.PREFILL),
                Span("decode", time.monotonic()),
            ]
            if (alternatives := request.sampling.prompt_logprobs) is not None:
                trace.prompt_logprobs += prompt_logprobs(request.token_ids, alternatives)
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, BaseException):
                    raise step
                else:
                    if step.finish_reason is not None:
                        trace.decode_stats = PhaseTimings(
                            queue_s=0.25, kv_transfer_s=2.0, kv_bytes=4096, transport="nixl"
                        )
                    self.yielded += 1
                    if not on_chunk(step):
                        return
                    await asyncio.sleep(0)  # the next one comes with another step
        finally:
            self.running -= 1
            self.closed.set()


def chunk(
    text: str = "",
    *,
    finish: FinishReason | None = None,
    ids: Sequence[int] = (),
    logprobs: bool = False,
) -> Chunk:
    all_ids = [*ids, *map(ord, text)]
    entries = (
        tuple(TokenLogprob(i, -0.5, ((i, -0.5), (ord("z"), float("-inf")))) for i in all_ids)
        if logprobs
        else ()
    )
    return Chunk(token_ids=token_ids(all_ids), finish_reason=finish, logprobs=entries)


def prompt_logprobs(ids: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """The log-probabilities of a prompt: -1 for its second token, -2 for its third one, and so
    on.
    """
    first, *rest = ids
    scored = [
        TokenLogprob(token, -1.0 - at, ((token, -1.0 - at),) * alternatives)
        for at, token in enumerate(rest)
    ]
    return [TokenLogprob(first, math.nan), *scored]


def stop(text: str = "") -> Chunk:
    return Chunk(token_ids=token_ids([*map(ord, text), END]), finish_reason=FinishReason.STOP)


@dataclass
class FakeFrontend:
    """An app with the objects that tests inspect."""

    router: ScriptedRouter
    config: FrontendConfig = field(default_factory=FrontendConfig)
    catalog: Catalog = field(default_factory=Catalog)
    metrics: FrontendMetrics = field(default_factory=FrontendMetrics)
    not_ready_reason: str | None = None  # why /ready does not return 200
    hooks: Hooks | None = None

    def __post_init__(self) -> None:
        self.built = build_app(
            self.config,
            self.catalog,
            self.router,
            self.metrics,
            not_ready_reason=lambda: self.not_ready_reason,
            hooks=self.hooks,
        )

    @property
    def app(self) -> Router:
        return self.built.router


def front(*script: Chunk | BaseException | asyncio.Event, **config: object) -> FakeFrontend:
    return FakeFrontend(ScriptedRouter(list(script)), FrontendConfig.model_validate(config))
