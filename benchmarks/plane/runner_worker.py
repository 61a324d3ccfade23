"""Runs a worker like `python -m dynamo_trtllm`, with the runner of library engines and a simulated
library behind it.

TensorRT-LLM and vLLM run on this runner, so its cost is what their workers pay for a token. The
simulated library makes one Harmony token per step and call, and gives results as the libraries do:
an object per call and step, on the event loop. It transfers no KV.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from dynamo_trtllm.config.engine_names import EngineTraits
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.external.engine import ExternalEngine
from dynamo_trtllm.engines.external.library import Counts, ResultReceiver
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Limits,
    Phase,
    token_ids,
)
from dynamo_trtllm.worker.worker import Worker

_ENGINE = "simulated"
# <|channel|>final<|message|> of the Harmony format; tokens after it are content
_OPENING = (200005, 17196, 200008)


class SimulatedOutput(msgspec.Struct, gc=False):
    token: int
    finish_reason: str | None


class SimulatedResult(msgspec.Struct, gc=False):
    outputs: tuple[SimulatedOutput]


class SimulatedCall:
    """A `LibraryCall`."""

    stop_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        library: SimulatedLibrary,
        request: GenerateRequest,
        kv_params: KvTransferParams | None,
    ) -> None:
        self.exports_kv = request.phase is Phase.PREFILL and request.sampling.max_tokens > 1
        self._library = library
        self._last = 1 if self.exports_kv else request.sampling.max_tokens
        self._first = () if kv_params is None else kv_params.first_token_ids
        self.num_generated = self.cached_tokens = 0
        self._receiver: ResultReceiver | None = None

    async def run(self, receiver: ResultReceiver) -> None:
        self._receiver = receiver
        self._library.add(self)
        for _ in self._first:
            self.step()

    def step(self) -> None:
        """Give the next token: the Harmony prefix first, then others that are text."""
        at = self.num_generated
        self.num_generated += 1
        token = _OPENING[at] if at < len(_OPENING) else 1000 + at * 7919 % 4000
        self._give(token, "length" if self.num_generated == self._last else None)

    def _give(self, token: int, finish: str | None) -> None:
        receiver = self._receiver
        if receiver is None:
            return  # the call has ended
        if finish is not None:
            self._receiver = None
            self._library.remove(self)
        receiver.on_result(SimulatedResult((SimulatedOutput(token, finish),)))

    def read(self, result: Any) -> tuple[Chunk, str | None]:
        output = result.outputs[0]
        return Chunk(token_ids=token_ids([output.token])), output.finish_reason

    def phases(self, result: Any) -> dict[str, float]:
        return {}

    def export(self, result: Any, chunk: Chunk) -> tuple[Chunk, bytes]:
        return chunk, b""

    def abort(self) -> None:
        self._give(0, "abort")

    def release_kv(self, *, has_expired: bool) -> None:
        pass


class SimulatedLibrary:
    """A `Library`, with the arguments of the mock engine."""

    name = "the simulated library"
    transfer_hint = ""
    can_abort_fetch = True
    keeps_unfetched_kv = False

    def __init__(self, step_s: float) -> None:
        self._running: dict[SimulatedCall, None] = {}
        self._has_calls = asyncio.Event()
        self._steps = asyncio.create_task(self._run(step_s), name="simulated-steps")

    async def _run(self, step_s: float) -> None:
        begun_s = time.monotonic()
        while True:
            if not self._running:
                self._has_calls.clear()
                await self._has_calls.wait()
                begun_s = time.monotonic()
            await asyncio.sleep(begun_s + step_s - time.monotonic())
            # catches up on at most one missed step
            begun_s = max(begun_s + step_s, time.monotonic() - step_s)
            for call in list(self._running):
                call.step()

    def add(self, call: SimulatedCall) -> None:
        """Give a call its tokens from the next step on."""
        self._running[call] = None
        self._has_calls.set()

    def remove(self, call: SimulatedCall) -> None:
        """Give a call no more tokens. Unknown calls are ignored."""
        self._running.pop(call, None)

    def prepare(
        self, request: GenerateRequest, kv_params: KvTransferParams | None
    ) -> SimulatedCall:
        return SimulatedCall(self, request, kv_params)

    def health(self, waiting_since: float | None) -> str:
        return "its steps have ended" if self._steps.done() else ""

    def counts(self, *, is_idle: bool) -> Counts:
        return Counts()

    async def aclose(self) -> None:
        self._steps.cancel()
        await asyncio.gather(self._steps, return_exceptions=True)

    def shutdown(self) -> None:
        pass


class SimulatedEngine(ExternalEngine):
    """An engine with the runner of library engines."""

    traits = EngineTraits(arguments=MockArgs)

    def __init__(self, config: WorkerConfig, *, instance_id: int) -> None:
        super().__init__(
            config, engine=_ENGINE, library=SimulatedLibrary.name, instance_id=instance_id
        )
        self._args = engine_arguments(config, MockArgs, "mock")

    async def start(self) -> EngineInfo:
        args = self._args
        info = EngineInfo(
            engine=_ENGINE,
            context_length=args.max_seq_len,
            vocab_size=201_088,
            eos_token_ids=(200002, 200012),
            renderer="harmony",
            layout=KvLayout(
                dtype="uint32",
                block_tokens=args.kv_block_size,
                num_layers=1,
                num_kv_heads=1,
                head_dim=64,
            ),
            limits=Limits(max_batch_size=args.max_batch_size, kv_blocks=args.kv_cache_blocks),
            can_aggregate=True,
        )
        self._accept_requests(SimulatedLibrary(args.step_s), info, "none")
        return info


def run() -> None:
    """Run the worker."""
    config = load(WorkerConfig, prog="runner_worker")
    observe_logging.setup(config.log_level, config.disaggregation_mode, config.log_format)
    # Older commits, which are measured with the same flags, need --engine.
    config = config.model_copy(update={"engine": None})
    Worker(config, engine=SimulatedEngine).run()


if __name__ == "__main__":
    run()
