"""What prefix caches of the mock and torch engines reuse, report and keep apart."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.engines.torch.scheduler import Scheduler
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.kv_events import BlocksRemoved, BlocksStored, KvEvent
from dynamo_trtllm.protocol.messages import (
    Chunk,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    Role,
    token_ids,
)
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    release,
    started,
    tokens,
)
from tests.kit.engines import answer, make


def prompt(length: int, seed: int = 1) -> array[int]:
    # of the vocabulary of both models
    return token_ids(token % 500 + 5 for token in prompt_of(length, seed))


PROMPT = prompt(100)  # three full blocks of 32 tokens, and four tokens
BOTH = pytest.mark.parametrize("kind", ["mock", "torch"])


class Events:
    """The blocks that an engine has by its KV events: the tokens up to the end of each, with their
    salt.
    """

    def __init__(self, engine: Engine) -> None:
        self.prefixes: dict[int, tuple[str | None, list[int]]] = {}
        engine.start_kv_events(self.read)

    def read(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                before = [] if event.parent is None else self.prefixes[event.parent][1]
                for block in event.blocks:
                    before = [*before, *block.token_ids]
                    self.prefixes[block.hash] = (event.cache_salt, before)
            elif isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    del self.prefixes[name]

    def longest(self, salt: str | None = None) -> list[int]:
        return max(
            (prefix for of, prefix in self.prefixes.values() if of == salt), key=len, default=[]
        )


def caching(kind: str, folder: Path, role: Role = Role.AGGREGATED, **args: Any) -> Engine:
    return make(
        kind,
        folder,
        role,
        enable_prefix_caching=True,
        **({"step_s": 0} if kind == "mock" else {}),
        **args,
    )


async def cached(engine: Engine, ids: array[int], salt: str | None = None, **sampling: Any) -> int:
    """Ask. Return the cached tokens of the first and of the last chunk, which agree."""
    chunks = await collect(engine, msgspec.structs.replace(ask(ids, **sampling), cache_salt=salt))
    counts = [
        chunk.stats.cached_tokens for chunk in (chunks[0], chunks[-1]) if chunk.stats is not None
    ]
    assert len(set(counts)) == 1
    return counts[-1]


async def prefilled(
    engine: Engine, ids: array[int], **sampling: Any
) -> tuple[KvTransferParams, int]:
    """Run a prefill call. Return its KV transfer parameters and its cached tokens."""
    last: Chunk = (await collect(engine, ask(ids, phase=Phase.PREFILL, **sampling)))[-1]
    assert last.kv_params is not None
    assert last.stats is not None
    return last.kv_params, last.stats.cached_tokens


@BOTH
async def test_repeated_prompt_reuses_full_blocks_per_salt(kind: str, llama: Path) -> None:
    engine = caching(kind, llama)
    async with started(engine):
        events = Events(engine)
        salts = [None, None, "tenant", "other", "tenant", None]
        assert [await cached(engine, PROMPT, salt, max_tokens=2) for salt in salts] == [
            0,
            96,
            0,
            0,
            96,
            96,
        ]
        # the last token is always computed
        assert await cached(engine, PROMPT[:96], max_tokens=2) == 64
        assert await cached(engine, PROMPT[:80] + PROMPT[:9], max_tokens=2) == 64
        assert [events.longest(salt) for salt in (None, "tenant", "other", "new")] == [
            list(PROMPT[:96])
        ] * 3 + [[]]
        await check_nothing_left(engine)


@BOTH
async def test_conversation_when_it_goes_on_then_its_output_is_reused(
    kind: str, llama: Path
) -> None:
    engine = caching(kind, llama)
    async with started(engine):
        events = Events(engine)
        output = await answer(engine, PROMPT, max_tokens=61, ignore_eos=True)
        turn = PROMPT + token_ids([*output, 1, 2, 3])
        await check_nothing_left(engine)
        assert events.longest() == list(turn[:160])
        assert await cached(engine, turn) == 160
        output = await answer(engine, PROMPT, max_tokens=60, ignore_eos=True)
        # of 160, the last one is computed
        assert await cached(engine, PROMPT + token_ids(output)) == 128


@BOTH
async def test_scarce_blocks_evict_oldest_unused(kind: str, llama: Path) -> None:
    engine = caching(kind, llama, kv_cache_blocks=8)
    async with started(engine):
        events = Events(engine)
        assert [await cached(engine, prompt(100, seed)) for seed in (1, 2, 3, 4)] == [0] * 4
        await check_nothing_left(engine)
        assert len(events.prefixes) == 7
        assert await cached(engine, prompt(100, 1)) == 0
        assert await cached(engine, prompt(100, 4)) == 96
        same = (cached(engine, prompt(100, 4), max_tokens=100) for _ in range(3))
        assert await asyncio.gather(*same) == [96] * 3
        await check_nothing_left(engine)


@BOTH
@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
async def test_separate_prefill_and_decode_both_cache_blocks(
    kind: str, model: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    prefill = caching(kind, folder, Role.PREFILL)
    decode = caching(kind, folder, Role.DECODE)
    asked = prompt(200)
    async with started(prefill, decode):
        of_prefill = Events(prefill)
        of_decode = Events(decode)
        outputs = []
        for counted in (0, 192):
            kv_params, count = await prefilled(prefill, asked, max_tokens=40, ignore_eos=True)
            assert count == counted
            await check_stats(prefill, kv_blocks_used=7, pending_kv_transfers=1)
            call = ask(
                asked, phase=Phase.DECODE, kv_params=kv_params, max_tokens=40, ignore_eos=True
            )
            outputs.append(tokens(await collect(decode, call)))
            release(prefill, kv_params, ReleaseOutcome.FETCHED)
            await check_nothing_left(prefill)
            await check_nothing_left(decode)
        assert outputs[0] == outputs[1]
        assert of_prefill.longest() == list(asked[:192])
        # KV that was fetched lacks what sliding windows hide.
        has_all = kind == "mock" or model == "llama"
        assert of_decode.longest() == ([*asked, *outputs[0][:24]] if has_all else [])
        assert await cached(decode, asked + token_ids(outputs[0])) == (224 if has_all else 0)
        await check_nothing_left(decode)


@pytest.mark.parametrize("name", ["mock", "torch"])
def test_kv_events_without_prefix_cache_are_rejected(name: Any, llama: Path) -> None:
    config = WorkerConfig(
        model_path=str(llama),
        engine=name,
        publish_kv_events=True,
        override_engine_args={"enable_prefix_caching": False},
    )
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        create_engine(config, instance_id=1)


@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
async def test_shared_prefixes_give_same_answers_as_without_cache(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    base = prompt(300)
    sampling = {"max_tokens": 10, "logprobs": 0}
    asked = [
        ask(base[:length] + prompt(more, 9), **sampling)
        for length, more in ((300, 0), (300, 40), (129, 3))
    ]
    asked.append(ask(base, **sampling, temperature=0.9, seed=5))
    args = {"prefill_chunk_tokens": 100, "kv_cache_blocks": 60}
    plain = make("torch", folder, Role.AGGREGATED, enable_prefix_caching=False, **args)
    caches = caching("torch", folder, **args)
    async with started(plain, caches):
        wanted = [await collect(plain, call) for call in asked]
        for together in (False, True):
            calls = [collect(caches, call) for call in asked]
            got = await asyncio.gather(*calls) if together else [await call for call in calls]
            assert [tokens(chunks) for chunks in got] == [tokens(chunks) for chunks in wanted]
            assert logprobs(got) == pytest.approx(logprobs(wanted), abs=1e-4)
        assert [chunks[-1].stats.cached_tokens for chunks in got if chunks[-1].stats] == [
            288,
            320,
            128,
            288,
        ]
        await check_nothing_left(caches)


def logprobs(answers: Sequence[Sequence[Chunk]]) -> list[float]:
    return [entry.logprob for chunks in answers for chunk in chunks for entry in chunk.logprobs]


async def test_prompt_logprobs_compute_a_cached_prompt_completely(llama: Path) -> None:
    engine = caching("torch", llama)
    async with started(engine):
        await cached(engine, PROMPT)
        chunks = await collect(engine, ask(PROMPT, prompt_logprobs=0))
        assert sum(len(chunk.prompt_logprobs) for chunk in chunks) == 100
        assert chunks[-1].stats is not None
        assert chunks[-1].stats.cached_tokens == 0
        assert await cached(engine, PROMPT) == 96


async def test_reuse_of_changed_cache_fails_one_request_only(llama: Path) -> None:
    engine = caching("torch", llama)
    async with started(engine):
        events = Events(engine)
        wanted = await answer(engine, PROMPT)
        scheduler: Scheduler = engine._scheduler  # type: ignore[attr-defined]
        await check_nothing_left(engine)
        scheduler.pool.keys[:, :, 0] = -float("inf")
        with pytest.raises(Exception, match="NaN or infinite"):
            await answer(engine, PROMPT)
        await check_nothing_left(engine)
        assert events.longest() == []
        assert await answer(engine, PROMPT) == wanted
        await check_nothing_left(engine)
