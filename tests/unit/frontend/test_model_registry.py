"""Which models a frontend serves: discovery is in memory, files come over the in-process plane."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.cluster.discovery.memory import MemoryDiscovery
from dynamo_trtllm.cluster.discovery.records import endpoint_of, instance_key
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry, RegistryTiming
from dynamo_trtllm.frontend.tokenization.conversation import Conversation, Message
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.protocol.errors import EngineNotReady, ModelNotFound
from dynamo_trtllm.protocol.messages import Role, encode
from dynamo_trtllm.worker.card import FILE_CHUNK_BYTES, digest
from tests.kit.instances import CARD, make_instance
from tests.kit.model_registry import (
    HARMONY,
    FileService,
    Frontend,
    by_hash,
    card_of,
    until,
    wait_served,
)
from tests.kit.waiting import SOON_S


def prompt_ids(frontend: Frontend) -> list[int]:
    conversation = Conversation(messages=(Message(role="user", content="the fox"),))
    return list(frontend.models.get("tiny").renderer.render(conversation))


async def test_watch_serves_the_model_of_a_harmony_worker(frontend: Frontend) -> None:
    await frontend.add(1, HARMONY)
    await wait_served(frontend, "oss")
    assert frontend.models.get("oss").card == HARMONY
    assert isinstance(frontend.models.get("oss").renderer, HarmonyRenderer)
    assert frontend.models.not_ready_reason("oss") is None
    assert [instance.id for instance in frontend.models.instances()] == [1]


@pytest.mark.parametrize(
    ("is_wanted", "registry_timing"),
    [
        (False, RegistryTiming(preload_after_s=0.001)),
        (True, RegistryTiming(preload_after_s=3600.0)),
    ],
)
async def test_watch_loads_rest_of_renderer_in_a_thread(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        HarmonyRenderer, "preload", lambda renderer: threads.append(threading.current_thread())
    )
    await frontend.add(1, HARMONY)
    if is_wanted:
        await wait_served(frontend, "oss")
        frontend.models.preload("oss")
    await until(lambda: bool(threads))
    assert threads != [threading.current_thread()]


async def test_watch_logs_a_role_without_workers(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def said(part: str) -> int:
        return sum(part in record.getMessage() for record in caplog.records)

    prefill = await frontend.add(1, HARMONY, role=Role.PREFILL)
    await wait_served(frontend, "oss")
    assert said("model oss is loaded, but not available yet: model oss has no decode worker") == 1
    assert said("is ready") == 0
    await frontend.add(2, HARMONY, role=Role.DECODE)
    await until(lambda: said("model oss is ready") == 1)
    await frontend.add(3, HARMONY, role=Role.DECODE)
    await until(lambda: len(frontend.models.instances()) == 3)
    assert said("model oss is ready") == 1
    await prefill.aclose()
    await until(
        lambda: said("model oss is not available any more: model oss has no prefill worker") == 1
    )


async def test_watch_when_discovery_has_listed_all_then_synced_is_set(frontend: Frontend) -> None:
    await asyncio.wait_for(frontend.models.synced.wait(), SOON_S)


async def test_settled_serves_models_of_early_workers() -> None:
    plane = InprocPlane()
    discovery = MemoryDiscovery()
    instance = msgspec.structs.replace(make_instance(1, role=Role.AGGREGATED), card=HARMONY)
    await discovery.register(instance)
    models = ModelRegistry(ClusterView(), discovery, plane, "dynamo")
    watching = asyncio.create_task(models.watch())
    await asyncio.wait_for(models.wait_until_loaded(), SOON_S)
    assert models.names() == ["oss"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await models.aclose()
    await discovery.aclose()
    await plane.aclose()


async def test_settled_when_no_worker_was_there_then_at_once(frontend: Frontend) -> None:
    await asyncio.wait_for(frontend.models.wait_until_loaded(), SOON_S)
    assert frontend.models.names() == []


async def test_load_fetches_a_large_file_in_pieces(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    holder = FileService(by_hash(files))
    await frontend.add(1, card_of(files), service=holder)
    await wait_served(frontend, "tiny")
    template = digest(files["chat_template.jinja"])
    offsets = [verb.offset for verb in holder.asked if verb.sha256 == template]
    assert offsets == [0, FILE_CHUNK_BYTES, 2 * FILE_CHUNK_BYTES]
    assert prompt_ids(frontend) == [1, 2]


async def test_load_of_wrong_content_asks_the_next_holder(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    bad = FileService(by_hash(files), garbled=True)
    good = FileService(by_hash(files))
    await frontend.plane.serve(make_instance(2).subject, good)
    await frontend.add(1, card_of(files), service=bad)
    await frontend.add(2, card_of(files), Role.DECODE)
    await wait_served(frontend, "tiny")
    assert (
        {verb.sha256 for verb in bad.asked}
        == {verb.sha256 for verb in good.asked}
        == set(by_hash(files))
    )
    assert prompt_ids(frontend) == [1, 2]


async def test_load_without_right_content_is_retried(
    frontend: Frontend, files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    holder = FileService(by_hash(files), garbled=True)
    await frontend.add(1, card_of(files), service=holder)
    first = digest(files["tokenizer.json"])
    await until(lambda: [verb.sha256 for verb in holder.asked].count(first) >= 3)
    assert frontend.models.names() == []
    # not once per attempt
    assert len([r for r in caplog.records if "cannot be loaded" in r.message]) == 1
    holder.garbled = False
    await wait_served(frontend, "tiny")


async def test_load_when_the_card_changes_then_the_new_one_is_served(
    frontend: Frontend, files: dict[str, Path]
) -> None:
    old = await frontend.add(1, HARMONY)
    await wait_served(frontend, "oss")
    longer = msgspec.structs.replace(HARMONY, context_length=256)
    await old.aclose()
    await frontend.add(2, longer)
    await until(lambda: frontend.models.get("oss").card == longer)


async def test_watch_logs_different_cards_and_uses_the_first(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.add(1, HARMONY)
    await frontend.add(2, msgspec.structs.replace(HARMONY, tool_call_parser="harmony"))
    await until(lambda: len(frontend.models.instances()) == 2)
    await wait_served(frontend, "oss")
    assert frontend.models.get("oss").card == HARMONY
    assert [r.getMessage() for r in caplog.records if "differs" in r.message] == [
        "worker 2 of model oss differs from the card in use in tool_call_parser; start all its"
        " workers with the same flags"
    ]


async def test_watch_ignores_shorter_context_of_prefill(
    frontend: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    await frontend.add(1, msgspec.structs.replace(HARMONY, context_length=64), Role.PREFILL)
    await frontend.add(2, HARMONY, Role.DECODE)
    await frontend.add(3, msgspec.structs.replace(HARMONY, context_length=64), Role.PREFILL)
    await wait_served(frontend, "oss")
    await until(lambda: frontend.models.get("oss").card == HARMONY)
    assert [r.getMessage() for r in caplog.records if "differs" in r.message] == []


async def test_get_unknown_model_names_the_served_ones(frontend: Frontend) -> None:
    with pytest.raises(ModelNotFound, match="'nope' not found; available models: none yet"):
        frontend.models.get("nope")
    await frontend.add(1, HARMONY)
    await wait_served(frontend, "oss")
    with pytest.raises(ModelNotFound, match="available models: oss") as caught:
        frontend.models.get("nope")
    assert caught.value.field == "model"


async def test_get_loading_model_is_retryable(frontend: Frontend) -> None:
    absent = msgspec.structs.replace(
        CARD, files={"tokenizer.json": hashlib.sha256(b"x").hexdigest()}
    )
    await frontend.add(1, absent)  # no worker gives the file
    await until(lambda: len(frontend.models.instances()) == 1)
    with pytest.raises(EngineNotReady, match="still loading"):
        frontend.models.get("tiny")


async def test_watch_keeps_a_model_with_missing_roles(frontend: Frontend) -> None:
    prefill = await frontend.add(1, HARMONY, Role.PREFILL)
    decode = await frontend.add(2, HARMONY, Role.DECODE)
    await wait_served(frontend, "oss")
    await until(lambda: frontend.models.not_ready_reason("oss") is None)
    await decode.aclose()
    await until(lambda: frontend.models.not_ready_reason("oss") == "model oss has no decode worker")
    await prefill.aclose()
    await until(
        lambda: (
            frontend.models.not_ready_reason("oss")
            == "model oss has no prefill worker and no decode worker"
        )
    )
    assert frontend.models.get("oss").card == HARMONY
    assert frontend.models.instances() == []


async def test_aclose_when_a_model_is_loading_then_no_task_is_left(frontend: Frontend) -> None:
    missing = hashlib.sha256(b"missing").hexdigest()
    # no worker listens there
    await frontend.add(1, msgspec.structs.replace(CARD, files={"tokenizer.json": missing}))
    await until(lambda: any(task.get_name() == "load tiny" for task in asyncio.all_tasks()))
    await frontend.models.aclose()
    assert not any(task.get_name() == "load tiny" for task in asyncio.all_tasks())


async def test_readiness_lists_rejected_records(frontend: Frontend) -> None:
    instance = make_instance(1)
    key = instance_key(endpoint_of(instance), 1)
    frontend.store.put(key, b"garbage")
    await until(lambda: bool(frontend.models.readiness(100)["rejected_records"]))
    (row,) = frontend.models.readiness(100)["rejected_records"]
    assert row["key"] == key
    assert row["reason"].startswith("the record can't be read: ")
    assert frontend.models.instances() == []
    frontend.store.put(key, encode(instance))
    await until(lambda: len(frontend.models.instances()) == 1)
    assert frontend.models.readiness(100)["rejected_records"] == []


async def test_readiness_without_request_plane_says_why(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await frontend.add(1, CARD)
    async with asyncio.timeout(SOON_S):
        while not frontend.models.instances():  # noqa: ASYNC110 - the watch puts it there
            await asyncio.sleep(0.005)
    assert frontend.models.not_ready_reason(CARD.name) is None
    monkeypatch.setattr(frontend.plane, "unavailable_reason", lambda: "no connection to NATS")
    assert frontend.models.not_ready_reason(CARD.name) == "no connection to NATS"
