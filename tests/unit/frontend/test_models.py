"""Which models a frontend serves: discovery is its in-process twin, files come over the in-process plane."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

from dynamo_trtllm import codec
from dynamo_trtllm.discovery.base import Registration
from dynamo_trtllm.discovery.memory import MemoryDiscovery
from dynamo_trtllm.engine.base import EngineInfo
from dynamo_trtllm.errors import EngineNotReady, ModelNotFound
from dynamo_trtllm.frontend import models as models_module
from dynamo_trtllm.frontend.models import Models
from dynamo_trtllm.messages import (
    Chunk,
    Control,
    Conversation,
    FilePiece,
    FileRequest,
    GenerateRequest,
    Message,
    ModelCard,
    Role,
)
from dynamo_trtllm.observe.metrics import WorkerMetrics
from dynamo_trtllm.plane.base import Service
from dynamo_trtllm.plane.inproc import InprocPlane
from dynamo_trtllm.render.harmony import HarmonyRenderer
from dynamo_trtllm.router.view import ClusterView
from dynamo_trtllm.worker.admission import Admission, AdmissionLimits
from dynamo_trtllm.worker.service import PIECE_BYTES, WorkerService, digest
from tests.instances import CARD, make_instance
from tests.waiting import SOON_S

HARMONY = ModelCard(name="oss", context_length=128, vocab_size=32, eos_token_ids=(2,), renderer="harmony")
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


class NoEngine:
    """Computes nothing: these workers only give files."""

    async def start(self) -> EngineInfo:
        raise AssertionError("a worker of these tests was asked for more than files")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("a worker of these tests was asked for more than files")
        yield Chunk()

    async def check(self) -> None:
        raise AssertionError("a worker of these tests was asked for more than files")

    async def drain(self) -> None:
        raise AssertionError("a worker of these tests was asked for more than files")

    async def aclose(self) -> None:
        raise AssertionError("a worker of these tests was asked for more than files")


class Holder:
    """A worker's service that notes which pieces were asked for, and may garble what it gives."""

    def __init__(self, files: Mapping[str, Path], *, garbled: bool = False) -> None:
        instance = make_instance(1, role=Role.AGGREGATED)
        self._service = WorkerService(
            NoEngine(), instance, Admission(AdmissionLimits(), time.time), files=files, metrics=WorkerMetrics()
        )
        self.garbled = garbled
        self.asked: list[FileRequest] = []

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._service.generate(request)

    async def control(self, verb: Control) -> bytes:
        assert isinstance(verb, FileRequest)
        self.asked.append(verb)
        reply = await self._service.control(verb)
        if not self.garbled:
            return reply
        piece = codec.decode(reply, FilePiece)
        return codec.encode(FilePiece(data=b"?" * len(piece.data), total_bytes=piece.total_bytes))


