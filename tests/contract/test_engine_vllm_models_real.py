"""The vllm engine over the real vLLM with models of other kinds: layers that see a window or a
chunk, dummy weights.

Run with `pytest -m vllm`. Each pair of engines is gone before the next one comes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dynamo_trtllm.engines.vllm import releases
from dynamo_trtllm.engines.vllm.args import TRANSFER_BLOCK_TOKENS
from dynamo_trtllm.engines.vllm.kv_events import VllmEventConverter
from dynamo_trtllm.engines.vllm.patches import failed_reads
from dynamo_trtllm.protocol.errors import TransferFailed
from dynamo_trtllm.protocol.messages import Phase, token_ids
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    release,
    tokens,
)
from tests.contract.vllm_real import (
    SPOILED,
    Pair,
    all_failed_reads,
    save_model,
    save_windowed,
    spoiled,
    started,
)
from tests.kit.engines import answer, prefill_params, prefill_then_decode
from tests.kit.kv_index import KvIndex
from tests.kit.tiny_models import save_tiny_llama4

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # the vendor's
]


async def test_dummy_weights_distinguish_prompts_that_end_alike(tmp_path: Path) -> None:
    """From config.json alone."""
    folder = save_model(tmp_path / "shape")
    (folder / "model.safetensors").unlink()
    prompts = [[*prompt_of(300, seed), *prompt_of(10, 3)] for seed in range(10, 16)]
    async with started(folder, load_format="dummy") as pair:
        whole = [await answer(pair.decode, prompt, max_tokens=16) for prompt in prompts]
        assert len(set(map(tuple, whole))) == len(prompts)
        for prompt, wanted in zip(prompts, whole, strict=True):
            assert (
                tokens(await prefill_then_decode(pair.prefill, pair.decode, prompt, max_tokens=16))
                == wanted
            )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def windowed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """vLLM lets go of KV blocks behind the window."""
    folder = save_windowed(tmp_path_factory.mktemp("models") / "windowed", window=48)
    async with started(
        folder, block_size=32, num_gpu_blocks_override=2000, publish_kv_events=True
    ) as engines:
        yield engines


async def test_kv_events_show_prompt_prefixes_until_removed(
    windowed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines publish. The prefill engine ran requests before anything read its events."""
    engine: Any = windowed.prefill
    early = prompt_of(70, 401)
    first = prompt_of(140, 402)
    index = KvIndex()
    await collect(engine, ask(early, max_tokens=2))
    engine.start_kv_events(index.on_events)
    await index.until(early, 64)
    await asyncio.gather(*(collect(engine, ask(first, max_tokens=2)) for _ in range(2)))
    await index.until(first, 128)  # its full blocks
    await collect(engine, msgspec.structs.replace(ask(first, max_tokens=2), cache_salt="s"))
    await index.until(first, 128, "s")

    decoding: Any = windowed.decode
    fetched = KvIndex()
    decoding.start_kv_events(fetched.on_events)
    answered = tokens(await prefill_then_decode(engine, decoding, first, max_tokens=40))
    # what it read, and a block that it filled
    await fetched.until(first + token_ids(answered), 160)

    read = VllmEventConverter.read
    lost = [True]  # one batch is lost on its way
    monkeypatch.setattr(
        VllmEventConverter,
        "read",
        lambda *message: iter(()) if lost and lost.pop() else read(*message),
    )
    missed = prompt_of(100, 403)
    later = prompt_of(100, 404)
    for prompt in (missed, later):
        await collect(engine, ask(prompt, max_tokens=2))
    await index.until(later, 96)
    await index.until(missed, 96)

    assert index.removed == 0
    for n in range(500, 550):  # more than the cache has, long before the last one
        if not index.removed:
            await collect(engine, ask(prompt_of(1900, n), max_tokens=2))
    assert index.removed > 0
    assert await engine._llm.reset_prefix_cache()
    await collect(engine, ask(early, max_tokens=2))
    await index.until(early, 64)
    assert index.cached_tokens(later) == 0


# with a seed, decode makes the first token
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seed"])
async def test_two_calls_with_window_lose_no_key(windowed: Pair, sampling: dict[str, Any]) -> None:
    """48 tokens seen, 32 in a block: prompts of 14 or 15 tokens in their last block, and full ones,
    are the edges.
    """
    lengths = [*range(206, 225), *range(14, 800, 32), *range(15, 800, 32)]
    assert await parted(windowed, lengths, sampling) == []


