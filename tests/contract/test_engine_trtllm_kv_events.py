"""KV events of trtllm engines over each release's stand-in: an index that a reader builds from them
finds prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_requests import ask, collect, prompt_of, started
from tests.kit.engines import make
from tests.kit.fake_packages import fake_tensorrt_llm, shorten_waits
from tests.kit.kv_index import KvIndex
from tests.kit.waiting import SOON_S

# They may have the second KV cache manager, which names blocks by text and has layer groups.
CANDIDATES = ("1.3.0rc24", "1.3.0rc29", "1.4.0rc1")  # that can report text as hashes


@pytest.mark.parametrize("release", ["1.1.0", "1.3.0rc23", *CANDIDATES])
async def test_events_show_prompt_prefixes_until_removed(
    release: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch)
    index = KvIndex()
    first = prompt_of(70)
    longer = prompt_of(70) + prompt_of(60, seed=2)
    with fake_tensorrt_llm(release):
        events = {"kv_cache_config": {"event_buffer_max_size": 64}, "kv_cache_blocks": 12}
        engine: Any = make("trtllm", gpt_oss, Role.AGGREGATED, **events)
        async with started(engine):
            engine.start_kv_events(index.on_events)
            await collect(engine, ask(first, max_tokens=2))
            await index.until(first, 64)  # its full blocks
            await collect(engine, ask(longer, max_tokens=2))
            await index.until(longer, 128)
            await collect(engine, msgspec.structs.replace(ask(first, max_tokens=2), cache_salt="s"))
            await index.until(first, 64, "s")
            assert index.removed == 0
            for seed in range(3, 8):  # more than the cache has
                await collect(engine, ask(prompt_of(100, seed=seed), max_tokens=2))
            await index.until(longer, 0)
            assert index.removed > 0


@pytest.mark.parametrize("release", ["1.1.0", "1.2.1", "1.3.0rc23", *CANDIDATES])
async def test_hashes_of_events_are_numbers_where_configurable(
    release: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch)
    with fake_tensorrt_llm(release) as package:
        has_key = "kv_cache_event_hash_algo" in package.llmapi.llm_args.KvCacheConfig.model_fields
        assert has_key is (release in CANDIDATES)
        for publishes, own, expected in (
            (True, {}, "v1_block_key" if has_key else None),
            (
                True,
                {"kv_cache_event_hash_algo": "v2_sha256"} if has_key else {},
                "v2_sha256" if has_key else None,
            ),
            (False, {}, "auto" if has_key else None),  # the default
        ):
            kv_cache = {"event_buffer_max_size": 64, **own}
            engine: Any = make(
                "trtllm",
                gpt_oss,
                Role.AGGREGATED,
                publish_kv_events=publishes,
                kv_cache_config=kv_cache,
            )
            async with started(engine):
                assert (
                    engine._llm.args["kv_cache_config"].get("kv_cache_event_hash_algo") == expected
                )
                await collect(engine, ask(prompt_of(70), max_tokens=2))
                blocks = [
                    block
                    for event in engine._llm._executor.kv_events.take(SOON_S)
                    for block in event["data"].get("blocks", ())
                ]
                is_text = expected in ("auto", "v2_sha256")
                assert {type(block["block_hash"]) for block in blocks} == {str if is_text else int}


async def test_stats_count_lost_and_unreadable_events(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch)
    index = KvIndex()
    prompts = [prompt_of(70, seed=seed) for seed in range(1, 5)]
    with fake_tensorrt_llm() as package:
        engine: Any = make(
            "trtllm", gpt_oss, Role.AGGREGATED, kv_cache_config={"event_buffer_max_size": 64}
        )

        def counted() -> tuple[int, int]:
            return engine.stats().kv_event_gaps, engine.stats().kv_events_unreadable

        async with started(engine):
            engine.start_kv_events(index.on_events)
            await collect(engine, ask(prompts[0], max_tokens=2))
            await index.until(prompts[0], 64)
            assert counted() == (0, 0)
            next(engine._llm._executor.kv_events._numbers)  # as when the buffer was full
            await collect(engine, ask(prompts[1], max_tokens=2))
            await index.until(prompts[1], 64)
            assert index.cached_tokens(prompts[0]) == 0
            assert counted() == (1, 0)
            with package.standin.traps.turned("malformed_event"):
                await collect(engine, ask(prompts[2], max_tokens=2))
                await index.until(prompts[1], 0)
            assert counted() == (1, 1)
            await collect(engine, ask(prompts[3], max_tokens=2))
            await index.until(prompts[3], 64)
            assert counted() == (1, 1)


def test_flag_enables_event_buffer_unless_user_sets_another(gpt_oss: Path) -> None:
    config = WorkerConfig(model_path=str(gpt_oss), engine="trtllm", publish_kv_events=True)
    with fake_tensorrt_llm():
        size = "kv_cache_config.event_buffer_max_size"
        assert TrtllmEngine(config, instance_id=1)._args.get(size) == 100_000
        own = config.model_copy(
            update={"override_engine_args": {"kv_cache_config": {"event_buffer_max_size": 7}}}
        )
        assert TrtllmEngine(own, instance_id=1)._args.get(size) == 7
