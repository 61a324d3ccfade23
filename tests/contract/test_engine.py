"""The contract of engines, held by the mock, by torch, by vllm over its stand-in, and by trtllm
over each release's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import pytest_asyncio

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, view
from dynamo_trtllm.protocol.errors import Overloaded, TransferFailed
from dynamo_trtllm.protocol.messages import Role, token_ids
from dynamo_trtllm.testing import EngineContract
from dynamo_trtllm.testing.engine_pool import EnginePool
from dynamo_trtllm.testing.engine_requests import ask, collect, prompt_of, run_both, tokens
from tests.kit.engines import answer, make, prefill_then_decode
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, fake_vllm, shorten_waits
from tests.kit.loopback_backend import LoopbackBackend


class Kind(NamedTuple):
    engine: str
    release: str = ""  # of the library that a stand-in plays
    args: Mapping[str, Any] = {}


KINDS = [
    Kind("mock"),
    Kind("torch"),
    Kind("vllm"),
    Kind("trtllm", RELEASES[0]),  # never frees KV that was not fetched
    # Releases between differ from these two in what test_engine_trtllm and _matrix test of each.
    *(pytest.param(Kind("trtllm", release), marks=pytest.mark.long) for release in RELEASES[1:-1]),
    Kind("trtllm", RELEASES[-1], {"transceiver": "NIXL"}),  # the Python transceiver
]
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "seed": 7, "top_k": 50},
    {"frequency_penalty": 1.5},
)
EMBEDDED = pytest.mark.parametrize("kind", KINDS[:2], indirect=True, ids=str)
SETTINGS = frozenset({"max_batch_size", "kv_cache_blocks", "kv_block_size", "max_seq_len", "ttl_s"})
EMBEDDED_SETTINGS = SETTINGS | {"enable_prefix_caching"}
TRANSPORTS = ("loopback", "trtllm/ucx", "trtllm/nixl", "vllm/nixl")


class Overwriting(LoopbackBackend):
    """A KV transfer backend that changes a bit of the first KV that it offers."""

    is_done = False

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], **named: Any
    ) -> bytes:
        offer = await super().publish(transfer_id, regions, **named)
        checksum = self._published[transfer_id].checksum
        assert checksum is not None
        for index in range(len(regions)):
            await checksum.hashes(index)
        if not self.is_done:
            self.is_done = True
            view(regions[-1])[-1] ^= 1
        return offer


class TestEngines(EngineContract):
    """The contract, and what our engines promise besides."""

    settings: ClassVar[frozenset[str]]
    kind: ClassVar[Kind]  # while its tests run
    folder: ClassVar[Path]

    @pytest.fixture(
        scope="class", params=KINDS, ids=lambda kind: " ".join(kind[:2]).strip(), name="kind"
    )
    @classmethod
    def set_kind(cls, request: pytest.FixtureRequest, gpt_oss: Path) -> Iterator[Kind]:
        kind: Kind = request.param
        cls.kind = kind
        cls.settings = EMBEDDED_SETTINGS if kind in KINDS[:2] else SETTINGS
        cls.folder = gpt_oss
        with ExitStack() as stack:
            if kind.engine == "trtllm":
                shorten_waits(stack.enter_context(pytest.MonkeyPatch.context()))
                stack.enter_context(fake_tensorrt_llm(kind.release))
            elif kind.engine == "vllm":
                stack.enter_context(fake_vllm())
            yield kind

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def pool(cls, kind: Kind) -> AsyncIterator[EnginePool]:
        pool = EnginePool(cls.create_engine, leaks=cls.leaks_unfetched_kv())
        yield pool
        await pool.aclose()

    @classmethod
    def leaks_unfetched_kv(cls) -> bool:
        """TensorRT-LLM has a timeout only since 1.2."""
        return cls.kind.release == "1.1.0"

    @classmethod
    def detects_released_kv(cls) -> bool:
        """NixlConnector reads without asking whether the KV is still held."""
        return cls.kind.engine != "vllm" and not cls.leaks_unfetched_kv()

    @classmethod
    def create_engine(cls, role: Role, **settings: Any) -> Engine:
        return make(cls.kind.engine, cls.folder, role, **cls.kind.args, **settings)

    async def test_transport_of_a_transfer_is_known(self, pool: EnginePool) -> None:
        prefill = pool.open(Role.PREFILL)
        decode = pool.open(Role.DECODE)
        async with pool.started(prefill, decode):
            last = (await run_both(prefill, decode, ask(prompt_of(100))))[-1]
            assert last.stats is not None
            assert last.stats.transport in TRANSPORTS

    @EMBEDDED
    @pytest.mark.parametrize(
        ("args", "lacking"),
        [({"max_batch_size": 1}, "queue.slots"), ({"kv_cache_blocks": 4}, "queue.kv_blocks")],
    )
    async def test_timings_of_waiting_requests_name_what_they_lacked(
        self, pool: EnginePool, args: dict[str, int], lacking: str
    ) -> None:
        engine = pool.open(**args)
        async with pool.started(engine):
            both = await asyncio.gather(*(collect(engine, ask(prompt_of(70, n))) for n in range(2)))
            _, waited = sorted(
                (chunks[-1].stats for chunks in both if chunks[-1].stats),
                key=lambda timings: timings.queue_s,
            )
            assert set(waited.more) == {lacking}
            assert 0 < waited.more[lacking] <= waited.queue_s

    @pytest.mark.parametrize("kind", KINDS[1:2], indirect=True, ids=str)  # others promise less
    @pytest.mark.parametrize("sampling", SAMPLED, ids=str)
    async def test_sampled_answer_resumed_equals_undisturbed_run(
        self, pool: EnginePool, sampling: dict[str, Any]
    ) -> None:
        engine = pool.open()
        prefill = pool.open(Role.PREFILL)
        decode = pool.open(Role.DECODE)
        async with pool.started(engine, prefill, decode):
            undisturbed = await answer(engine, prompt_of(70), max_tokens=24, **sampling)
            for made in (1, 22):
                so_far = prompt_of(70) + token_ids(undisturbed[:made])
                rest = ask(so_far, max_tokens=24 - made, num_resumed_output_tokens=made, **sampling)
                assert tokens(await collect(engine, rest)) == undisturbed[made:]
                assert tokens(await run_both(prefill, decode, rest)) == undisturbed[made:]

    @EMBEDDED  # the transports of others have no checksums: see docs/faults.md
    async def test_decode_with_changed_kv_fails_and_next_answer_is_right(
        self, pool: EnginePool
    ) -> None:
        aggregated = pool.open()
        decode = pool.open(Role.DECODE)
        prefill = pool.open(Role.PREFILL, backend=Overwriting())
        async with pool.started(aggregated, prefill, decode):
            with pytest.raises(TransferFailed, match="checksum"):
                await prefill_then_decode(prefill, decode, prompt_of(100))
            await pool.check_nothing_left(decode)
            assert decode.stats().kv_checksum_mismatches == 1
            assert tokens(
                await prefill_then_decode(prefill, decode, prompt_of(100))
            ) == await answer(aggregated, prompt_of(100))
            assert decode.stats().kv_checksum_mismatches == 1

    @EMBEDDED  # TensorRT-LLM's queue has no bound
    async def test_generate_when_queue_is_full_then_overloaded(self, pool: EnginePool) -> None:
        engine = pool.open(max_batch_size=1, max_queue=1)
        async with pool.started(engine):
            results = await asyncio.gather(
                *(answer(engine, prompt_of(20, n), max_tokens=30) for n in range(6)),
                return_exceptions=True,
            )
            assert any(isinstance(result, Overloaded) for result in results)
            assert any(isinstance(result, list) for result in results)
            assert all(isinstance(result, Overloaded | list) for result in results)
            await pool.check_nothing_left(engine)
