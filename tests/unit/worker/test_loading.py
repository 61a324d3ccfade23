"""Before and while an engine loads: which peers are read, what stops the start, what is
reported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cluster.discovery.memory import InstanceRecords, MemoryDiscovery
from dynamo_trtllm.engines.capabilities import ReportsProgress, RunsPreflight
from dynamo_trtllm.engines.engine_interface import EngineInfo, Finding
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, Instance, Limits, Role
from dynamo_trtllm.worker import startup
from dynamo_trtllm.worker.health import Health
from dynamo_trtllm.worker.timing import WorkerTiming
from tests.kit.generator_streams import ChunkEngine
from tests.kit.instances import LAYOUT, make_instance
from tests.kit.waiting import SOON_S

INFO = EngineInfo(
    engine="mock",
    context_length=8,
    vocab_size=8,
    eos_token_ids=(),
    renderer="chat_template",
    files={"tokenizer.json": Path("tokenizer.json")},
    layout=LAYOUT,
    limits=Limits(),
)


class Judging(ChunkEngine, RunsPreflight, ReportsProgress):
    """An engine with preflight findings. It records its calls, and loads until `ready` is set."""

    def __init__(self, *severities: str) -> None:
        self.severities = severities
        self.seen: Sequence[Instance] = ()
        self.stage = ""
        self.ready = asyncio.Event()
        self.failure: EngineFailed | None = None

    def preflight(self, peers: Sequence[Instance]) -> list[Finding]:
        self.seen = peers
        return [finding(severity, number) for number, severity in enumerate(self.severities)]

    def progress(self) -> str:
        return self.stage

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("no test sends a request")
        yield Chunk()

    async def start(self) -> EngineInfo:
        await self.ready.wait()
        if self.failure is not None:
            raise self.failure
        return INFO


def finding(severity: Any, number: int) -> Finding:
    return Finding(
        severity=severity,
        rule=f"rule-{number}",
        field=f"field_{number}",
        value="1 (YAML file p.yaml)",
        other="2",
        why="one is not two",
        fix="set it to 2",
    )


async def peers_of(role: Role, **fields: Any) -> list[int]:
    discovery = MemoryDiscovery(InstanceRecords())
    for number, (kind, namespace) in enumerate(
        [
            (Role.PREFILL, "dynamo"),
            (Role.DECODE, "dynamo"),
            (Role.AGGREGATED, "dynamo"),
            (Role.DECODE, "blue"),
        ]
    ):
        await discovery.register(make_instance(number, role=kind, namespace=namespace))
    asked = {"model": "tiny", **fields}
    found = await startup.live_peers(discovery, "dynamo", role=role, **asked)
    await discovery.aclose()
    return [peer.id for peer in found]


@pytest.mark.parametrize(
    ("role", "ids"), [(Role.PREFILL, [1]), (Role.DECODE, [0]), (Role.AGGREGATED, [])]
)
async def test_live_peers_are_of_the_other_role(role: Role, ids: list[int]) -> None:
    assert await peers_of(role) == ids


async def test_live_peers_when_they_serve_another_model_then_none() -> None:
    assert await peers_of(Role.PREFILL, model="large") == []


async def test_preflight_without_error_passes_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine: Any = Judging("warning", "note")
    peers = [make_instance(7)]
    await startup.preflight(engine, peers)
    assert engine.seen == peers
    assert [(record.levelname, record.message.split(": ")[1]) for record in caplog.records] == [
        ("WARNING", "warning"),
        ("INFO", "note"),
    ]
    assert (
        "field_0 1 (YAML file p.yaml) against 2: one is not two; set it to 2 [rule-0]"
        in caplog.text
    )


async def test_preflight_error_names_field_values_and_fix(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = Judging("note", "error", "error")
    with pytest.raises(ConfigError) as caught:
        await startup.preflight(engine, [])
    assert caught.value.field == "field_1"
    assert (
        caught.value.message
        == "preflight: field_1 1 (YAML file p.yaml) against 2: one is not two; set it to 2"
        " [rule-1] "
        "(and 1 more, see the log)"
    )
    assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == [
        "ERROR",
        "ERROR",
    ]


POLLS_FAST = WorkerTiming(loading_poll_s=0.005)


async def test_start_shows_each_stage_in_health(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine: Any = Judging()
    health = Health(phase="loading")
    engine.stage = "weights"
    starting = asyncio.create_task(startup.start_engine(engine, health, POLLS_FAST))
    await until(health, "weights")
    engine.stage = "graphs"
    await until(health, "graphs")
    engine.ready.set()
    assert await starting is INFO
    assert health.reason == ""
    said = [
        record.message.split(": ")[1]
        for record in caplog.records
        if "loading for" in record.message
    ]
    assert said == ["weights", "graphs"]


async def test_start_when_a_stage_lasts_then_it_is_said_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine: Any = Judging()
    engine.stage = "weights"
    timing = dataclasses.replace(POLLS_FAST, loading_log_s=0.01)
    starting = asyncio.create_task(startup.start_engine(engine, Health(), timing))
    async with asyncio.timeout(SOON_S):
        while caplog.text.count("weights") < 3:  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0.005)
    engine.ready.set()
    await starting


async def test_start_failure_clears_health() -> None:
    engine: Any = Judging()
    engine.failure = EngineFailed("no memory")
    engine.stage = "weights"
    engine.ready.set()
    health = Health()
    with pytest.raises(EngineFailed, match="no memory"):
        await startup.start_engine(engine, health)
    assert health.reason == ""


async def test_start_when_cancelled_then_the_engines_start_ends_too() -> None:
    engine: Any = Judging()
    starting = asyncio.create_task(startup.start_engine(engine, Health()))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "engine-start"]


async def until(health: Health, reason: str) -> None:
    async with asyncio.timeout(SOON_S):
        while health.reason != reason:  # noqa: ASYNC110  # health has no event
            await asyncio.sleep(0.002)
