"""One generation over HTTP, from body to last byte: parse, prepare, run, answer, log. The ASGI catch-all is here.

Headers leave only after the first chunk came, so that every earlier error has its own status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DynamoError, InternalError, Overloaded
from dynamo_trtllm.frontend.answer import ChatFold, Fold, Heading, Stats, TextFold
from dynamo_trtllm.frontend.base import Catalog, Generates
from dynamo_trtllm.frontend.http import ClientGone, Reply, check_json, header, internal, read_body, until_gone
from dynamo_trtllm.frontend.models import ServedModel
from dynamo_trtllm.frontend.pipeline import Trace
from dynamo_trtllm.frontend.postprocess import Output, Piece, pieces
from dynamo_trtllm.frontend.preprocess import Identity, Plan, prepare_chat, prepare_text
from dynamo_trtllm.frontend.sse import ChatEvents, Events, TextEvents
from dynamo_trtllm.messages import GenerateRequest, LegStats
from dynamo_trtllm.observe.metrics import FrontendMetrics
from dynamo_trtllm.openai.chat import ChatRequest
from dynamo_trtllm.openai.completions import CompletionRequest
from dynamo_trtllm.openai.sampling import SamplingFields
from dynamo_trtllm.openai.wire import parse
from dynamo_trtllm.render.base import Renderer

log = logging.getLogger(__name__)

THREAD_BYTES = 64 << 10  # bodies above are parsed and rendered in a thread, to not hold up other streams

B = TypeVar("B", bound=SamplingFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(Generic[B]):
    """One generating endpoint of the API."""

    endpoint: str  # metric label
    id_prefix: str
    body: type[B]
    prepare: Callable[[B, ServedModel, Identity], Plan]
    events: Callable[[Heading, Renderer, bool], Events]
    fold: Callable[[Heading, Renderer], Fold]


CHAT = Dialect(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prepare=prepare_chat,
    events=ChatEvents,
    fold=ChatFold,
)
TEXT = Dialect(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prepare=prepare_text,
    events=TextEvents,
    fold=TextFold,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What all exchanges share."""

    config: FrontendConfig
    models: Catalog
    pipeline: Generates
    metrics: FrontendMetrics
    permits: Permits


