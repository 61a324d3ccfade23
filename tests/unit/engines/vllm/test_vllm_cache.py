"""Folders of compiled kernels, and the lock with which one engine of a host compiles for the
others.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from dynamo_trtllm.config.config_base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.engines.vllm.compilation import cache_folders
from dynamo_trtllm.engines.vllm.compile_lock import CompileLock
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.waiting import SOON_S


def test_folders_are_all_in_the_chosen_cache() -> None:
    folders = cache_folders(Path("/c"), {"TRITON_CACHE_DIR": "/t"})
    assert folders["VLLM_CACHE_ROOT"] == "/c/vllm"
    assert set(map(str, (Path(folder).parent for folder in folders.values()))) == {"/c"}
    assert cache_folders(None, {"TRITON_CACHE_DIR": "/t"}) == {}
    assert cache_folders(None, {"VLLM_CACHE_ROOT": "/v"}) == {"TRITON_CACHE_DIR": "/v/triton"}


@pytest.mark.parametrize("engine", ["mock", "torch"])
def test_cache_flag_without_compilation_is_an_error(engine: EngineName, tmp_path: Path) -> None:
    config = WorkerConfig(engine=engine, model_path=str(tmp_path), compile_cache=tmp_path)
    with pytest.raises(ConfigError, match="compile-cache"):
        create_engine(config, instance_id=1)


def test_lock_of_compiling_engine_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = CompileLock(tmp_path / "new", "key")
    second = CompileLock(tmp_path / "new", "key")
    assert first.acquire()
    result: list[bool] = []
    with caplog.at_level(logging.INFO):
        waiting = threading.Thread(target=lambda: result.append(second.acquire()))
        waiting.start()
        while "waiting for another engine" not in caplog.text:
            waiting.join(0.01)
            assert waiting.is_alive()
        first.release(is_compiled=True)
        waiting.join(SOON_S)
    assert result == [False]
    assert not CompileLock(tmp_path / "new", "key").acquire()
    other = CompileLock(tmp_path / "new", "another")
    assert other.acquire()
    other.release(is_compiled=False)


def test_lock_of_failed_engine_lets_next_compile(tmp_path: Path) -> None:
    first = CompileLock(tmp_path, "key")
    second = CompileLock(tmp_path, "key")
    assert first.acquire()
    first.release(is_compiled=False)
    assert second.acquire()
    second.release(is_compiled=False)


def test_lock_held_too_long_lets_both_compile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = CompileLock(tmp_path, "key")
    second = CompileLock(tmp_path, "key")
    assert first.acquire()
    assert not second.acquire(longest_s=0.0)
    assert "compiling, too" in caplog.text
    second.release(is_compiled=True)  # it holds nothing
    first.release(is_compiled=True)
