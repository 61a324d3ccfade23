"""What a decode engine reads, and what layers with a window let go of: over vLLM's stand-in, for any prompt length."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes_path import VLLM_RELEASES, fake_vllm

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


@pytest.mark.parametrize("name", SEEN_FROM)
@pytest.mark.parametrize("behind", [0, 1])  # tokens behind what the prefill engine computed
@pytest.mark.parametrize("block", [16, 32, 128])
def test_read_when_a_prompt_is_of_any_length_then_blocks_pair_and_no_side_lost_what_the_next_token_sees(
    block: int, behind: int, name: str
) -> None:
    managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    manager, reads = getattr(managers, name)(WINDOW), connector(block)
    for held in range(1, 700):
        read, between_steps = reads.get_num_new_matched_tokens(request(held + behind, held), 0)
        assert between_steps
        assert -(-read // block) == -(-held // block)
        computed = min(read, held + behind - 1)  # vLLM steps back where all was read
        for side in (held, read):
            assert manager.get_num_skipped_tokens(side) // block * block <= SEEN_FROM[name](computed), (held, side)


@pytest.mark.parametrize(("prompt", "held", "cached", "read"), [(101, 100, 64, 36), (97, 96, 64, 32), (97, 96, 96, 1)])
def test_read_when_some_is_cached_here_then_only_the_rest(prompt: int, held: int, cached: int, read: int) -> None:
    assert connector(16).get_num_new_matched_tokens(request(prompt, held), cached) == (read, True)


def test_read_when_a_request_is_of_no_kv_transfer_then_nothing() -> None:
    assert connector(16).get_num_new_matched_tokens(request(50, 0, do_remote_prefill=False), 0) == (0, False)
    nothing = SimpleNamespace(kv_transfer_params=None, prompt_token_ids=[1])
    assert connector(16).get_num_new_matched_tokens(nothing, 0) == (0, False)


@pytest.mark.parametrize("rank", [0, 3])
def test_handshakes_when_a_channel_was_chosen_then_waited_for_there_by_each_rank(rank: int) -> None:
    scheduler = connector(16, rank).connector_scheduler
    assert (scheduler.side_channel_host, scheduler.side_channel_port) == ("10.1.2.3", 20_500 + rank)


def test_reads_when_two_ranks_have_ended_them_then_one_that_failed_counts_and_the_last_rank_does() -> None:
    module = importlib.import_module("dynamo_trtllm.engines.vllm.connector")
    one = module.EndedReads(frozenset({"a"}), {"a": (1.0, 2.0), "b": (1.0, 4.0)})
    both = one.aggregate(module.EndedReads(frozenset(), {"b": (3.0, 3.5), "c": (5.0, 6.0)}))
    assert both == module.EndedReads(frozenset({"a"}), {"a": (1.0, 2.0), "b": (3.0, 4.0), "c": (5.0, 6.0)})


def test_reads_when_ranks_end_them_in_different_steps_then_the_last_one_counts() -> None:
    module = importlib.import_module("dynamo_trtllm.engines.vllm.patches.late_reads")
    noted = [1.0]
    known = {"a": SimpleNamespace(kv_transfer_params={module.READ_TIMES: noted})}
    for times in ((2.0, 3.0), (2.5, 4.0)):
        reads = module.EndedReads(frozenset(), {"a": times, "gone": times})
        module._note_times(known, SimpleNamespace(kv_connector_worker_meta=reads))
    assert (noted[:3], len(noted)) == ([1.0, 2.5, 4.0], 4)