@pytest.mark.parametrize("count", [6, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", SPOILED)
async def test_decode_when_two_kv_groups_are_unreadable_then_no_cache(
    windowed: Pair, how: str, count: int
) -> None:
    """vLLM itself answers such a request with other tokens, and caches what they were made from."""
    assert await all_failed_reads(windowed, count, how) == []


async def test_two_calls_when_reads_fail_under_load_then_recover(windowed: Pair) -> None:
    prompts = [prompt_of(40 + 23 * n, 900 + n) for n in range(24)]
    alone = [await answer(windowed.prefill, prompt, max_tokens=24) for prompt in prompts]

    async def one_request(n: int) -> list[int]:
        if n % 3 == 0:
            kv_params = await prefill_params(windowed.prefill, prompts[n], max_tokens=24)
            bad = spoiled(kv_params, SPOILED[n // 3 % 2], peer="unknown")
            with pytest.raises(TransferFailed):
                await collect(
                    windowed.decode,
                    ask(prompts[n], phase=Phase.DECODE, kv_params=bad, max_tokens=24),
                )
            release(windowed.prefill, kv_params)
        return tokens(
            await prefill_then_decode(windowed.prefill, windowed.decode, prompts[n], max_tokens=24)
        )

    assert await asyncio.gather(*map(one_request, range(len(prompts)))) == alone
    for engine in windowed:
        await check_nothing_left(engine)


async def test_failed_read_in_several_kv_groups_marks_no_block() -> None:
    """From 0.30 on, vLLM ends such requests itself: the tests above then run without the report."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.v1.core.sched.scheduler import Scheduler

    assert failed_reads.is_needed() is (releases.installed().manifest.name < "0.30")
    if not failed_reads.is_needed():
        assert "failed_recving" in inspect.getsource(Scheduler)
        return
    worker = SimpleNamespace(
        _is_hma_required=True,
        _recving_metadata={"r": SimpleNamespace(local_block_ids=([1, 2], [3]))},
        _invalid_block_ids=queue.Queue(),
        _failed_recv_reqs=queue.Queue(),
        xfer_stats=SimpleNamespace(record_failed_transfer=lambda: None),
    )
    NixlBaseConnectorWorker._handle_failed_transfer(worker, "r", None)
    assert worker._failed_recv_reqs.get_nowait() == "r"
    assert worker._invalid_block_ids.empty()
    assert "(req_block_ids,) =" in inspect.getsource(Scheduler._update_requests_with_invalid_blocks)


async def test_two_calls_with_blocks_as_large_as_window_lose_no_key(tmp_path: Path) -> None:
    """The default blocks of 128 tokens, and gpt-oss's window of 128."""
    edges = [127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513]
    async with started(save_windowed(tmp_path / "windowed", window=128)) as pair:
        assert pair.decode._llm.vllm_config.cache_config.block_size == TRANSFER_BLOCK_TOKENS  # type: ignore[attr-defined]
        for sampling in SAMPLINGS:
            assert await parted(pair, [1, 2, *edges, 142, 270], sampling) == []


async def test_two_calls_with_chunked_attention_lose_no_key(tmp_path: Path) -> None:
    """64 tokens in a chunk, 32 in a block: prompts that end with a chunk are the edge.

    The engine died of them once.
    """
    lengths = [*range(60, 70), *range(124, 132), *range(188, 196), 256, 320, 384]
    async with started(save_tiny_llama4(tmp_path / "chunked", chunk=64), block_size=32) as pair:
        for sampling in SAMPLINGS:
            assert await parted(pair, lengths, sampling) == []


async def test_two_calls_in_one_process_are_unchanged_by_early_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one GPU: on CPUs vLLM would start a process for the worker."""
    in_one_process(monkeypatch)
    folder = save_windowed(tmp_path / "windowed", window=48)
    async with started(folder, block_size=32) as pair:
        assert await parted(pair, [30, 63, 64, 65, 79, 206, 559], SAMPLINGS[1]) == []
        chunks = await prefill_then_decode(
            pair.prefill, pair.decode, prompt_of(300, 1), max_tokens=4
        )
        assert "kv_transfer.notice" in chunks[-1].stats.more  # type: ignore[union-attr]
        for how in SPOILED:
            assert await all_failed_reads(pair, 6, how) == []


def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM run the worker in its engine process on a CPU, too."""
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    check = platform.check_and_update_config

    def check_then_unite(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.parallel_config.distributed_executor_backend = "uni"

    monkeypatch.setattr(type(platform), "check_and_update_config", staticmethod(check_then_unite))


async def parted(pair: Pair, lengths: list[int], sampling: dict[str, Any]) -> list[int]:
    """Return the lengths of prompts whose disaggregated answer differs from the aggregated one."""
    found = []
    for length in lengths:
        prompt = prompt_of(length, length)
        chunks = await prefill_then_decode(
            pair.prefill, pair.decode, prompt, max_tokens=12, **sampling
        )
        whole = await collect(pair.prefill, ask(prompt, max_tokens=12, **sampling))
        if tokens(chunks) != tokens(whole):
            found.append(length)
    return found


async def test_two_calls_of_a_conversation_ignore_what_is_cached(windowed: Pair) -> None:
    differ = []
    for begin in range(40, 110, 9):
        prompt = prompt_of(begin, 300 + begin)
        for turn in range(5):
            chunks = await prefill_then_decode(
                windowed.prefill, windowed.decode, prompt, max_tokens=14
            )
            cold = msgspec.structs.replace(ask(prompt, max_tokens=14), cache_salt=f"{begin} {turn}")
            if tokens(chunks) != tokens(await collect(windowed.prefill, cold)):
                differ.append(len(prompt))
            prompt = [*prompt, *tokens(chunks), *prompt_of(turn * 7 + 5, begin * turn + 1)]
    assert differ == []
