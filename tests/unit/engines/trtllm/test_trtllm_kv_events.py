"""What events of TensorRT-LLM's prefix cache mean, and how its buffer is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm import engine
from dynamo_trtllm.engines.trtllm.reports.kv_events import KvEventPoller
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvBlock, KvEvent
from dynamo_trtllm.messages import Role, token_ids
from tests.unit.engines.trtllm.preflight_pairs import facts
from tests.waiting import SOON_S

LARGE = (1 << 64) - 1


def block(number: int, *ids: int, **fields: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in ids]
    return {"type": "stored_block", "block_hash": number, "tokens": tokens, "cache_level": 0, "priority": 35, **fields}


def stored(*blocks: dict[str, Any], parent: int | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def event(data: dict[str, Any], number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, **fields}


def converted(*events: dict[str, Any], block_tokens: int = 2) -> list[KvEvent]:
    poller = KvEventPoller(lambda timeout: (), block_tokens)
    return [each for one in events for each in poller.convert(one)]


def kv(number: int, *ids: int) -> KvBlock:
    return KvBlock(number, token_ids(ids))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            event(stored(block(1, 5, 6), block(LARGE, 7, 8)), window_size=128, attention_dp_rank=3),
            [BlocksStored(blocks=(kv(1, 5, 6), kv(LARGE, 7, 8)), cache_group=128, dp_rank=3)],
        ),
        (event(stored(block(2, 5, 6), parent=1)), [BlocksStored(blocks=(kv(2, 5, 6),), parent=1)]),
        (event(stored(block(1, 5, 6), block(2, 7))), [BlocksStored(blocks=(kv(1, 5, 6),))]),  # not full
        (event(stored(block(2, 7))), []),
        (event(stored(block(1, 5, 6, cache_salt="s"))), [BlocksStored(blocks=(kv(1, 5, 6),), cache_salt="s")]),
        (event({"type": "removed", "block_hashes": [1, LARGE]}), [BlocksRemoved(hashes=(1, LARGE))]),
        (event({"type": "created", "num_blocks_per_cache_level": [10, 0]}), []),
        (event({"type": "updated", "block_hash": 1, "cache_level": {}, "priority": {}}), []),
    ],
)
def test_convert_when_of_each_kind_then_what_it_means(given: dict[str, Any], wanted: list[KvEvent]) -> None:
    assert converted(given) == wanted


def test_convert_when_a_rank_has_a_gap_then_readers_forget_everything() -> None:
    gone = {"type": "removed", "block_hashes": [1]}
    numbers = [(0, 0), (7, 1), (1, 0), (8, 1), (3, 0)]
    found = converted(*(event(gone, number, attention_dp_rank=rank) for number, rank in numbers))
    assert [isinstance(each, BlocksCleared) for each in found] == [False, False, False, False, True, False]


async def test_poll_when_calls_fail_then_each_kind_is_logged_once_and_events_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KvEventPoller, "pause_s", 0.001)
    answers: list[Any] = [RuntimeError("lost"), RuntimeError("lost"), None, [{"no": "event"}]]
    answers.append([event({"type": "removed", "block_hashes": [1]})])
    found: asyncio.Queue[Sequence[KvEvent]] = asyncio.Queue()

    def get_events(timeout: float) -> Any:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    poller = KvEventPoller(get_events, 2)
    with caplog.at_level(logging.WARNING):
        poller.start(found.put_nowait)
        async with asyncio.timeout(SOON_S):
            assert await found.get() == [BlocksCleared()]  # what could not be read may have been removals
            assert await found.get() == [BlocksRemoved(hashes=(1,))]
    await asyncio.to_thread(poller.stop)
    texts = [record.getMessage() for record in caplog.records]
    assert [text.rpartition(": ")[2] for text in texts] == ["lost", "'event_id'"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "event_buffer_max_size"),
        ({"event_buffer_max_size": 8, "enable_block_reuse": False}, "enable_block_reuse"),
        ({"event_buffer_max_size": 8, "enable_block_reuse": True}, None),
    ],
)
def test_flag_when_the_arguments_give_no_events_then_rejected_by_name(
    changes: dict[str, Any], field: str | None
) -> None:
    worker = facts(Role.PREFILL, {f"kv_cache_config.{name}": value for name, value in changes.items()})
    if field is None:
        engine.check_kv_events(worker)
    else:
        with pytest.raises(ConfigError, match=f"--publish-kv-events needs kv_cache_config.{field}"):
            engine.check_kv_events(worker)
