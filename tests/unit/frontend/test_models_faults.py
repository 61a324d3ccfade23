"""What a worker's files may do to the frontend that loads them: cost that model, and nothing
else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from dynamo_trtllm.frontend.routing import model_registry as models_module
from dynamo_trtllm.frontend.routing.model_registry import MAX_FILES_BYTES, RegistryTiming
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.protocol.errors import EngineNotReady
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FileChunk,
    GenerateRequest,
    GetFile,
    ModelDeploymentCard,
    Role,
    encode,
)
from tests.kit.generator_streams import ChunkSource
from tests.kit.model_registry import (
    HARMONY,
    FileService,
    Frontend,
    by_hash,
    card_of,
    until,
    wait_served,
)


class Sizes(ChunkSource):
    """A worker's service that answers each request for a file with what `piece` makes of its
    offset.
    """

    def __init__(self, piece: Callable[[int], FileChunk]) -> None:
        self._piece = piece
        self.offsets: list[int] = []

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("a worker of these tests was asked for more than files")
        yield Chunk()

    async def control(self, verb: Control) -> bytes:
        assert isinstance(verb, GetFile)
        self.offsets.append(verb.offset)
        return encode(self._piece(verb.offset))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (
            lambda offset: FileChunk(b"x", -1),
            "not a FileChunk: Expected `int` >= 0 - at `$.total_bytes`",
        ),
        (
            lambda offset: FileChunk(b"x", MAX_FILES_BYTES + 1),
            "with size 268435457; allowed are at most 268435456 bytes",
        ),
        (lambda offset: FileChunk(b"xx", 10 - offset), "with total size 10, then 8; restart it"),
        (lambda offset: FileChunk(b"xx", 10 + offset), "with total size 10, then 12; restart it"),
        (
            lambda offset: FileChunk(b"xxxx", 10),
            "with 12 bytes where 10 were announced; restart it",
        ),
        (
            lambda offset: FileChunk(b"" if offset else b"xx", 10),
            "with only 2 of 10 bytes; restart it",
        ),
    ],
    ids=["negative", "too large", "shrinking", "growing", "beyond its end", "short"],
)
async def test_load_of_impossible_sizes_asks_the_next_holder(
    frontend: Frontend,
    files: dict[str, Path],
    piece: Callable[[int], FileChunk],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = Sizes(piece)
    await frontend.add(1, card_of(files), service=bad)
    await until(lambda: "cannot be loaded yet" in caplog.text)
    assert said in caplog.text
    asked = bad.offsets.count(0)
    assert len(bad.offsets) <= 3 * asked
    await frontend.add(2, card_of(files), Role.DECODE, service=FileService(by_hash(files)))
    await wait_served(frontend, "tiny")


async def test_load_of_too_large_card_files_is_rejected(
    frontend: Frontend,
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = sorted(path.stat().st_size for path in files.values())
    monkeypatch.setattr(models_module, "MAX_FILES_BYTES", sum(sizes) - 1)
    assert sizes[-1] < sum(sizes) - 1  # each alone is small enough
    await frontend.add(1, card_of(files), service=FileService(by_hash(files)))
    await until(lambda: "cannot be loaded yet" in caplog.text)
    assert "for all files of a model" in caplog.text
    assert "restart it" not in caplog.text


class Panic(BaseException):
    """An exception as a Rust library raises it. `except Exception` does not catch it."""


@pytest.mark.parametrize(
    "fault", [ZeroDivisionError("by zero"), RecursionError("too deep"), Panic("Precompiled")]
)
async def test_load_failing_unexpectedly_is_logged_once(
    frontend: Frontend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: BaseException,
) -> None:
    make = models_module.renderer_for
    tried = 0

    def fail(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
        nonlocal tried
        if card.name != "oss":
            return make(card, files)
        tried += 1
        raise fault

    monkeypatch.setattr(models_module, "renderer_for", fail)
    await frontend.add(1, HARMONY)
    await until(lambda: tried > 2)
    await frontend.add(2, msgspec.structs.replace(HARMONY, name="other"))
    await wait_served(frontend, "other")
    with pytest.raises(EngineNotReady):
        frontend.models.get("oss")
    (record,) = [record for record in caplog.records if "cannot be loaded yet" in record.message]
    expected = f"cannot load the tokenizer files of model 'oss': {type(fault).__name__}: {fault}"
    assert (
        record.getMessage()
        == f"model oss cannot be loaded yet (internal): {expected}; replace them on the workers"
    )
    assert (record.levelno, record.exc_info is not None) == (logging.ERROR, True)
    monkeypatch.setattr(models_module, "renderer_for", make)
    await wait_served(frontend, "oss")


async def test_load_panic_spares_other_models(
    frontend: Frontend, files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = json.loads(files["tokenizer.json"].read_bytes())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    files["tokenizer.json"].write_text(json.dumps(tokenizer))
    await frontend.add(1, card_of(files), service=FileService(by_hash(files)))
    await until(lambda: "model tiny cannot be loaded yet" in caplog.text)
    await frontend.add(2, HARMONY)
    await wait_served(frontend, "oss")
    assert frontend.models.names() == ["oss"]


@pytest.mark.parametrize("registry_timing", [RegistryTiming(preload_after_s=0.001)])
async def test_preload_failure_does_not_prevent_serving(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(renderer: HarmonyRenderer) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(HarmonyRenderer, "preload", fail)
    await frontend.add(1, HARMONY)
    await until(lambda: "cannot be preloaded" in caplog.text)
    assert frontend.models.get("oss").card == HARMONY
    assert "no memory" in caplog.text
