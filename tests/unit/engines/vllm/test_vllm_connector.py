"""What a decode engine reads, and what layers with a window let go of: over vLLM's stand-in, for
any prompt length.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.cases import each_case
from tests.kit.fake_packages import VLLM_RELEASES, fake_vllm

WINDOW = 128
MODULE = "dynamo_trtllm.engines.vllm.connector"


@pytest.fixture(scope="module", autouse=True, params=VLLM_RELEASES)
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Imported as vLLM's processes do, over the stand-in of each form."""
    with fake_vllm(request.param):
        yield importlib.import_module(MODULE)


def connector(block: int, rank: int = 0) -> Any:
    made = sys.modules[MODULE].NixlConnector
    extra = {"side_channel_host": "10.1.2.3", "side_channel_port": 20_500}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(data_parallel_index=rank),
    )
    return made(config, "scheduler", None)


def request(prompt: int, held: int, **params: Any) -> Any:
    transfer = {"do_remote_prefill": True, "remote_num_tokens": held} | params
    return SimpleNamespace(kv_transfer_params=transfer, prompt_token_ids=[1] * prompt)


SEEN_FROM = {  # by the token at a place
    "SlidingWindowManager": lambda place: max(0, place - WINDOW + 1),
    "ChunkedLocalAttentionManager": lambda place: place // WINDOW * WINDOW,
}


@each_case("name", SEEN_FROM)
@each_case("behind", [0, 1])  # tokens behind what the prefill engine computed
@each_case("block", [16, 32, 128])
def test_read_pairs_blocks_of_any_prompt_length(block: int, behind: int, name: str) -> None:
    managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    manager = getattr(managers, name)(WINDOW)
    reads = connector(block)
    for held in range(1, 700):
        read, between_steps = reads.get_num_new_matched_tokens(request(held + behind, held), 0)
        assert between_steps
        assert -(-read // block) == -(-held // block)
        computed = min(read, held + behind - 1)  # vLLM steps back where all was read
        for side in (held, read):
            assert manager.get_num_skipped_tokens(side) // block * block <= SEEN_FROM[name](
                computed
            ), (held, side)


@each_case(
    ("prompt", "held", "cached", "read"), [(101, 100, 64, 36), (97, 96, 64, 32), (97, 96, 96, 1)]
)
def test_read_when_some_is_cached_here_then_only_the_rest(
    prompt: int, held: int, cached: int, read: int
) -> None:
    assert connector(16).get_num_new_matched_tokens(request(prompt, held), cached) == (read, True)


def test_read_when_a_request_is_of_no_kv_transfer_then_nothing() -> None:
    assert connector(16).get_num_new_matched_tokens(request(50, 0, do_remote_prefill=False), 0) == (
        0,
        False,
    )
    nothing = SimpleNamespace(kv_transfer_params=None, prompt_token_ids=[1])
    assert connector(16).get_num_new_matched_tokens(nothing, 0) == (0, False)


@pytest.mark.parametrize("rank", [0, 3])
def test_handshakes_use_the_chosen_channel_of_each_rank(rank: int) -> None:
    scheduler = connector(16, rank).connector_scheduler
    assert (scheduler.side_channel_host, scheduler.side_channel_port) == ("10.1.2.3", 20_500 + rank)


def test_reads_of_two_ranks_fail_if_one_failed() -> None:
    module = importlib.import_module("dynamo_trtllm.engines.vllm.connector")
    one = module.EndedReads(frozenset({"a"}), {"a": (1.0, 2.0), "b": (1.0, 4.0)})
    both = one.aggregate(module.EndedReads(frozenset(), {"b": (3.0, 3.5), "c": (5.0, 6.0)}))
    assert both == module.EndedReads(
        frozenset({"a"}), {"a": (1.0, 2.0), "b": (3.0, 4.0), "c": (5.0, 6.0)}
    )


def test_reads_of_ranks_end_with_the_last() -> None:
    module = importlib.import_module("dynamo_trtllm.engines.vllm.patches.late_reads")
    noted = [1.0]
    known = {"a": SimpleNamespace(kv_transfer_params={module.READ_TIMES: noted})}
    for times in ((2.0, 3.0), (2.5, 4.0)):
        reads = module.EndedReads(frozenset(), {"a": times, "gone": times})
        module._note_times(known, SimpleNamespace(kv_connector_worker_meta=reads))
    assert (noted[:3], len(noted)) == ([1.0, 2.5, 4.0], 4)


class Scheduler:
    """The part of vLLM's scheduler that learns of ended reads."""

    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests = requests
        self.received: list[set[str]] = []
        self.scheduled = 0

    def schedule(self) -> None:
        self.scheduled += 1

    def _update_from_kv_xfer_finished(self, output: Any) -> None:
        self.received.append(output.finished_recving)


