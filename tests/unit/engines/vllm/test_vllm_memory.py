"""A start that fails because another process holds GPU memory: the error for the user."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.vllm.bindings import VllmBindings, explain_oom
from dynamo_trtllm.protocol.errors import EngineFailed
from tests.kit.cases import each_case
from tests.kit.fake_packages import fake_vllm

GIB = 1 << 30
TAKEN = (31 * GIB, 140 * GIB)
FREE = (139 * GIB, 140 * GIB)
HALF = {"gpu_memory_utilization": 0.5}


def test_lack_of_memory_names_numbers_reason_and_fix() -> None:
    said = explain_oom({"gpu_memory_utilization": 0.85}, LIBRARY.newest, [TAKEN], [TAKEN])
    assert said is not None
    assert "GPU 0 has 31.0 of 140.0 GiB free" in said
    assert "gpu_memory_utilization 0.85 needs 119.0 GiB" in said
    assert "another process uses the rest" in said
    assert "still maps that worker's memory" in said
    assert "https://github.com/openucx/ucx/issues/11753" in said
    assert "--free-gpu-memory-fraction 0.22" in said


@each_case(
    ("values", "before", "after", "gpu_at_fault"),
    [
        (HALF, [TAKEN], [TAKEN], 0),
        # vLLM's own default is a larger share
        ({}, [(100 * GIB, 140 * GIB)], [(100 * GIB, 140 * GIB)], 0),
        (HALF, [TAKEN], [FREE], None),  # it came free meanwhile: that was not it
        (HALF, [FREE], [TAKEN], None),  # taken by what failed
        (HALF, [FREE, TAKEN], [FREE, TAKEN], None),  # a GPU that is not the engine's
        ({**HALF, "tensor_parallel_size": 2}, [FREE, TAKEN], [FREE, TAKEN], 1),
        (HALF, [], [], None),  # no driver
        (HALF, [TAKEN], [], None),
    ],
)
def test_lack_is_checked_for_unallocated_gpus_only(
    values: dict[str, Any],
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
    gpu_at_fault: int | None,
) -> None:
    said = explain_oom(values, LIBRARY.newest, before, after)
    if gpu_at_fault is None:
        assert said is None
    else:
        assert said is not None
        assert f"GPU {gpu_at_fault} has" in said


def test_lack_when_the_gpu_is_full_then_no_share_is_offered() -> None:
    said = explain_oom(HALF, LIBRARY.newest, [(GIB, 140 * GIB)], [(GIB, 140 * GIB)])
    assert said is not None
    assert "--free-gpu-memory-fraction" not in said


def vendor() -> VllmBindings:
    """vLLM whose engine process dies while it starts."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with fake_vllm():
        bindings = VllmBindings(LIBRARY.newest)
    bindings.engine_args = lambda **_: SimpleNamespace(
        create_engine_config=lambda usage_context: None
    )
    bindings.async_llm = SimpleNamespace(from_vllm_config=fail)
    return bindings


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        ([TAKEN], "GiB free, but gpu_memory_utilization"),
        ([FREE], "Engine core initialization failed"),
        ([], "core"),
    ],
)
def test_build_of_dying_engine_names_memory_only_if_scarce(
    monkeypatch: pytest.MonkeyPatch, free: list[tuple[int, int]], wanted: str
) -> None:
    monkeypatch.setattr(gpu, "free_and_total_bytes", lambda: free)
    with pytest.raises(EngineFailed, match=wanted) as caught:
        vendor().build(HALF, lambda index, stats: None)
    assert isinstance(caught.value.__cause__, RuntimeError)
