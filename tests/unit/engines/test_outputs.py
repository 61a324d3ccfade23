"""Answers of a library as chunks."""

from __future__ import annotations

import time
from typing import Any

import pytest

from dynamo_trtllm.engines.external.engine import (
    Counts,
    EngineOutput,
    chunk_of,
    engine_stats,
    phase_timings,
    transfer_chunk,
)
from dynamo_trtllm.messages import (
    FinishReason,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    PhaseTimings,
    Sampling,
    TokenLogprob,
    token_ids,
)

STATS = PhaseTimings(prefill_s=0.5, cached_tokens=32)
TRANSFER_PARAMS = KvTransferParams(
    version=1,
    transfer_id="t",
    engine="vllm",
    model="m",
    layout=KvLayout(dtype="bfloat16", block_tokens=16, num_layers=2, num_kv_heads=2, head_dim=8),
    prefill_instance_id=1,
    expires_at=time.time() + 60,
    prompt_tokens=1,
    first_token_ids=token_ids([7]),
    transport="a/b",
    kv_bytes=4096,
    engine_state=b"",
)


def step(finish: str | None) -> EngineOutput:
    return EngineOutput(token_ids=[5, 6], logprobs=(TokenLogprob(5, -1.0), TokenLogprob(6, -2.0)), finish=finish)


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", model="m", token_ids=token_ids([1]), sampling=Sampling(max_tokens=1), deadline=0.0, **fields
    )


@pytest.mark.parametrize(
    ("finish", "reason"), [(None, None), ("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)]
)
def test_chunk_when_made_then_tokens_and_an_end_with_its_times(finish: str | None, reason: FinishReason | None) -> None:
    made = step(finish)
    assert not made.is_broken
    chunk = chunk_of(made, STATS)
    assert (list(chunk.token_ids), chunk.logprobs, chunk.finish_reason) == ([5, 6], made.logprobs, reason)
    assert chunk.stats == (STATS if reason else None)


@pytest.mark.parametrize("finish", ["error", "abort", "timeout", "cancelled", "not_finished"])
def test_step_when_its_end_is_no_answers_then_broken(finish: str) -> None:
    assert step(finish).is_broken


def test_transfer_when_made_then_the_transfer_and_what_moves() -> None:
    chunk = transfer_chunk(TRANSFER_PARAMS, STATS)
    assert (chunk.finish_reason, chunk.kv_params, list(chunk.token_ids)) == (
        FinishReason.KV_TRANSFER,
        TRANSFER_PARAMS,
        [],
    )
    assert chunk.stats == PhaseTimings(prefill_s=0.5, cached_tokens=32, kv_bytes=4096, transport="a/b")


def test_times_when_a_transfer_came_then_the_first_answer_tells_of_the_kv_transfer() -> None:
    assert phase_timings(request(), 0.5, cached_tokens=32) == STATS
    told = phase_timings(request(kv_params=TRANSFER_PARAMS), 0.5, cached_tokens=32)
    assert told == PhaseTimings(kv_transfer_s=0.5, kv_bytes=4096, transport="a/b")


def test_stats_when_the_library_counts_more_waiting_than_calls_then_no_more_than_those() -> None:
    class Transfers:
        kv_blocks = 4

        def __len__(self) -> int:
            return 2

    transfers: Any = Transfers()
    stats = engine_stats(Counts(waiting=9, kv_blocks_used=5, kv_blocks_total=10), 3, transfers)
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 3, 5, 10)
    assert (stats.tickets_held, stats.ticket_kv_blocks) == (2, 4)
    assert engine_stats(Counts(waiting=1), 3, transfers).running == 2
