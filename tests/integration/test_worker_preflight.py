"""TensorRT-LLM's rules in real workers, over the stand-in, on real etcd and NATS: refused before
anything loads.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.worker import Worker
from tests.kit.fake_packages import fake_tensorrt_llm
from tests.kit.tiny_models import save_tiny_gpt_oss
from tests.kit.waiting import SOON_S

ARGS: dict[str, Any] = {
    "disable_overlap_scheduler": True,
    "max_batch_size": 8,
    "max_num_tokens": 2048,
    "max_seq_len": 2048,
    "kv_cache_config": {"enable_block_reuse": False, "tokens_per_block": 32},
    "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 2048},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def package() -> Iterator[Any]:
    with fake_tensorrt_llm() as found:
        yield found


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Role]:
    """The roles of the engines that began to load."""
    began: list[Role] = []
    build = TrtllmEngine._build

    def failing(engine: TrtllmEngine) -> Any:
        began.append(engine._facts.role)
        return build(engine)

    monkeypatch.setattr(TrtllmEngine, "_build", failing)
    return began


class Pair:
    """Configurations of workers that share a namespace."""

    def __init__(self, etcd: str, nats: str, folder: Path) -> None:
        self.shared = {
            "etcd_endpoints": etcd,
            "nats_server": nats,
            "namespace": f"t{uuid.uuid4().hex}",
            "model_path": str(folder),
            "engine": "trtllm",
            "drain_timeout_s": 2.0,
        }

    def worker(self, role: Role, **changes: Any) -> Worker:
        given = {**ARGS, **changes}
        return Worker(
            WorkerConfig(**self.shared, disaggregation_mode=role, override_engine_args=given)
        )


@pytest.fixture
def pair(etcd_server: str, nats_server: str, folder: Path) -> Pair:
    return Pair(etcd_server, nats_server, folder)


async def test_serve_with_overlap_at_prefill_is_rejected(pair: Pair, built: list[Role]) -> None:
    with pytest.raises(
        ConfigError, match=r"disable_overlap_scheduler false .*\[overlap-on-prefill\]"
    ):
        await pair.worker(Role.PREFILL, disable_overlap_scheduler=False).serve()
    assert built == []


async def test_serve_when_live_decode_has_other_blocks_then_rejected(
    pair: Pair, built: list[Role], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = {"enable_block_reuse": False, "tokens_per_block": 64}
    decode = pair.worker(Role.DECODE, kv_cache_config=other)
    async with asyncio.timeout(3 * SOON_S):
        serving = asyncio.create_task(decode.serve())
        while "serving as instance" not in caplog.text:  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0.02)
        with pytest.raises(ConfigError) as caught:
            await pair.worker(Role.PREFILL).serve()
        decode.stop()
        await serving
    assert (
        f"layout.block_tokens 32 against decode worker {decode.instance_id:x}: 64"
        in caught.value.message
    )
    assert caught.value.field == "layout.block_tokens"
    assert built == [Role.DECODE]
