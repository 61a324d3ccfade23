"""What events of TensorRT-LLM's prefix cache mean, and how its buffer is read."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm import reports
from dynamo_trtllm.engines.trtllm.reports.kv_events import (
    KvEventConverter,
    KvEventPoller,
    check_kv_events,
)
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvEvent,
)
from dynamo_trtllm.protocol.messages import Role, token_ids
from tests.kit.cases import each_case
from tests.kit.waiting import SOON_S
from tests.unit.engines.trtllm.preflight_pairs import facts

LARGE = (1 << 64) - 1


def block(number: int | str, *ids: int, **fields: Any) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in ids]
    return {
        "type": "stored_block",
        "block_hash": number,
        "tokens": tokens,
        "cache_level": 0,
        "priority": 35,
        **fields,
    }


def stored(*blocks: dict[str, Any], parent: int | str | None = None) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def event(data: dict[str, Any], number: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event_id": number, "data": data, **fields}


def converted(*events: dict[str, Any], block_tokens: int = 2) -> list[KvEvent]:
    return KvEventConverter(block_tokens).convert(events)


def kv(number: int, *ids: int) -> KvBlock:
    return KvBlock(number, token_ids(ids))


@each_case(
    ("given", "wanted"),
    [
        (
            event(stored(block(1, 5, 6), block(LARGE, 7, 8)), window_size=128, attention_dp_rank=3),
            [BlocksStored(blocks=(kv(1, 5, 6), kv(LARGE, 7, 8)), cache_group=128, dp_rank=3)],
        ),
        (event(stored(block(2, 5, 6), parent=1)), [BlocksStored(blocks=(kv(2, 5, 6),), parent=1)]),
        # not full
        (event(stored(block(1, 5, 6), block(2, 7))), [BlocksStored(blocks=(kv(1, 5, 6),))]),
        (event(stored(block(2, 7))), []),
        (
            event(stored(block(1, 5, 6, cache_salt="s"))),
            [BlocksStored(blocks=(kv(1, 5, 6),), cache_salt="s")],
        ),
        (
            event({"type": "removed", "block_hashes": [1, LARGE]}),
            [BlocksRemoved(hashes=(1, LARGE))],
        ),
        (event({"type": "created", "num_blocks_per_cache_level": [10, 0]}), []),
        (event({"type": "updated", "block_hash": 1, "cache_level": {}, "priority": {}}), []),
    ],
)
def test_convert_when_of_each_kind_then_what_it_means(
    given: dict[str, Any], wanted: list[KvEvent]
) -> None:
    assert converted(given) == wanted


def test_convert_gap_of_a_rank_resets_readers() -> None:
    gone = {"type": "removed", "block_hashes": [1]}
    numbers = [(0, 0), (7, 1), (1, 0), (8, 1), (3, 0)]
    reader = KvEventConverter(2)
    found = reader.convert(
        [event(gone, number, attention_dp_rank=rank) for number, rank in numbers]
    )
    assert [isinstance(kv_event, BlocksCleared) for kv_event in found] == [
        False,
        False,
        False,
        False,
        True,
        False,
    ]
    assert (reader.num_gaps, reader.num_unreadable) == (1, 0)


def test_convert_text_hashes_to_64_bits() -> None:
    names = [hashlib.sha256(bytes([number])).digest() for number in range(3)]
    # as v2_sha256_64 has them
    first, second, third = (int.from_bytes(name[:8], "big") for name in names)
    texts = [name.hex() for name in names]
    found = converted(
        event(stored(block(texts[0], 5, 6), block(texts[1], 7, 8)), 0, hash_algo="v2_sha256"),
        event(stored(block(texts[2], 9, 9), parent=texts[1]), 1, hash_algo="v2_sha256"),
        event({"type": "removed", "block_hashes": texts}, 2, hash_algo="v2_sha256"),
    )
    assert found == [
        BlocksStored(blocks=(kv(first, 5, 6), kv(second, 7, 8))),
        BlocksStored(blocks=(kv(third, 9, 9),), parent=second),
        BlocksRemoved(hashes=(first, second, third)),
    ]
    assert all(number < 1 << 64 for number in (first, second, third))


def test_convert_equal_texts_to_equal_numbers() -> None:
    (one,) = converted(
        event({"type": "removed", "block_hashes": ["block one", "block two", "block one"]})
    )
    assert isinstance(one, BlocksRemoved)
    assert one.hashes[0] == one.hashes[2] != one.hashes[1]
    assert max(one.hashes) < 1 << 64


def test_convert_removes_block_with_its_last_layer_group() -> None:
    def of_group(
        group: int, data: dict[str, Any], number: int, window: int = 4096
    ) -> dict[str, Any]:
        return event(data, number, window_size=window, layer_group_id=group)

    both = stored(block(1, 5, 6), block(2, 7, 8))
    gone = {"type": "removed", "block_hashes": [1]}
    found = converted(
        of_group(0, both, 0),
        of_group(1, both, 1),
        of_group(1, gone, 2),  # still in group 0
        of_group(2, stored(block(1, 5, 6)), 3, window=128),
        of_group(2, gone, 4, window=128),  # another window
        of_group(0, gone, 5),
        of_group(1, stored(block(1, 5, 6)), 6),
        of_group(1, gone, 7),
    )
    removed = [(one.hashes, one.cache_group) for one in found if isinstance(one, BlocksRemoved)]
    assert removed == [((1,), 128), ((1,), 4096), ((1,), 4096)]
    assert [isinstance(one, BlocksStored) for one in found] == [
        True,
        True,
        True,
        False,
        False,
        True,
        False,
    ]


def test_convert_omits_block_with_bad_token_and_followers() -> None:
    image = block(2, 7, 8)
    image["tokens"][1]["token_id"] = "7f" * 32
    found = converted(event(stored(block(1, 5, 6), image, block(3, 9, 9))))
    assert found == [BlocksStored(blocks=(kv(1, 5, 6),))]


def test_convert_counts_malformed_events(caplog: pytest.LogCaptureFixture) -> None:
    reader = KvEventConverter(2)
    removal = {"type": "removed", "block_hashes": [1]}
    malformed = (
        {"no": "event"},
        event({"type": "removed", "block_hashes": [None]}, 1),
        event({"type": "stored", "blocks": [block(3, 5, 6)]}, 2),
        event(stored({"block_hash": 3}), 3),
        event("text", 4),  # type: ignore[arg-type]
        "text",
    )
    with caplog.at_level(logging.WARNING):
        found = reader.convert([event(removal, 0), *malformed, event(removal, 5)])  # type: ignore[list-item]
        assert found == [
            BlocksRemoved(hashes=(1,)),
            *[BlocksCleared()] * len(malformed),
            BlocksRemoved(hashes=(1,)),
        ]
        assert reader.num_unreadable == len(malformed)
        assert reader.num_gaps == 0
        after = reader.convert([event(stored(block(1, 5, 6)), 6)])
    assert after == [BlocksStored(blocks=(kv(1, 5, 6),))]
    assert caplog.text.count("A KV event can't be read") == 1


def test_convert_adopts_another_block_size_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = KvEventConverter(2)
    with caplog.at_level(logging.WARNING):
        # may be a part of a larger block
        assert reader.convert([event(stored(block(1, 5, 6, 7)), 0)]) == []
        of_four = stored(block(1, 5, 6, 7, 8), block(2, 5))
        found = reader.convert([event(of_four, 1)])
        assert found == [BlocksStored(blocks=(kv(1, 5, 6, 7, 8),))]
        assert (
            "blocks of 4 tokens and not 2; set kv_cache_config.tokens_per_block to 4" in caplog.text
        )
        of_two = stored(block(1, 5, 6), block(2, 7, 8))
        assert reader.convert([event(of_two, 2)]) == [BlocksCleared()]
    assert reader.num_unreadable == 1


async def test_poll_failures_are_logged_once_per_kind(
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
            # what could not be read may have been removals
            assert await found.get() == [BlocksCleared()]
            assert await found.get() == [BlocksRemoved(hashes=(1,))]
    await asyncio.to_thread(poller.stop)
    texts = [record.getMessage() for record in caplog.records]
    assert [("lost" in text, "event_id" in text) for text in texts] == [
        (True, False),
        (False, True),
    ]


async def test_poll_of_many_blocks_yields_to_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KvEventPoller, "pause_s", 0.001)
    monkeypatch.setattr(reports.kv_events, "MAX_BLOCKS_AT_ONCE", 2)
    read = [event(stored(block(number, 5, 6)), number) for number in range(5)]
    answers: list[Any] = [read]
    order: list[int | str] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_events(events: Sequence[KvEvent]) -> None:
        order.append(len(events))
        loop.call_soon(order.append, "another callback")
        if sum(part for part in order if isinstance(part, int)) == len(read):
            loop.call_soon(ended.set)

    poller = KvEventPoller(lambda timeout: answers.pop() if answers else [], 2)
    poller.start(on_events)
    await asyncio.wait_for(ended.wait(), SOON_S)
    await asyncio.to_thread(poller.stop)
    assert order == [2, "another callback", 2, "another callback", 1, "another callback"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "event_buffer_max_size"),
        ({"event_buffer_max_size": 8, "enable_block_reuse": False}, "enable_block_reuse"),
        ({"event_buffer_max_size": 8, "enable_block_reuse": True}, None),
    ],
)
def test_flag_without_event_arguments_is_rejected(
    changes: dict[str, Any], field: str | None
) -> None:
    worker = facts(
        Role.PREFILL, {f"kv_cache_config.{name}": value for name, value in changes.items()}
    )
    if field is None:
        check_kv_events(worker)
    else:
        with pytest.raises(ConfigError, match=f"--publish-kv-events needs kv_cache_config.{field}"):
            check_kv_events(worker)
