"""vLLM's servers behind vllm-router, with which we are compared."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.open_loop import arguments
from benchmarks.gpu.vllm_router import beside, router_arguments


def test_router_transfers_kv_only_when_servers_have_roles() -> None:
    pair = router_arguments(
        [("prefill", "http://a"), ("decode", "http://b"), ("decode", "http://c")]
    )
    assert pair[2:] == [
        *("--vllm-pd-disaggregation", "--kv-connector=nixl"),
        *("--prefill", "http://a", "--decode", "http://b", "--decode", "http://c"),
    ]
    whole = router_arguments(
        [("prefill_and_decode", "http://a"), ("prefill_and_decode", "http://b")]
    )
    assert whole[2:] == ["--worker-urls", "http://a", "http://b"]


def test_topology_of_vllm_servers_gives_the_model_a_tokenizer() -> None:
    assert arguments(["--engine", "mock", "--topologies", "1P1D,vllm-router:1P1D"]).only == [
        "vllm-router"
    ]
    assert arguments(["--engine", "mock", "--topologies", "1P1D"]).only == []


def test_beside_when_one_served_less_then_no_ratio_of_it() -> None:
    ours = {"a": figures(64, 90.0, 20.0), "b": figures(60, 90.0, 20.0), "c": figures(0, 0.0, 0.0)}
    theirs = {
        "a": figures(64, 100.0, 10.0),
        "b": figures(64, 100.0, 10.0),
        "c": figures(0, 0.0, 0.0),
    }
    (row,) = beside(ours, theirs)
    assert row.what.startswith("a, ")
    assert (row.value, row.met) == ("tokens/s 0.900, TTFT p50 2.000", None)


def figures(ok: int, tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    return {"ok": ok, "tokens_per_s": tokens_per_s, "ttft_ms": {"p50": ttft_ms}}
