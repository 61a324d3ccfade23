"""CPU time from a token to the bytes of its event: parsing, stop strings, JSON, and the whole exchange around them.

One token per engine step, as a busy server sees them. Prints, judges nothing; needs no server and no model.

python -m benchmarks.frontend_step [--steps N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.request_model import parse
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.admission import BodyBudget, ConcurrencyLimiter, InFlight
from dynamo_trtllm.frontend.api_adapter import PreparedRequest, ResponseMeta
from dynamo_trtllm.frontend.app import CHAT
from dynamo_trtllm.frontend.detokenizer import Detokenizer
from dynamo_trtllm.frontend.generate_endpoint import GenerateEndpoint
from dynamo_trtllm.frontend.model_registry import ServedModel
from dynamo_trtllm.frontend.pipeline import RouteTrace
from dynamo_trtllm.frontend.preprocess import RequestContext, prepare_chat
from dynamo_trtllm.frontend.readiness import ReadinessReport
from dynamo_trtllm.frontend.request_handler import AppState
from dynamo_trtllm.frontend.sse import ChatSseEncoder
from dynamo_trtllm.http_server.body_writer import WRITER
from dynamo_trtllm.messages import Chunk, FinishReason, GenerateRequest, Instance, ModelDeploymentCard, token_ids
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.request_plane.base import Sink
from dynamo_trtllm.tokenization import vocabulary
from dynamo_trtllm.tokenization.harmony import HarmonyRenderer

RENDERER = HarmonyRenderer()
CARD = ModelDeploymentCard(
    name="openai/gpt-oss-120b", context_length=1 << 20, vocab_size=201088, eos_token_ids=(200002,), renderer="harmony"
)
SERVED = ServedModel(CARD, RENDERER)
PROSE = 'The quick brown fox jumps over the lazy dog, says the engine; "why" it does so no one knows.\n' * 50
ARGUMENTS = '{"place": "Łódź", "unit": "celsius", "days": [1, 2, 3], "detailed": true}' * 50
HEADERS = {
    "content": "<|channel|>final<|message|>",
    "reasoning": "<|channel|>analysis<|message|>",
    "tool arguments": " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
}


class Stream(NamedTuple):
    header: list[int]
    body: list[int]
    end: int


def stream(channel: str, steps: int) -> Stream:
    text = ARGUMENTS if channel == "tool arguments" else PROSE
    body = list(RENDERER.encode(text))
    body = (body * (steps // len(body) + 1))[:steps]
    header = vocabulary.load_harmony().encode(HEADERS[channel], allowed_special="all")
    return Stream(header, body, 200012 if channel == "tool arguments" else 200002)


def chunks(made: Stream) -> list[Chunk]:
    steps = [Chunk(token_ids=token_ids([each])) for each in (*made.header, *made.body)]
    return [*steps, Chunk(token_ids=token_ids([made.end]), finish_reason=FinishReason.STOP)]


def request(**fields: Any) -> bytes:
    asked = {"model": CARD.name, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    return json.dumps(asked | fields).encode()


def cpu_us(work: Callable[[], None], steps: int) -> float:
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best / steps * 1e6


def inner(channel: str, steps: int, **fields: Any) -> float:
    """Parsing and JSON alone."""
    made = chunks(stream(channel, steps))
    body = parse(ChatRequest, request(**fields))

    def work() -> None:
        plan = prepare_chat(body, SERVED, RequestContext(request_id="r", deadline=0))
        events = ChatSseEncoder(
            PreparedRequest(meta=ResponseMeta(id="chatcmpl-1", model=CARD.name, created=0), body=body, plan=plan)
        )
        outputs = [Detokenizer(prepared, index) for index, prepared in enumerate(plan.choices)]
        for chunk in made:
            for output in outputs:
                events.delta(output.push(chunk))

    return cpu_us(work, steps * body.n)


class Played:
    """A pipeline and a catalog in one."""

    def __init__(self, made: list[Chunk]) -> None:
        self._made = made

    async def generate(
        self, request: GenerateRequest, trace: RouteTrace, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        for index, chunk in enumerate(self._made):  # as a plane does whose reader keeps up
            if not index or sink is None or chunk.finish_reason is not None or not sink(chunk):
                yield chunk

    def get(self, name: str) -> ServedModel:
        return SERVED

    def names(self) -> list[str]:
        return [CARD.name]

    def instances(self) -> list[Instance]:
        return []

    def not_ready_reason(self, name: str) -> str | None:
        return None

    def readiness(self) -> ReadinessReport:
        return ReadinessReport(pairs=[], mismatched=[], rejected_records=[])


class Nowhere:
    """A writer to a client that keeps up."""

    def is_ready(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        pass

    def flush(self) -> None:
        pass


def whole(channel: str, steps: int, **fields: Any) -> float:
    """The exchange from body to last byte, all but the socket and the pipeline."""
    played, config = Played(chunks(stream(channel, steps))), FrontendConfig()
    edge = AppState(
        config=config,
        models=played,
        pipeline=played,
        metrics=FrontendMetrics(),
        limiter=ConcurrencyLimiter(config.max_inflight),
        body_budget=BodyBudget(config.max_total_body_bytes),
        running=InFlight(),
    )
    app, sent = GenerateEndpoint(CHAT, edge), request(**fields)

    async def exchange() -> None:
        sent_messages = [{"type": "http.request", "body": sent, "more_body": False}]

        async def receive() -> Any:
            return sent_messages.pop() if sent_messages else await asyncio.Event().wait()

        async def send(_: Any) -> None:
            pass

        await app({"type": "http", "headers": [], "state": {WRITER: Nowhere()}}, receive, send)

    return cpu_us(lambda: asyncio.run(exchange()), steps * int(fields.get("n", 1)))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--steps", type=int, default=20_000)
    steps = args.parse_args().steps
    print(f"{'CPU per delta, us':24}{'parse + JSON':>14}{'whole exchange':>16}")
    cases: list[tuple[str, str, dict[str, Any]]] = [(channel, channel, {}) for channel in HEADERS]
    cases.append(("content, 4 stop strings", "content", {"stop": ["STOP", "END", "</s>", "\n\n\n"]}))
    cases.append(("content, n=4", "content", {"n": 4}))
    for name, channel, fields in cases:
        print(f"{name:24}{inner(channel, steps, **fields):14.2f}{whole(channel, steps, **fields):16.2f}")


if __name__ == "__main__":
    main()
