"""The memory estimate against numbers worked out by hand for gpt-oss-120b and a dense model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.preflight.facts import GPUS, Load, known_gpu, links_of
from dynamo_trtllm.engines.trtllm.preflight.memory import (
    WORKSPACE_BYTES,
    MemoryTable,
    memory_table,
    transfer_s,
)
from dynamo_trtllm.models.checkpoint import SHAPES, weight_bytes
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from tests.unit.engines.trtllm.preflight_pairs import GPT_OSS, LLAMA, facts

GIB = 1 << 30
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
BUFFER = "cache_transceiver_config.max_tokens_in_buffer"


def table(
    role: Role = Role.DECODE, changes: dict[str, Any] | None = None, **known: Any
) -> MemoryTable:
    found = memory_table(facts(role, changes, **known))
    assert found is not None
    return found


def test_weights_of_gpt_oss_120b_equal_a_hand_count() -> None:
    parts = weight_bytes(GPT_OSS)
    # 36 layers x 128 experts x 3 matrices of 2880 x 2880 at 4.25 bits, and 8640 biases of 2 bytes
    # per expert
    assert parts.experts == 36 * (3_185_049_600 * 17 // 32 + 1_105_920 * 2) == 60_993_699_840
    # 64 query and 2 x 8 KV heads of 64, in and out of 2880; biases and sinks
    assert parts.attention == 36 * 2 * (2 * 2880 * 72 * 64 + 5120 + 2880 + 64) == 1_911_610_368
    assert parts.vocabulary == 2 * 201088 * 2880 * 2 == 2_316_533_760
    assert parts.rest == (36 * (2 * 2880 + 128 * 2881) + 2880) * 2 == 26_971_776
    # what the published files weigh together
    assert parts.total == pytest.approx(65.25e9, rel=0.002)


def test_weights_when_gpt_oss_20b_then_near_the_published_files() -> None:
    assert weight_bytes(SHAPES["gpt-oss-20b"]).total == pytest.approx(13.76e9, rel=0.01)


def test_weights_of_dense_model_have_two_bytes_a_parameter() -> None:
    assert weight_bytes(LLAMA).total == pytest.approx(8.03e9 * 2, rel=0.001)  # Llama 3.1 8B


@pytest.mark.parametrize(
    ("changes", "kib"),
    [
        # 2 x 36 x 8 x 64 x 2 bytes
        ({"tensor_parallel_size": 1, "kv_cache_config.dtype": "auto"}, 72),
        ({"tensor_parallel_size": 1}, 36),  # fp8
        ({"tensor_parallel_size": 4}, 9),
        # one head at least: sixteen ranks hold each head twice
        ({"tensor_parallel_size": 16}, 4.5),
        ({"tensor_parallel_size": 4, "enable_attention_dp": True}, 36),
    ],
)
def test_kv_of_a_token_follows_split_and_type(changes: dict[str, Any], kib: float) -> None:
    assert table(changes=changes).kv_token_bytes == kib * 1024


def test_kv_of_a_token_with_windows_shows_the_saving() -> None:
    shown = table(changes={"tensor_parallel_size": 1})
    assert shown.windowed_token_bytes * 2 == shown.kv_token_bytes
    assert table(model=LLAMA).windowed_token_bytes == table(model=LLAMA).kv_token_bytes


def test_table_of_prefill_gives_the_rest_to_kv() -> None:
    shown = table(Role.PREFILL, on="b200")
    assert shown.weights_bytes == 65_248_815_744
    assert shown.buffer_bytes == 2 * 9216 * 36 * 1024
    free = 183_359 * (1 << 20) - 65_248_815_744 - WORKSPACE_BYTES - 2 * 9216 * 36 * 1024
    assert shown.kv_memory_bytes == round(free * 0.8)
    assert shown.blocks == round(free * 0.8) // (32 * 36 * 1024)
    assert shown.pool_tokens == shown.blocks * 32
    assert (shown.request_tokens, shown.concurrency, shown.limited_by) == (
        8192,
        64,
        "max_batch_size",
    )


def test_table_limited_by_kv_gives_concurrency_in_blocks() -> None:
    shown = table(on="h100", load=Load(isl=100_001, osl=1024))
    assert shown.blocks is not None
    assert shown.concurrency == shown.blocks // 3158  # 101,025 tokens in blocks of 32
    assert shown.limited_by == "KV"


def test_table_with_data_parallel_attention_counts_per_gpu() -> None:
    changes = {"enable_attention_dp": True, "max_batch_size": 10}
    assert table(changes=changes).concurrency == 40
    split = table()
    whole = table(changes=changes)
    assert whole.weights_bytes - split.weights_bytes == (1_911_610_368 + 2_316_533_760) * 3 // 4


def test_table_trusts_the_index_over_the_shape() -> None:
    model = replace(GPT_OSS, index_bytes=2 * weight_bytes(GPT_OSS).total)
    assert table(Role.PREFILL, model=model).weights_bytes == 2 * 65_248_815_744


def test_table_without_gpu_has_model_facts_only() -> None:
    shown = table(gpu=None)
    assert shown.kv_token_bytes == 9 * 1024
    assert (shown.kv_memory_bytes, shown.blocks, shown.concurrency) == (None, None, None)


def test_table_when_there_is_no_model_then_none() -> None:
    assert memory_table(facts(Role.DECODE, model=None)) is None


@pytest.mark.parametrize(
    ("key", "value", "blocks"), [("max_tokens", 3200, 100), ("max_gpu_total_bytes", 9216 * 320, 10)]
)
def test_table_when_kv_is_capped_then_the_cap_counts(key: str, value: int, blocks: int) -> None:
    assert table(changes={f"kv_cache_config.{key}": value}).blocks == blocks


def test_transfer_time_is_bytes_over_link_rate() -> None:
    seconds = transfer_s(facts(Role.PREFILL, on="h200"), facts(Role.DECODE, on="h200"), 8192)
    whole = 8192 * 36 * 1024
    assert seconds == {
        "NVLink": pytest.approx(whole / 450e9),
        "PCIe": pytest.approx(whole / 64e9),
        "network (400 Gb/s)": pytest.approx(whole / 50e9),
    }


def test_transfer_of_four_to_four_takes_a_quarter() -> None:
    four = facts(Role.PREFILL, {"tensor_parallel_size": 4})
    decode = facts(Role.DECODE)
    alone = transfer_s(facts(Role.PREFILL), decode, 8192)
    assert transfer_s(four, decode, 8192)["PCIe"] == pytest.approx(alone["PCIe"] / 4)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("NVIDIA H200", 450e9), ("NVIDIA H20", 450e9), ("NVIDIA GB200", 900e9), ("gb200", 900e9)],
)
def test_links_when_the_driver_names_the_gpu_then_its_nvlink(name: str, rate: float) -> None:
    assert links_of(name)["NVLink"] == rate


def test_links_when_the_gpu_has_no_nvlink_then_none_is_listed() -> None:
    assert set(links_of("NVIDIA RTX PRO 6000 Blackwell Server Edition")) == {
        "PCIe",
        "network (400 Gb/s)",
    }


def test_known_gpu_when_it_is_not_then_the_names_are_listed() -> None:
    with pytest.raises(ConfigError, match="one of a100, b200"):
        known_gpu("z1000")
    assert all(known_gpu(name).memory_bytes > 30 * GIB for name in GPUS)


def test_kv_of_a_token_with_latent_attention_is_per_rank() -> None:
    latent = replace(LLAMA, latent_kv_dim=576, num_kv_heads=128, num_layers=61)
    for parallel in (
        {"tensor_parallel_size": 8},
        {"tensor_parallel_size": 8, "enable_attention_dp": True},
    ):
        found = table(changes={**parallel, "kv_cache_config.dtype": "auto"}, model=latent)
        assert found.kv_token_bytes == 61 * 576 * 2
