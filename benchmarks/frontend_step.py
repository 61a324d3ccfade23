"""Measure the frontend's CPU time per token: that of parsing, stop strings and JSON, and that of a
whole request.

The engine makes one token per step. This needs no server and no model.

python -m benchmarks.frontend_step [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, cast

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.chat import ChatRequest
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.frontend.api.request_model import parse
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.choice import Choice
from dynamo_trtllm.frontend.requests.completions import CHAT
from dynamo_trtllm.frontend.requests.preprocess import prepare_chat
from dynamo_trtllm.frontend.requests.serve_request import handle_request, serve_request
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    ModelDeploymentCard,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamHandle
from dynamo_trtllm.support.http_server.exchange import FlushBatch, HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.request_head import Headers

RENDERER = HarmonyRenderer()
CARD = ModelDeploymentCard(
    name="openai/gpt-oss-120b",
    context_length=1 << 20,
    vocab_size=201088,
    eos_token_ids=(200002,),
    renderer="harmony",
)
SERVED = ServedModel(CARD, RENDERER)
PROSE = (
    'The quick brown fox jumps over the lazy dog, says the engine; "why" it does so no one knows.\n'
    * 50
)
ARGUMENTS = '{"place": "Łódź", "unit": "celsius", "days": [1, 2, 3], "detailed": true}' * 50
HEADERS = {
    "content": "<|channel|>final<|message|>",
    "reasoning": "<|channel|>analysis<|message|>",
    "tool arguments": " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
}


class Answer(NamedTuple):
    """Token ids of one answer."""

    header: list[int]
    body: list[int]
    end: int


def make_stream(channel: str, steps: int) -> Answer:
    """Return an answer on this channel with a body of `steps` tokens."""
    text = ARGUMENTS if channel == "tool arguments" else PROSE
    body = list(RENDERER.encode(text))
    body = (body * (steps // len(body) + 1))[:steps]
    harmony = o200k_tokenizer.load_tokenizer().harmony
    header = harmony.encode(HEADERS[channel], allowed_special="all")
    return Answer(header, body, 200012 if channel == "tool arguments" else 200002)


def make_chunks(stream: Answer) -> list[Chunk]:
    """Return one chunk per token."""
    steps = [Chunk(token_ids=token_ids([token_id])) for token_id in (*stream.header, *stream.body)]
    return [*steps, Chunk(token_ids=token_ids([stream.end]), finish_reason=FinishReason.STOP)]


def make_request(**fields: Any) -> bytes:
    """Return the body of a streamed chat request."""
    body = {"model": CARD.name, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    return json.dumps(body | fields).encode()


def cpu_us(work: Callable[[], None], steps: int) -> float:
    """Return the CPU time of `work` per step in microseconds, the best of three runs."""
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best / steps * 1e6


def parse_cost_us(channel: str, steps: int, **fields: Any) -> float:
    """Return the CPU time per token of parsing and JSON, in microseconds."""
    chunks = make_chunks(make_stream(channel, steps))
    body = parse(ChatRequest, make_request(**fields))

    def work() -> None:
        plan = prepare_chat(body, SERVED, body.call("r", 0.0, ""))
        events = CHAT.builder(ResponseMeta(id="chatcmpl-1", model=CARD.name, created=0), body, plan)
        events.start()
        outputs = [Choice(prepared, index) for index, prepared in enumerate(plan.choices)]
        for chunk in chunks:
            for output in outputs:
                events.delta(output.push(chunk))

    return cpu_us(work, steps * body.n)


class FakeRouter:
    """A router and model registry that returns prepared chunks."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        self.view = ClusterView()

    def generate(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_event: OnEvent
    ) -> StreamHandle:
        stream = Stream(on_event)
        asyncio.get_running_loop().call_soon(self._begin, stream)
        return stream

    def _begin(self, stream: Stream) -> None:
        stream.emit(self._chunks[0])
        # By then, the response has started.
        asyncio.get_running_loop().call_later(0.001, self._go_on, stream)

    def _go_on(self, stream: Stream) -> None:
        for chunk in self._chunks[1:]:
            stream.emit(chunk)

    def get(self, name: str, tenant: Tenant | None = None) -> ServedModel:
        return SERVED


class NullTransport(asyncio.Transport):
    """A connection to a client that reads everything at once."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        pass


def make_exchange(
    channel: str, steps: int, **fields: Any
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return a function that runs a request without socket and router."""
    router = FakeRouter(make_chunks(make_stream(channel, steps)))
    config = FrontendConfig()
    state = AppState(
        config, cast("ModelRegistry", router), cast("RequestRouter", router), FrontendMetrics()
    )
    app = partial(handle_request, CHAT.endpoint, partial(serve_request, CHAT, state), state)
    body = make_request(**fields)

    async def exchange() -> None:
        headers = Headers()
        headers.add(b"content-type", b"application/json")
        request = HttpRequest("POST", "/v1/chat/completions", "", headers, "", lambda: None)
        request.feed(body)
        request.complete()
        response = HttpResponse(
            NullTransport(), FlushBatch(), lambda: None, error_form=openai_error, stall_s=30.0
        )
        await app(request, response)
        # A request that fails takes little time, which would be shown as the cost of a token.
        if response.status != 200:
            raise RuntimeError(f"the request got HTTP {response.status}; repair this benchmark")

    return exchange


def exchange_cost_us(channel: str, steps: int, **fields: Any) -> float:
    """Return the CPU time per token of a request without socket and router, in microseconds."""
    exchange = make_exchange(channel, steps, **fields)
    return cpu_us(lambda: asyncio.run(exchange()), steps * int(fields.get("n", 1)))


def main() -> None:
    """Print a table of CPU times."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.frontend_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=20_000, help="tokens per answer (default: 20000)"
    )
    steps = parser.parse_args().steps
    print(f"{'CPU per delta, us':24}{'parse + JSON':>14}{'whole exchange':>16}")
    cases: list[tuple[str, str, dict[str, Any]]] = [(channel, channel, {}) for channel in HEADERS]
    cases.append(
        ("content, 4 stop strings", "content", {"stop": ["STOP", "END", "</s>", "\n\n\n"]})
    )
    cases.append(("content, n=4", "content", {"n": 4}))
    for name, channel, fields in cases:
        parse_us = parse_cost_us(channel, steps, **fields)
        exchange_us = exchange_cost_us(channel, steps, **fields)
        print(f"{name:24}{parse_us:14.2f}{exchange_us:16.2f}")


if __name__ == "__main__":
    main()
