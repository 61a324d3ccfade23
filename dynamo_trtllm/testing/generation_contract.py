"""Test what an engine promises of streams: their events, their tokens, cancellation, rejection."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.capabilities import TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.errors import ContextTooLong, RequestRejected
from dynamo_trtllm.protocol.messages import (
    FinishReason,
    GenerateRequest,
    OutputFormat,
    Phase,
    StructuredOutput,
    token_ids,
)
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.contract_base import ContractBase
from dynamo_trtllm.testing.engine_pool import EnginePool
from dynamo_trtllm.testing.engine_requests import (
    LIMITS,
    collect,
    ended_with,
    prompt_of,
    tokens,
    within,
)
from dynamo_trtllm.testing.stream_record import StreamRecord, is_terminal

_HARMONY_STOPS = (200002, 200012)  # the end of an answer, and of a tool call
# For each field of Sampling that an engine may not support, a value that is not the default.
_VALUES: dict[str, Any] = {
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": ((1, 1.0),),
    "guided": StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),)),
    "seed": 1,
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
}


class GenerationContract(ContractBase):
    """Tests of streams."""

    async def test_generate_twice_gives_same_greedy_tokens(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            request = pool.ask(engine, 40)
            chunks = await collect(engine, request)
            last = chunks[-1]
            found = tokens(chunks)
            assert last.stats is not None, "the last chunk of a stream has stats"
            if request.sampling.ignore_eos:
                assert (len(found), last.finish_reason) == (8, FinishReason.LENGTH), (
                    "an answer with ignore_eos has exactly max_tokens tokens and ends with LENGTH"
                )
            assert len(found) <= 8, "an answer has at most max_tokens tokens"
            info = pool.info(engine)
            assert max(found) < info.vocab_size, "token ids are below vocab_size"
            again = tokens(await collect(engine, request))
            assert again == found, "the greedy answer to a prompt is always the same"
            await pool.check_nothing_left(engine)

    async def test_stream_starts_after_generate_returns_and_ends_once(
        self, pool: EnginePool
    ) -> None:
        engine = pool.open()
        async with pool.started(engine):
            too_long = pool.info(engine).context_length
            bad = pool.ask(engine, 40)
            ids = prompt_of(too_long, vocab_size=pool.info(engine).vocab_size)
            bad = msgspec.structs.replace(bad, token_ids=ids)
            for request in (pool.ask(engine, 40), bad):
                stream = StreamRecord(engine, request)
                await stream.wait_for_end()
                count = len(stream.events)
                stream.handle.cancel()
                await pool.check_nothing_left(engine)
                assert len(stream.events) == count, "no event follows the end of a stream"
                assert not any(is_terminal(event) for event in stream.events[:-1]), (
                    "exactly one event of a stream is terminal, and it is the last one"
                )
            error = stream.events[-1]
            assert isinstance(error, ContextTooLong), (
                f"a prompt of context_length tokens ends with ContextTooLong, not {error!r}"
            )

    async def test_stream_when_cancelled_in_an_event_then_none_follows(
        self, pool: EnginePool
    ) -> None:
        engine = pool.open()
        async with pool.started(engine):
            request = pool.ask(engine, 40, max_tokens=100)
            stream = StreamRecord(engine, request, cancel_at=2)
            await stream.wait_for_events(2)
            stream.handle.cancel()
            await pool.check_nothing_left(engine)
            assert len(stream.events) <= 2, "no event follows a cancel, even one within an event"

    async def test_generate_concurrently_gives_each_its_own_tokens(self, pool: EnginePool) -> None:
        engine = pool.open(**self.accepted(max_batch_size=4))
        async with pool.started(engine):
            requests = [pool.ask(engine, 5 + 25 * n, seed=n) for n in range(6)]
            alone = [tokens(await collect(engine, request)) for request in requests]
            streams = await asyncio.gather(*(collect(engine, request) for request in requests))
            assert [tokens(chunks) for chunks in streams] == alone, (
                "concurrent requests get the same answers as alone"
            )
            await pool.check_nothing_left(engine)

    async def test_generate_resumed_equals_undisturbed_run(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            whole = pool.ask(engine, 70, max_tokens=24)
            undisturbed = tokens(await collect(engine, whole))
            for num_before in (1, len(undisturbed) - 2):
                sampling = msgspec.structs.replace(whole.sampling, max_tokens=24 - num_before)
                rest = msgspec.structs.replace(
                    whole,
                    token_ids=whole.token_ids + token_ids(undisturbed[:num_before]),
                    sampling=sampling,
                    num_resumed_output_tokens=num_before,
                )
                assert tokens(await collect(engine, rest)) == undisturbed[num_before:], (
                    f"a greedy answer that is resumed after {num_before} tokens continues as if it"
                    " had not been interrupted"
                )

    async def test_cancel_when_tokens_flow_then_nothing_left(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            stream = as_stream(engine, pool.ask(engine, 100, max_tokens=500))
            async with aclosing(stream):
                async with within(LIMITS.answer_s, "a running request has a first chunk"):
                    await anext(stream)
            await pool.check_nothing_left(engine)

    async def test_cancel_when_waiting_or_prefilling_then_nothing_left(
        self, pool: EnginePool
    ) -> None:
        engine = pool.open(**self.accepted(max_batch_size=1))
        async with pool.started(engine):
            running = [
                asyncio.create_task(collect(engine, pool.ask(engine, 4000, seed=n, max_tokens=100)))
                for n in range(3)
            ]
            await asyncio.sleep(0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await pool.check_nothing_left(engine)
            answered = tokens(await collect(engine, pool.ask(engine, 10)))
            assert answered, "an engine answers after other requests were cancelled"

    async def test_generate_when_prompt_is_too_long_then_context_too_long(
        self, pool: EnginePool
    ) -> None:
        self.skip_without_settings("max_seq_len")
        engine = pool.open(max_seq_len=64)
        async with pool.started(engine):
            assert pool.info(engine).context_length == 64, "context_length is max_seq_len"
            request = pool.ask(engine, 32)
            ids = prompt_of(64, vocab_size=pool.info(engine).vocab_size)
            error = await ended_with(engine, msgspec.structs.replace(request, token_ids=ids))
            assert isinstance(error, ContextTooLong), (
                f"a prompt of max_seq_len tokens ends with ContextTooLong, not {error!r}"
            )
            await pool.check_nothing_left(engine)

    async def test_generate_waits_when_blocks_are_scarce(self, pool: EnginePool) -> None:
        self.skip_without_settings("kv_cache_blocks")
        engine = pool.open(kv_cache_blocks=6)
        async with pool.started(engine):
            requests = [pool.ask(engine, 60, seed=n) for n in range(6)]
            streams = await asyncio.gather(*(collect(engine, request) for request in requests))
            assert all(tokens(chunks) for chunks in streams), (
                "requests wait for KV blocks, and all are answered"
            )
            await pool.check_nothing_left(engine)

    async def test_bad_request_is_rejected_and_names_its_field(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            info = pool.info(engine)
            good = pool.ask(engine, 10)
            bad = {
                "token_ids": [
                    msgspec.structs.replace(good, token_ids=token_ids()),
                    msgspec.structs.replace(good, token_ids=token_ids([info.vocab_size])),
                ],
            }
            for name in info.unsupported_features:
                if name == "cache_salt":
                    bad[name] = [msgspec.structs.replace(good, cache_salt="salt")]
                elif name != "resumed_tokens":
                    sampling = msgspec.structs.replace(good.sampling, **{name: _VALUES[name]})
                    bad[name] = [msgspec.structs.replace(good, sampling=sampling)]
            for field, requests in bad.items():
                for request in requests:
                    await self._check_rejected(engine, request, field)
            await pool.check_nothing_left(engine)

    async def test_prefill_call_without_transfers_is_rejected(self, pool: EnginePool) -> None:
        if issubclass(pool.engine_class(), TransfersKv):
            pytest.skip(f"{pool.engine_class().__name__} accepts prefill calls")
        engine = pool.open()
        async with pool.started(engine):
            request = msgspec.structs.replace(pool.ask(engine, 10), phase=Phase.PREFILL)
            await self._check_rejected(engine, request, "phase")

    async def _check_rejected(self, engine: Engine, request: GenerateRequest, field: str) -> None:
        error = await ended_with(engine, request)
        assert isinstance(error, RequestRejected), (
            f"a request with a wrong or unsupported {field} ends with RequestRejected, but ended"
            f" with {error!r}"
        )
        assert error.field == field, f"RequestRejected names the field {field}, not {error.field}"

    async def test_stop_tokens_of_the_format_are_accepted(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            info = pool.info(engine)
            ends = _HARMONY_STOPS if info.renderer == "harmony" else info.eos_token_ids
            request = pool.ask(engine, 40, ignore_eos=False, stop_token_ids=ends)
            last = await ended_with(engine, request)
            assert not isinstance(last, RequestRejected), (
                f"chat requests have the stop tokens {ends} of the format in stop_token_ids:"
                f" eos_token_ids contains them, or the engine supports stop_token_ids ({last})"
            )

    async def test_stop_token_ends_the_answer_with_stop(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            if "stop_token_ids" in pool.info(engine).unsupported_features:
                pytest.skip("stop_token_ids is in unsupported_features")
            request = pool.ask(engine, 40)
            undisturbed = tokens(await collect(engine, request))
            end = undisturbed[2]
            sampling = msgspec.structs.replace(request.sampling, stop_token_ids=(end,))
            chunks = await collect(engine, msgspec.structs.replace(request, sampling=sampling))
            until = undisturbed[: undisturbed.index(end)]
            assert chunks[-1].finish_reason is FinishReason.STOP, (
                f"an answer ends with STOP at one of stop_token_ids, not {chunks[-1]}"
            )
            assert tokens(chunks) in (until, [*until, end]), (
                "an answer ends at the first of its stop_token_ids"
            )

    async def test_logprobs_come_with_each_token(self, pool: EnginePool) -> None:
        engine = pool.open()
        async with pool.started(engine):
            if "logprobs" in pool.info(engine).unsupported_features:
                pytest.skip("logprobs is in unsupported_features")
            chunks = await collect(engine, pool.ask(engine, 40, logprobs=2))
            for chunk in chunks:
                ids = [logprob.token_id for logprob in chunk.logprobs]
                assert ids == list(chunk.token_ids), (
                    "with logprobs, a chunk has a log-probability for each of its tokens"
                )
                for logprob in chunk.logprobs:
                    assert logprob.logprob <= 0, "a log-probability is not above 0"
                    assert len(logprob.top) == 2, "`top` has as many alternatives as requested"