class Permits:
    """Admission at the door: one more than `limit` is refused at once, never queued."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    def __enter__(self) -> None:
        if self.taken >= self._limit:
            raise Overloaded(f"{self.taken} requests are being served, the most this server takes; try again later")
        self.taken += 1

    def __exit__(self, *_: object) -> None:
        self.taken -= 1


class Generation(Generic[B]):
    """The ASGI app of one dialect."""

    def __init__(self, dialect: Dialect[B], edge: Edge) -> None:
        self._dialect = dialect
        self._edge = edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = Run(dialect=self._dialect, edge=self._edge, reply=Reply(send), wants_stats=_wants_stats(scope))
        self._edge.metrics.request_started()
        code = "cancelled"
        try:
            code = await run.answer(scope, receive)
        finally:
            run.record(code)


def _wants_stats(scope: Scope) -> bool:
    return header(scope, b"x-dynamo-stats") == "1"


@dataclass(slots=True, kw_only=True)
class Run(Generic[B]):
    """The state of one exchange."""

    dialect: Dialect[B]
    edge: Edge
    reply: Reply
    wants_stats: bool
    trace: Trace = field(default_factory=Trace)
    request: GenerateRequest | None = None
    output: Output | None = None
    finish: str | None = None
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    tokens_seen: int = 0

    async def answer(self, scope: Scope, receive: Receive) -> str:
        """Answers whatever happens, and says with which code it ended."""
        try:
            with self.edge.permits:
                check_json(scope)
                raw = await read_body(scope, receive, self.edge.config.max_body_bytes)
                await until_gone(self._serve(raw, _engine_id(scope)), receive)
        except ClientGone:
            return "cancelled"
        except DynamoError as error:
            await self.reply.fail(error)
            return error.code
        except Exception:  # the ASGI catch-all: logged here, answered as `internal`
            log.exception("request failed")
            await self.reply.fail(internal())
            return InternalError.code
        return "ok"

    async def _serve(self, raw: bytes, request_id: str) -> None:
        body, plan = await self._planned(raw, request_id)
        prepared = plan.choices[0]
        self.request, self.output = prepared.request, Output(prepared)
        heading = Heading(
            id=self.dialect.id_prefix + secrets.token_hex(16), model=prepared.request.model, created=int(time.time())
        )
        chunks = self.edge.pipeline.generate(prepared.request, self.trace)
        async with aclosing(pieces(chunks, self.output)) as stream:
            if body.stream:
                await self._streamed(stream, self.dialect.events(heading, prepared.renderer, body.include_usage))
            else:
                await self._folded(stream, self.dialect.fold(heading, prepared.renderer))

    async def _streamed(self, stream: AsyncGenerator[Piece, None], events: Events) -> None:
        async for piece in stream:
            self._clock()
            await self._send(events, piece)

    async def _folded(self, stream: AsyncGenerator[Piece, None], fold: Fold) -> None:
        assert self.output is not None
        async for piece in stream:
            self._clock()
            fold.push(piece)
            self.finish = piece.finish or self.finish
        assert self.finish is not None  # or `pieces` had raised
        body = fold.body(self.finish, self.output.usage(self._legs().cached_tokens), self._stats())
        await self.reply.json(200, body, self._served_by())

    async def _planned(self, raw: bytes, request_id: str) -> tuple[B, Plan]:
        identity = Identity(request_id=request_id, deadline=time.time() + self.edge.config.request_timeout_s)

        def work() -> tuple[B, Plan]:
            body = parse(self.dialect.body, raw)
            return body, self.dialect.prepare(body, self.edge.models.get(body.model), identity)

        return await asyncio.to_thread(work) if len(raw) > THREAD_BYTES else work()

    async def _send(self, events: Events, piece: Piece) -> None:
        data = events.piece(piece)
        if not self.reply.started:
            await self.reply.start_events(self._served_by())
            data = events.opening() + data
        if piece.finish is not None and self.output is not None:
            self.finish = piece.finish
            data += events.closing(piece.finish, self.output.usage(self._legs().cached_tokens), self._stats())
        if data:
            await self.reply.events(data, last=piece.finish is not None)

    def _served_by(self) -> dict[str, str]:
        by = (("x-prefill-instance", self.trace.prefill_instance), ("x-decode-instance", self.trace.decode_instance))
        return {name: f"{instance:x}" for name, instance in by if instance is not None}

    def _legs(self) -> LegStats:
        """Both legs as one: the KV moved once, and the prompt was cached where it was prefilled."""
        prefill, decode = self.trace.prefill_stats or LegStats(), self.trace.decode_stats or LegStats()
        return LegStats(
            queue_s=prefill.queue_s + decode.queue_s,
            prefill_s=prefill.prefill_s + decode.prefill_s,
            handoff_s=prefill.handoff_s + decode.handoff_s,
            decode_wait_s=prefill.decode_wait_s + decode.decode_wait_s,
            cached_tokens=prefill.cached_tokens if self.trace.prefill_stats else decode.cached_tokens,
            kv_bytes=decode.kv_bytes or prefill.kv_bytes,
            transport=decode.transport or prefill.transport,
        )

    def _clock(self) -> None:
        assert self.output is not None
        assert self.request is not None
        now, model = time.monotonic(), self.request.model
        tokens = self.output.completion_tokens
        new = tokens - self.tokens_seen
        if new == 0:
            return
        if self.first_s is None:
            self.first_s = now
            self.edge.metrics.observe_ttft(model=model, seconds=now - self.begun_s)
        else:
            self.edge.metrics.observe_itl(model=model, seconds=now - self.last_s, count=new)
        self.last_s, self.tokens_seen = now, tokens

    def _tokens_per_s(self) -> float | None:
        """Of the tokens after the first chunk's; None when there is nothing to measure."""
        if self.first_s is None or self.last_s <= self.first_s:
            return None
        return (self.tokens_seen - 1) / (self.last_s - self.first_s)

    def _stats(self) -> Stats | None:
        if not self.wants_stats or self.output is None:
            return None
        legs, by = self._legs(), self._served_by()
        return {
            "prefill_instance": by.get("x-prefill-instance"),
            "decode_instance": by.get("x-decode-instance"),
            "kv_bytes": legs.kv_bytes,
            "transport": legs.transport,
            "ttft_s": (self.first_s or self.last_s) - self.begun_s,
            "tokens_per_s": self._tokens_per_s(),
            "phase_s": {
                "queue": legs.queue_s,
                "prefill": legs.prefill_s,
                "handoff": legs.handoff_s,
                "decode_wait": legs.decode_wait_s,
            },
        }

    def record(self, code: str) -> None:
        """Metrics and the one log line of a finished request."""
        model = self.request.model if self.request is not None else ""
        seconds = time.monotonic() - self.begun_s
        metrics = self.edge.metrics
        metrics.request_finished(model=model, endpoint=self.dialect.endpoint, code=code, seconds=seconds)
        prompt_tokens, tokens, cached = 0, 0, 0
        if self.output is not None:
            usage = self.output.usage(self._legs().cached_tokens)
            prompt_tokens, tokens, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
            metrics.observe_tokens(model=model, prompt=prompt_tokens, output=tokens)
            for leg in (self.trace.prefill_stats, self.trace.decode_stats):
                if leg is not None:
                    metrics.observe_leg(model=model, stats=leg)
        rate = self._tokens_per_s()
        log.info(
            "request %s model=%s prefill=%s decode=%s isl=%d osl=%d cached_tokens=%d ttft=%s tpot=%s finish=%s",
            self.request.request_id if self.request is not None else "-",
            model or "-",
            _hex(self.trace.prefill_instance),
            _hex(self.trace.decode_instance),
            prompt_tokens,
            tokens,
            cached,
            f"{self.first_s - self.begun_s:.4f}s" if self.first_s is not None else "-",
            f"{1 / rate:.4f}s" if rate else "-",
            (self.finish or "ok") if code == "ok" else code,
        )


def _hex(instance: int | None) -> str:
    return "-" if instance is None else f"{instance:x}"


def _engine_id(scope: Scope) -> str:
    """Unique in the cluster even when a client repeats its ids, and still found by them in every log."""
    given: Any = scope.get("state", {}).get("request_id", "")
    unique = secrets.token_hex(8)
    return f"{given}-{unique}" if given else unique
