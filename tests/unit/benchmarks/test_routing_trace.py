from __future__ import annotations

from pathlib import Path

import orjson

from benchmarks.routing_trace import (
    BLOCK_TOKENS,
    TraceRequest,
    oracle_hits,
    read_trace,
    synthetic_trace,
)


def test_prompts_with_equal_first_blocks_begin_alike() -> None:
    first = TraceRequest(0.0, (0, 7, 8), 2)
    second = TraceRequest(1.0, (0, 7, 9, 8), 2)
    shared = TraceRequest(0.0, (0, 7), 2).prompt()
    assert first.prompt().startswith(shared)
    assert second.prompt().startswith(shared)
    assert first.prompt() != second.prompt()[: len(first.prompt())]
    assert len(second.prompt().split()) == 4 * BLOCK_TOKENS


def test_trace_scaled_keeps_conversations_and_meets_the_rate(tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 3000 * turn,
            "output_length": 320,
            "input_length": 1,
            "hash_ids": [0, number, *range(turn)],
        }
        for turn in range(1, 5)
        for number in range(100, 300)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    trace = read_trace(path, 400, 10.0)
    turns = [sum(request.blocks[1] == number for request in trace) for number in range(100, 300)]
    assert set(turns) == {0, 4}
    assert trace[-1].at_s == len(trace) / 10.0
    assert {request.output_tokens for request in trace} == {20}


def test_oracle_with_smaller_cache_never_finds_last_token() -> None:
    trace = [
        TraceRequest(float(at), tuple(range(8 * (at % 3), 8 * (at % 3) + 8)), 2) for at in range(9)
    ]
    all_blocks = 8 * BLOCK_TOKENS
    assert oracle_hits(trace, 0, 100) == 6 * all_blocks
    assert oracle_hits(trace, 0, 16) == 0
    assert oracle_hits(trace, 0, 16, workers=3) == 6 * all_blocks
    assert oracle_hits([TraceRequest(0.0, (1,), 2)] * 2, BLOCK_TOKENS - 1, 100) == BLOCK_TOKENS


def test_synthetic_trace_repeats_a_third_of_its_blocks() -> None:
    trace = synthetic_trace(600, 16.0)
    blocks = sum(len(request.blocks) for request in trace)
    repeated = oracle_hits(trace, 0, 1 << 20) / BLOCK_TOKENS
    assert 0.3 < repeated / blocks < 0.6
    assert [request.at_s for request in trace] == sorted(request.at_s for request in trace)