def reading(expires_at: float = math.inf) -> Any:
    return SimpleNamespace(
        kv_transfer_params={"dynamo_expires_at": expires_at, "dynamo_read_times": [1.0]}
    )


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker half of an engine with one rank, and a scheduler that looks at it."""
    notice = importlib.import_module("dynamo_trtllm.engines.vllm.early_notice")
    monkeypatch.setattr(notice, "_worker_half", [])
    made = worker_half(world_size=1)
    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)
    output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
    notice._look_before(Scheduler, output)
    return made


WITH_BLOCKS = SimpleNamespace(local_block_ids=([1, 2], [3]))
WITHOUT_BLOCKS = SimpleNamespace(local_block_ids=[])  # of a request that was aborted in the queue


def worker_half(world_size: int) -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=world_size))
    return sys.modules[MODULE].NixlConnector(config, "worker", None)


def reported(half: Any) -> set[str]:
    """Return what the next step reports as received."""
    if hasattr(half.connector_worker, "get_transfer_results") and hasattr(
        type(half).__mro__[1], "get_transfer_results"
    ):
        return set(half.get_transfer_results(set()).finished_recving)
    return set(half.get_finished(set())[1])


def test_notice_of_early_read_replaces_the_step_report(half: Any) -> None:
    request = reading()
    scheduler = Scheduler({"a": request, "b": reading()})
    for name in "ab":
        half.connector_worker._read_blocks_for_req(name, WITH_BLOCKS)
    half.connector_worker.received("a")
    scheduler.schedule()
    assert (scheduler.received, scheduler.scheduled) == ([{"a"}], 1)
    assert len(request.kv_transfer_params["dynamo_read_times"]) == 4
    assert reported(half) == set()
    half.connector_worker.received("b")
    assert reported(half) == set(), (
        "a step that sees it first leaves it to the scheduler, which asks before its results"
    )
    assert half.build_connector_worker_meta() is None
    scheduler.schedule()
    assert scheduler.received == [{"a"}, {"b"}]
    assert len(scheduler.requests["b"].kv_transfer_params["dynamo_read_times"]) == 4
    assert reported(half) == set()


def test_notice_of_failed_or_late_read_is_left_to_the_step(half: Any) -> None:
    scheduler = Scheduler({"failed": reading(), "late": reading(expires_at=1.0), "good": reading()})
    for name in scheduler.requests:
        half.connector_worker._read_blocks_for_req(name, WITH_BLOCKS)
    half.connector_worker.read_failed("failed")
    for name in ("late", "good"):
        half.connector_worker.received(name)
    scheduler.schedule()
    assert scheduler.received == [{"good"}]
    scheduler.schedule()
    assert scheduler.received == [{"good"}]
    assert reported(half) == {"failed", "late"}
    meta = half.build_connector_worker_meta()
    assert set(meta.times) == {"failed", "late"}


def test_notice_after_reported_failure_is_never_good(half: Any) -> None:
    """As when a handshake fails on its thread, between two looks at the transfers (0.24 to
    0.29).
    """
    scheduler = Scheduler({"a": reading()})
    half.connector_worker._read_blocks_for_req("a", WITH_BLOCKS)
    half._failed.add("a")
    assert reported(half) == set()
    assert half.build_connector_worker_meta().failed == {"a"}
    half.connector_worker.received("a")
    scheduler.schedule()
    assert scheduler.received == []
    assert reported(half) == {"a"}
    half.build_connector_worker_meta()
    assert (half._failed, half._reported_failures) == (set(), set()), "nothing is left of it"


def test_notice_ignores_request_aborted_in_queue(half: Any) -> None:
    """Its read only frees the KV at the prefill engine, and nothing is reported of it."""
    half.connector_worker._read_blocks_for_req("aborted", WITHOUT_BLOCKS)
    assert half._posted == {}


def test_failed_handshake_of_aborted_request_is_hidden(half: Any) -> None:
    """It no longer has the request: an assertion would end the engine (0.24 to 0.29)."""
    if half._asks_for_results:
        pytest.skip("vLLM itself does this from 0.30 on")
    half.connector_worker._recving_metadata["aborted"] = WITHOUT_BLOCKS
    half.connector_worker.read_failed("aborted")
    assert reported(half) == set()
    assert half.build_connector_worker_meta() is None
    assert half.connector_worker._recving_metadata == {}


def test_notice_without_reads_does_not_ask_vllm(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half.connector_worker, "get_finished", lambda: pytest.fail("asked"))
    Scheduler({}).schedule()


def test_notice_without_scheduler_is_left_to_the_step(half: Any) -> None:
    """As when the worker of the only rank has a process of its own."""
    half.connector_worker._read_blocks_for_req("a", WITH_BLOCKS)
    half.connector_worker.received("a")
    assert reported(half) == {"a"}
    assert set(half.build_connector_worker_meta().times) == {"a"}


def test_notice_when_there_are_several_ranks_then_only_vllms_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notice = importlib.import_module("dynamo_trtllm.engines.vllm.early_notice")
    monkeypatch.setattr(notice, "_worker_half", [])
    worker_half(world_size=2)
    assert notice._worker_half == []
