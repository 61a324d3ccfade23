"""The loads of `profile` let a worker learn the times of steps that they do not have themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dynamo_trtllm.cli.profile_loads import ProfileLoads
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.protocol.cost_model import CostModel, StepSample, prior_fit
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import GenerateRequest, Sampling, token_ids
from dynamo_trtllm.protocol.streams import StreamEvent
from dynamo_trtllm.simulate.constants import Constants, find_constants, known_constants
from dynamo_trtllm.simulate.memory_transfers import MemoryBackend
from dynamo_trtllm.simulate.virtual_time import run_virtual, virtual_clocks
from dynamo_trtllm.worker.cost_fit import CostFit

STEP_TOKENS = 8192
PROFILE_S = 75.0
# Decode requests, tokens of context of each, and prompt tokens, as in the loads of
# docs/simulate.md.
DECODE_STEPS = [
    (requests, context, 0) for requests in (1, 2, 4, 8, 16, 24) for context in (200, 2300, 8300)
] + [(64, 2300, 0), (100, 200, 0), (200, 250, 0)]
PREFILL_STEPS = [
    (0, 0, 128),
    (0, 0, 2048),
    (0, 0, 8192),
    (16, 8300, 8176),
    (16, 8300, 16),
    (200, 250, 128),
    (20, 2300, 2000),
]


async def profiled(constants: Constants) -> CostModel:
    """Return what a worker of the mock engine has learned from the loads."""
    clocks = virtual_clocks()
    config = WorkerConfig(
        model_path="model",
        engine="mock",
        disaggregation_mode="prefill_and_decode",
        override_engine_args=constants.mock | {"step_noise": 0.03},
    )
    engine = MockEngine(config, instance_id=1, backend=MemoryBackend({}), clocks=clocks, seed=1)
    await engine.start()
    fit = CostFit(steps=engine.steps)

    async def learn() -> None:
        while True:
            await asyncio.sleep(1.0)
            fit.learn(clocks.monotonic())

    async def ask(prompt: Sequence[int], output_tokens: int) -> None:
        request = GenerateRequest(
            request_id="request",
            model="model",
            token_ids=token_ids(prompt),
            sampling=Sampling(max_tokens=output_tokens, temperature=1.0),
            deadline=clocks.epoch() + 600,
        )
        ended = asyncio.get_running_loop().create_future()

        def on_event(event: StreamEvent) -> None:
            assert not isinstance(event, DynamoError)
            if event.finish_reason is not None:
                ended.set_result(None)

        handle = engine.generate(request, on_event)
        try:
            await ended
        finally:
            handle.cancel()

    learning = asyncio.create_task(learn())
    try:
        loads = ProfileLoads(ask, STEP_TOKENS, clocks.monotonic)
        await loads.run(PROFILE_S)
        await loads.alone()
        return fit.take(engine.steps)
    finally:
        learning.cancel()
        await engine.aclose()


def test_profile_finds_the_times_of_other_loads() -> None:
    constants = find_constants(known_constants(), "gpt-oss-120b", "vllm", "h200", "0.26.0")
    costs = constants.mock["step_costs"]
    found = run_virtual(profiled(constants))
    for steps, expected, fit, error in (
        (DECODE_STEPS, costs["decode"], found.decode, 0.03),
        (PREFILL_STEPS, costs["prefill"], found.prefill, 0.05),
    ):
        assert fit is not None
        for requests, context, tokens in steps:
            step = StepSample(0.0, requests, requests * context, tokens, tokens * tokens / 2)
            expected_s = prior_fit(expected).predict(step.features)
            assert fit.predict(step.features) == pytest.approx(expected_s, rel=error), step
