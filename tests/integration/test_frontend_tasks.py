"""A frontend's background tasks on real etcd and NATS, in this process: none dies unnoticed."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import InternalError
from dynamo_trtllm.frontend.base import Alone
from dynamo_trtllm.frontend.door import Door
from dynamo_trtllm.frontend.serving import keep_serving
from tests.waiting import SOON_S


@pytest.mark.parametrize("name", ["discovery-watch", "canaries", "pairs", "nats-watch", "plane-nats-writer"])
async def test_frontend_when_a_background_task_dies_then_it_ends_and_says_which(
    etcd_server: str, nats_server: str, name: str
) -> None:
    config = FrontendConfig(etcd_endpoints=etcd_server, nats_server=nats_server, namespace=f"t{uuid.uuid4().hex}")
    serving = asyncio.create_task(keep_serving(config, Door(), Alone()))
    async with asyncio.timeout(SOON_S):
        while not (found := [t for t in asyncio.all_tasks() if t.get_name() == name]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        found[0].cancel()
        with pytest.raises(InternalError, match=f"background task {name} failed"):
            await serving
