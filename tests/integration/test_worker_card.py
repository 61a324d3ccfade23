"""What a worker puts on its card and tells the frontends: the parsers of its model, and what its
engine refuses.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import Any

import pytest

from dynamo_trtllm.cluster.discovery.discovery_interface import Added
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import ModelDeploymentCard
from dynamo_trtllm.worker import Worker
from tests.kit.waiting import SOON_S


def config(etcd: str, nats: str, **flags: Any) -> WorkerConfig:
    namespace = f"t{uuid.uuid4().hex}"
    return WorkerConfig(
        model_path="tiny",
        engine="mock",
        namespace=namespace,
        etcd_endpoints=etcd,
        nats_server=nats,
        **flags,
    )


async def registered_card(chosen: WorkerConfig) -> ModelDeploymentCard:
    worker = Worker(chosen)
    discovery = EtcdDiscovery(chosen)
    try:
        async with asyncio.timeout(3 * SOON_S), asyncio.TaskGroup() as group:
            group.create_task(worker.serve())
            async with aclosing(discovery.watch(chosen.namespace)) as events:
                async for event in events:
                    if isinstance(event, Added):
                        worker.stop()
                        return event.instance.card
    finally:
        await discovery.aclose()
    raise AssertionError("the watch ended")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("gpt_oss", "harmony")),
        ({"dyn_reasoning_parser": "none"}, ("none", "harmony")),
        ({"dyn_tool_call_parser": "none"}, ("gpt_oss", "none")),
    ],
    ids=str,
)
async def test_serve_when_parsers_are_chosen_then_the_card_says_which(
    etcd_server: str, nats_server: str, flags: dict[str, str], expected: tuple[str, str]
) -> None:
    card = await registered_card(config(etcd_server, nats_server, **flags))
    assert (card.reasoning_parser, card.tool_call_parser) == expected


async def test_serve_with_parser_of_another_format_never_starts(
    etcd_server: str, nats_server: str
) -> None:
    worker = Worker(config(etcd_server, nats_server, dyn_reasoning_parser="basic"))
    with pytest.raises(
        ConfigError,
        match="--dyn-reasoning-parser basic does not fit this model, which uses the Harmony format",
    ):
        async with asyncio.timeout(3 * SOON_S):
            await worker.serve()


async def test_serve_with_bad_model_name_fails_first() -> None:
    worker = Worker(config("localhost:1", "nats://localhost:1", served_model_name="x" * 257))
    with pytest.raises(ConfigError, match=r"has 257 characters.*--served-model-name"):
        await worker.serve()
