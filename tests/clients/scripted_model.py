"""A stand-in for a model that calls tools well: a frontend on a real socket with scripted tokens.

The HTTP server, the API, the prompt format and the parsers are those of the product.
No engine runs: the answers are texts in the format of gpt-oss, played in order, one per request.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.app import build_app
from dynamo_trtllm.frontend.http.frontend_server import frontend_server
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
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
from dynamo_trtllm.protocol.streams import OnChunk
from tests.kit.frontend_app import Catalog
from tests.kit.generator_streams import PlayedRouter

MODEL = "scripted-stand-in"
STEP_TOKENS = 4
START_S = 60.0
RETURN = 200002  # ends an answer
CALL = 200012  # ends a call
CARD = ModelDeploymentCard(
    name=MODEL,
    context_length=1 << 17,
    vocab_size=201088,
    eos_token_ids=(RETURN, CALL),
    renderer="harmony",
)


def answer(text: str) -> str:
    """Return an answer with a line of reasoning before it."""
    return f"<|channel|>analysis<|message|>I know it.<|end|><|start|>assistant{final(text)}"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}<|return|>"


def call(name: str, arguments: str) -> str:
    """Return a function call with a line of reasoning before it."""
    thought = f"<|channel|>analysis<|message|>I need {name}.<|end|>"
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} "
    return f"{thought}{header}<|constrain|>json<|message|>{arguments}<|call|>"


@dataclass
class Script(PlayedRouter):
    """Plays the answers in order, one per request, and the last one for all further requests."""

    tokenizer: HarmonyRenderer
    answers: Sequence[str] = ()
    prompts: list[str] = field(default_factory=list)

    def begin(self, answers: Sequence[str]) -> None:
        """Set the answers of the next requests, and forget the prompts."""
        self.answers = answers
        self.prompts = []

    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        self.prompts.append(self.tokenizer.decode(request.token_ids))
        text = self.answers[min(len(self.prompts), len(self.answers)) - 1]
        ids = self.tokenizer._harmony.encode(text, allowed_special="all")
        for start in range(0, len(ids), STEP_TOKENS):
            is_last = start + STEP_TOKENS >= len(ids)
            finish = FinishReason.STOP if is_last else None
            step = token_ids(ids[start : start + STEP_TOKENS])
            if not on_chunk(Chunk(token_ids=step, finish_reason=finish)):
                return
            await asyncio.sleep(0)  # the next step comes with another event


@contextmanager
def serving() -> Iterator[tuple[str, Script]]:
    """Serve in a thread. Yield the URL and the script, whose answers each test sets."""
    renderer = HarmonyRenderer()
    renderer.preload()
    script = Script(renderer)
    catalog = Catalog()
    catalog.served.clear()
    catalog.served[MODEL] = ServedModel(CARD, renderer)
    config = FrontendConfig()
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    started = threading.Event()
    stops: list[object] = []

    async def serve() -> None:
        metrics = FrontendMetrics()
        app = build_app(config, catalog, script, metrics, not_ready_reason=lambda: None)
        server = frontend_server(app.router, config)
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(server.stop))
        started.set()
        await server.serve(sock)
        await app.response_store.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="scripted model")
    thread.start()
    try:
        assert started.wait(START_S)
        yield url, script
    finally:
        stops[0]()  # type: ignore[operator]
        thread.join()
