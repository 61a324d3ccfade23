"""KV transfers of engines around a library: what is on them, which are taken, and when the KV is given
up.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.external.external_transfers import (
    EngineState,
    ExternalTransfers,
    decode_state,
)
from dynamo_trtllm.kv_transfer.transfer_backend import TransferIdentity
from dynamo_trtllm.protocol.errors import RequestRejected, TransferExpired, TransferMismatch
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvLayout,
    KvTransferParams,
    Phase,
    ReleaseOutcome,
    Sampling,
    TokenLogprob,
    encode,
    token_ids,
)

LAYOUT = KvLayout(dtype="bfloat16", block_tokens=16, num_layers=2, num_kv_heads=2, head_dim=8)
TERMS = TransferIdentity("vllm", 5, "m", LAYOUT, {"release": "1"}, transport="a/b")


class Form(EngineState, frozen=True, kw_only=True):
    number: int


class Book(ExternalTransfers):
    def __init__(self, ttl_s: float = 60.0) -> None:
        self.changes = 0
        self.given_up = asyncio.Event()
        self.has_expired = False
        self.kept_until: float | None = None
        super().__init__(TERMS, ttl_s=ttl_s, on_change=self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def release_call(self, *, has_expired: bool) -> float | None:
        self.has_expired = has_expired
        self.given_up.set()
        return self.kept_until

    def written(self, engine_state: bytes = b"") -> KvTransferParams:
        call: Any = SimpleNamespace(release_kv=self.release_call)
        first = Chunk(token_ids=token_ids([7]), logprobs=(TokenLogprob(7, -0.5),))
        return self.create(request(), call, first, engine_state)


def request(prompt: int = 40, kv_params: KvTransferParams | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=token_ids(range(prompt)),
        sampling=Sampling(max_tokens=8),
        deadline=time.time() + 60,
        phase=Phase.DECODE if kv_params else Phase.PREFILL,
        kv_params=kv_params,
    )


async def test_transfer_ids_cannot_be_guessed() -> None:
    random_parts: list[str] = []
    for _ in range(2):
        # A worker that starts again does not repeat its ids.
        book = Book()
        transfer_ids = [book.written().transfer_id for _ in range(10)]
        book.close()
        random_parts += [transfer_id.removeprefix("5-") for transfer_id in transfer_ids]
    assert len(set(random_parts)) == 20
    assert {len(bytes.fromhex(part)) for part in random_parts} == {16}


async def test_transfer_is_held_until_fetched() -> None:
    book = Book()
    first = book.written()
    second = book.written()
    assert first.transfer_id != second.transfer_id
    assert (first.engine, first.prefill_instance_id, first.transport) == ("vllm", 5, "a/b")
    assert (list(first.first_token_ids), first.first_logprobs) == ([7], (TokenLogprob(7, -0.5),))
    assert first.kv_bytes == 3 * 16 * 2 * 2 * 2 * 8 * 2
    assert 0 < first.expires_at - time.time() <= 60
    assert (len(book), book.kv_blocks) == (2, 6)
    for kv_params in (first, first, second):
        book.release(kv_params.transfer_id, ReleaseOutcome.FETCHED)
    assert (len(book), book.kv_blocks, book.changes) == (0, 0, 4)
    assert not book.given_up.is_set()


async def test_transfer_when_it_is_not_fetched_then_the_kv_is_given_up() -> None:
    book = Book(ttl_s=0.01)
    book.written()
    async with asyncio.timeout(10):
        await book.given_up.wait()
    assert len(book) == 0
    assert book.has_expired


async def test_transfer_is_held_until_the_library_frees_its_kv() -> None:
    book = Book()
    book.kept_until = time.monotonic() + 0.05
    book.release(book.written().transfer_id, ReleaseOutcome.ABORTED)
    assert (len(book), book.kv_blocks, book.leaked_kv_blocks, book.changes) == (1, 3, 0, 3)
    async with asyncio.timeout(10):
        while len(book):  # noqa: ASYNC110 - a timer changes it
            await asyncio.sleep(0.01)
    assert (book.kv_blocks, book.changes) == (0, 4)


async def test_transfer_never_freed_by_the_library_is_leaked() -> None:
    book = Book()
    book.kept_until = math.inf
    book.release(book.written().transfer_id, ReleaseOutcome.ABORTED)
    book.release(book.written().transfer_id, ReleaseOutcome.FETCHED)
    assert (len(book), book.kv_blocks, book.leaked_kv_blocks) == (0, 0, 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"engine": "trtllm"}, "engine"),
        ({"model": "n"}, "model"),
        ({"kv_compat": {"release": "2"}}, "release"),
        ({"prompt_tokens": 41}, "prompt_tokens"),
        ({"first_token_ids": token_ids()}, "first_token_ids"),
    ],
)
async def test_transfer_that_does_not_fit_names_the_difference(
    change: dict[str, Any], field: str
) -> None:
    book = Book()
    kv_params = book.written()
    assert book.validate(request(kv_params=kv_params)) is kv_params
    with pytest.raises(TransferMismatch) as caught:
        book.validate(request(kv_params=msgspec.structs.replace(kv_params, **change)))
    assert caught.value.field == field
    book.close()


async def test_transfer_when_late_or_not_there_then_said() -> None:
    book = Book()
    late = msgspec.structs.replace(book.written(), expires_at=time.time() - 1)
    with pytest.raises(TransferExpired):
        book.validate(request(kv_params=late))
    with pytest.raises(RequestRejected, match="needs KV transfer parameters"):
        book.validate(request())
    book.close()


async def test_opaque_of_another_form_or_version_is_a_mismatch() -> None:
    book = Book()
    form = Form(version=3, release="1.2", number=4)
    kv_params = book.written(encode(form))
    assert decode_state(kv_params, Form, 3) == form
    with pytest.raises(TransferMismatch, match="3 at prefill and 4 at decode") as caught:
        decode_state(kv_params, Form, 4)
    assert caught.value.field == "opaque.version"
    with pytest.raises(TransferMismatch, match="its engine state can't be decoded"):
        decode_state(book.written(encode({"version": 3})), Form, 3)
    book.close()
