"""What events of vLLM's prefix cache mean, over batches that vLLM 0.24.0 sent, and over made
ones.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.vllm.kv_events import VllmEventConverter
from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    KvEvent,
)
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.cases import each_case

BLOCK = 32
Batches = Sequence[tuple[int, bytes]]
# Of a model with sliding-window layers in group 0 and full attention in group 1. The prefill engine
# ran a prompt of 140 tokens and 40 output tokens, the same with salt "s", and once more after
# `reset_prefix_cache`. The decode engine read a prompt of 300 tokens over NIXL and generated 39
# tokens, twice.
RECORDED: dict[str, Batches] = {
    role: [(number, base64.b64decode(payload)) for number, payload in batches]
    for role, batches in json.loads(
        (Path(__file__).parents[3] / "data" / "vllm_kv_events.json").read_text()
    ).items()
}


class Reader:
    """A converter of events with blocks of 2 tokens. Its publisher can replay `replayable`."""

    def __init__(self, *, block_tokens: int = 2) -> None:
        self.replayable: list[tuple[int, bytes]] = []
        self.asked: list[tuple[int, int]] = []
        self.converter = VllmEventConverter(block_tokens, self.replay)

    def replay(self, rank: int, first: int) -> Batches:
        self.asked.append((rank, first))
        return [(number, payload) for number, payload in self.replayable if number >= first]

    def read(self, number: int, payload: bytes) -> list[KvEvent]:
        return [*self.converter.read(number, payload)]


def batch(*events: dict[str, Any], rank: int = 0, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def stored(*hashes: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "lora_id": None,
    }
    event |= {
        "token_ids": [token for one in hashes for token in (one, one)],
        "block_size": 2,
        "medium": "GPU",
    }
    return event | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"} | fields


def removed(*hashes: int, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": "GPU",
        "group_idx": 0,
        **fields,
    }


def kv(*hashes: int) -> tuple[KvBlock, ...]:
    return tuple(KvBlock(name, token_ids([name, name])) for name in hashes)


def test_recorded_prompt_has_full_attention_blocks_until_reset() -> None:
    reader = Reader(block_tokens=BLOCK)
    begun, grown, salted, reset = (
        reader.read(number, payload) for number, payload in enumerate(payloads("prefill"))
    )
    (first,) = begun
    (more,) = grown
    (private,) = salted
    (cleared, again) = reset
    assert isinstance(first, BlocksStored)
    assert isinstance(more, BlocksStored)
    assert isinstance(private, BlocksStored)
    assert [len(block.token_ids) for block in first.blocks] == [BLOCK] * 4
    assert (first.parent, first.cache_salt) == (None, None)
    assert (len(more.blocks), more.parent) == (1, first.blocks[-1].hash)
    assert (private.parent, private.cache_salt) == (None, "s")
    assert [block.token_ids for block in private.blocks] == [
        block.token_ids for block in first.blocks
    ]
    assert not {block.hash for block in private.blocks} & {block.hash for block in first.blocks}
    assert cleared == BlocksCleared(dp_rank=0)
    assert isinstance(again, BlocksStored)


def payloads(role: str) -> list[bytes]:
    return [payload for _, payload in RECORDED[role]]


def test_recorded_decode_removes_block_with_second_copy() -> None:
    reader = Reader(block_tokens=BLOCK)
    (fetched,), (filled,), (again,) = (reader.read(*message) for message in RECORDED["decode"])
    assert isinstance(fetched, BlocksStored)
    assert isinstance(filled, BlocksStored)
    assert len(fetched.blocks) == 9
    assert filled == again
    gone = batch(removed(filled.blocks[0].hash, group_idx=1))
    assert reader.read(3, gone) == []
    assert reader.read(4, gone) == [BlocksRemoved(hashes=(filled.blocks[0].hash,))]


def test_read_of_continued_prompt_has_its_salt() -> None:
    reader = Reader()
    events = reader.read(0, batch(stored(1, 2, extra_keys=[["s"], None]), stored(3, parent=2)))
    assert events[1] == BlocksStored(blocks=kv(3), parent=2, cache_salt="s")


def test_read_joins_removals_in_order() -> None:
    batches = batch(
        stored(1, 2), removed(2), removed(1), removed(9), stored(1), {"type": "AllBlocksCleared"}
    )
    assert Reader().read(0, batches) == [
        BlocksStored(blocks=kv(1, 2)),
        BlocksRemoved(hashes=(2, 1)),
        BlocksStored(blocks=kv(1)),
        BlocksCleared(dp_rank=0),
    ]


@each_case(
    "event",
    [
        stored(1, kv_cache_spec_kind="sliding_window", group_idx=1),
        stored(1, group_idx=2),  # a second group of full attention
        stored(1, medium="CPU"),
        stored(1, token_ids=[1], block_size=1),  # part of a block
        stored(1, extra_keys=[["image", "s"]]),
        stored(1, parent=9, extra_keys=[["adapter"]]),
        removed(7, group_idx=1),
        removed(7, medium="CPU"),
    ],
)
def test_read_omits_blocks_that_tokens_cannot_find(event: dict[str, Any]) -> None:
    reader = Reader()
    reader.read(0, batch(stored(7)))
    assert reader.read(1, batch(event)) == []


def test_empty_keys_of_a_block_are_none() -> None:
    assert Reader().read(0, batch(stored(1, extra_keys=[[]]))) != []


def test_read_when_no_layer_has_full_attention_then_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = Reader()
    for number in range(2):
        assert reader.read(number, batch(stored(1, kv_cache_spec_kind="sliding_window"))) == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_read_requests_lost_batches_once_in_order() -> None:
    reader = Reader()
    batches = [batch(stored(number)) for number in range(5)]
    reader.replayable = [*enumerate(batches[:2])]
    assert [*reader.converter.catch_up(0)] == [
        BlocksStored(blocks=kv(number)) for number in range(2)
    ]
    # the publisher has sent the last one too, but it is still on its way
    reader.replayable = [*enumerate(batches)]
    assert reader.read(3, batches[3]) == [BlocksStored(blocks=kv(number)) for number in (2, 3, 4)]
    assert reader.read(4, batches[4]) == []
    assert reader.asked == [(0, 0), (0, 2)]


def test_read_of_unavailable_batches_resets_readers() -> None:
    reader = Reader()
    reader.read(0, batch(stored(1)))
    reader.replayable = [(5, batch(stored(5)))]
    assert reader.read(6, batch(removed(1), stored(6))) == [
        BlocksCleared(dp_rank=0),
        BlocksStored(blocks=kv(5)),
        BlocksStored(blocks=kv(6)),
    ]


def test_read_of_restarted_engine_resets_readers() -> None:
    reader = Reader()
    for number in range(3):
        reader.read(number, batch(stored(number), ts=number))
    assert reader.read(0, batch(stored(9), ts=3)) == [
        BlocksCleared(dp_rank=0),
        BlocksStored(blocks=kv(9)),
    ]
    assert reader.read(1, batch(stored(8), ts=4)) == [BlocksStored(blocks=kv(8))]


def test_read_of_separate_rank_caches_stays_apart() -> None:
    reader = Reader()
    reader.read(0, batch(stored(1)))
    assert reader.read(0, batch(stored(1), rank=1)) == [BlocksStored(blocks=kv(1), dp_rank=1)]
    assert reader.read(1, batch(removed(1), rank=1)) == [BlocksRemoved(hashes=(1,), dp_rank=1)]
    assert reader.asked == []