class Frontend:
    """`Models` over the twins, watching."""

    def __init__(self) -> None:
        self.plane = InprocPlane()
        self.discovery = MemoryDiscovery()
        self.models = Models(ClusterView(), self.discovery, self.plane, "dynamo")
        self.watching = asyncio.create_task(self.models.watch())

    async def add(
        self, instance_id: int, card: ModelCard, role: Role = Role.AGGREGATED, service: Service | None = None
    ) -> Registration:
        instance = msgspec.structs.replace(make_instance(instance_id, role=role), card=card)
        if service is not None:
            await self.plane.serve(instance.subject, service)
        return await self.discovery.register(instance)

    async def aclose(self) -> None:
        self.watching.cancel()
        with suppress(asyncio.CancelledError):
            await self.watching
        await self.models.aclose()
        await self.discovery.aclose()
        await self.plane.aclose()


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    before = asyncio.all_tasks()
    frontend = Frontend()
    yield frontend
    await frontend.aclose()
    assert asyncio.all_tasks() - before - {asyncio.current_task()} == set()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What a chat_template renderer is made of; the template takes three pieces on its way."""
    tokenizer = tokenizers.Tokenizer(tokenizer_models.WordLevel({"<unk>": 0, "the": 1, "fox": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    contents = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({}),
        "chat_template.jinja": "{# " + "x" * (2 * PIECE_BYTES) + " #}" + TEMPLATE,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name: tmp_path / name for name in contents}


def card_of(files: Mapping[str, Path]) -> ModelCard:
    return msgspec.structs.replace(CARD, files={name: digest(path) for name, path in files.items()})


def by_hash(files: Mapping[str, Path]) -> dict[str, Path]:
    return {digest(path): path for path in files.values()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - what is awaited is a result, which has no event
            await asyncio.sleep(0.002)


async def served(frontend: Frontend, name: str) -> None:
    await until(lambda: name in frontend.models.names())


def prompt_ids(frontend: Frontend) -> list[int]:
    conversation = Conversation(messages=(Message(role="user", content="the fox"),))
    return list(frontend.models.get("tiny").renderer.render(conversation))


async def test_watch_when_a_harmony_worker_is_up_then_its_model_is_served(frontend: Frontend) -> None:
    await frontend.add(1, HARMONY)
    await served(frontend, "oss")
    assert frontend.models.get("oss").card == HARMONY
    assert isinstance(frontend.models.get("oss").renderer, HarmonyRenderer)
    assert frontend.models.lacking("oss") is None
    assert [instance.id for instance in frontend.models.instances()] == [1]


async def test_watch_when_discovery_has_told_all_then_synced_is_set(frontend: Frontend) -> None:
    await asyncio.wait_for(frontend.models.synced.wait(), SOON_S)


async def test_settled_when_workers_were_there_at_the_start_then_their_models_are_served() -> None:
    plane, discovery = InprocPlane(), MemoryDiscovery()
    instance = msgspec.structs.replace(make_instance(1, role=Role.AGGREGATED), card=HARMONY)
    await discovery.register(instance)
    models = Models(ClusterView(), discovery, plane, "dynamo")
    watching = asyncio.create_task(models.watch())
    await asyncio.wait_for(models.settled(), SOON_S)
    assert models.names() == ["oss"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await models.aclose()
    await discovery.aclose()
    await plane.aclose()


async def test_settled_when_no_worker_was_there_then_at_once(frontend: Frontend) -> None:
    await asyncio.wait_for(frontend.models.settled(), SOON_S)
    assert frontend.models.names() == []


async def test_load_when_a_file_is_larger_than_a_piece_then_it_is_fetched_in_pieces(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    holder = Holder(by_hash(files))
    await frontend.add(1, card_of(files), service=holder)
    await served(frontend, "tiny")
    template = digest(files["chat_template.jinja"])
    offsets = [verb.offset for verb in holder.asked if verb.sha256 == template]
    assert offsets == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    assert prompt_ids(frontend) == [1, 2]


async def test_load_when_a_holder_gives_another_content_then_the_next_one_is_asked(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    bad, good = Holder(by_hash(files), garbled=True), Holder(by_hash(files))
    await frontend.plane.serve(make_instance(2).subject, good)
    await frontend.add(1, card_of(files), service=bad)
    await frontend.add(2, card_of(files), Role.DECODE)
    await served(frontend, "tiny")
    assert {verb.sha256 for verb in bad.asked} == {verb.sha256 for verb in good.asked} == set(by_hash(files))
    assert prompt_ids(frontend) == [1, 2]


async def test_load_when_nobody_gives_the_right_content_then_it_is_tried_again_and_not_served_before(
    frontend: Frontend, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models_module, "_RETRY_S", 0.001)
    holder = Holder(by_hash(files), garbled=True)
    await frontend.add(1, card_of(files), service=holder)
    first = digest(files["tokenizer.json"])
    await until(lambda: [verb.sha256 for verb in holder.asked].count(first) >= 3)
    assert frontend.models.names() == []
    assert len([r for r in caplog.records if "can't be served" in r.message]) == 1  # not once per attempt
    holder.garbled = False
    await served(frontend, "tiny")


async def test_load_when_the_card_changes_then_the_new_one_is_served(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    old = await frontend.add(1, HARMONY)
    await served(frontend, "oss")
    longer = msgspec.structs.replace(HARMONY, context_length=256)
    await old.aclose()
    await frontend.add(2, longer)
    await until(lambda: frontend.models.get("oss").card == longer)


async def test_watch_when_cards_of_a_model_differ_then_it_is_said_and_the_first_counts(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.add(1, HARMONY)
    await frontend.add(2, msgspec.structs.replace(HARMONY, tool_call_parser="harmony"))
    await until(lambda: len(frontend.models.instances()) == 2)
    await served(frontend, "oss")
    assert frontend.models.get("oss").card == HARMONY
    assert [r.getMessage() for r in caplog.records if "differs" in r.message] == [
        "instance 2 of model oss differs from the card in use in tool_call_parser: start all workers of a model with "
        "the same model and parser flags"
    ]


async def test_watch_when_only_prefill_has_less_context_then_nothing_is_said(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.add(1, msgspec.structs.replace(HARMONY, context_length=64), Role.PREFILL)
    await frontend.add(2, HARMONY, Role.DECODE)
    await frontend.add(3, msgspec.structs.replace(HARMONY, context_length=64), Role.PREFILL)
    await served(frontend, "oss")
    await until(lambda: frontend.models.get("oss").card == HARMONY)
    assert [r.getMessage() for r in caplog.records if "differs" in r.message] == []


async def test_get_when_a_model_is_unknown_then_the_error_names_what_is_served(frontend: Frontend) -> None:
    with pytest.raises(ModelNotFound, match="'nope' is not served here; served: none yet"):
        frontend.models.get("nope")
    await frontend.add(1, HARMONY)
    await served(frontend, "oss")
    with pytest.raises(ModelNotFound, match="served: oss") as caught:
        frontend.models.get("nope")
    assert caught.value.field == "model"


async def test_get_when_the_model_is_still_being_loaded_then_come_back_later(frontend: Frontend) -> None:
    absent = msgspec.structs.replace(CARD, files={"tokenizer.json": hashlib.sha256(b"x").hexdigest()})
    await frontend.add(1, absent)  # nobody gives the file
    await until(lambda: len(frontend.models.instances()) == 1)
    with pytest.raises(EngineNotReady, match="still loading"):
        frontend.models.get("tiny")


async def test_watch_when_workers_leave_then_the_model_stays_known_with_missing_roles(frontend: Frontend) -> None:
    prefill = await frontend.add(1, HARMONY, Role.PREFILL)
    decode = await frontend.add(2, HARMONY, Role.DECODE)
    await served(frontend, "oss")
    await until(lambda: frontend.models.lacking("oss") is None)
    await decode.aclose()
    await until(lambda: frontend.models.lacking("oss") == "model oss has no decode worker")
    await prefill.aclose()
    await until(lambda: frontend.models.lacking("oss") == "model oss has no prefill worker and no decode worker")
    assert frontend.models.get("oss").card == HARMONY
    assert frontend.models.instances() == []


async def test_aclose_when_a_model_is_loading_then_no_task_is_left(frontend: Frontend) -> None:
    missing = hashlib.sha256(b"missing").hexdigest()
    await frontend.add(1, msgspec.structs.replace(CARD, files={"tokenizer.json": missing}))  # nobody listens there
    await until(lambda: any(task.get_name() == "load tiny" for task in asyncio.all_tasks()))
    await frontend.models.aclose()
    assert not any(task.get_name() == "load tiny" for task in asyncio.all_tasks())


async def test_lacking_when_the_request_plane_is_away_then_no_model_is_ready_and_it_says_why(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await frontend.add(1, CARD)
    async with asyncio.timeout(SOON_S):
        while not frontend.models.instances():  # noqa: ASYNC110 - the watch puts it there
            await asyncio.sleep(0.005)
    assert frontend.models.lacking(CARD.name) is None
    monkeypatch.setattr(frontend.plane, "outage", lambda: "no connection to NATS")
    assert frontend.models.lacking(CARD.name) == "no connection to NATS"
