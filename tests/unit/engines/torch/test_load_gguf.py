"""A GGUF file is converted once, also when several workers start at the same time."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed

_WAIT_S = 30.0


@pytest.fixture
def load() -> ModuleType:
    from dynamo_trtllm.engines.torch import load  # takes seconds: it imports transformers

    return load


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    return file


class Conversion:
    """A conversion that goes on when another worker waits for it."""

    def __init__(self) -> None:
        self.targets: list[Path] = []
        self.began = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, _gguf: Path, target: Path) -> None:
        self.targets.append(target)
        self.began.set()
        assert self.go_on.wait(_WAIT_S)
        target.mkdir()
        (target / "config.json").write_text("{}")


@pytest.fixture
def conversion(load: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Conversion:
    made = Conversion()
    monkeypatch.setattr(load, "_convert", made)
    return made


def test_gguf_is_converted_once_by_two_workers(
    load: ModuleType, gguf: Path, conversion: Conversion, caplog: pytest.LogCaptureFixture
) -> None:
    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "waiting for another process to convert tiny.gguf":
                conversion.go_on.set()

    handler = Waits()
    caplog.set_level(logging.INFO, logger=load.__name__)
    logging.getLogger(load.__name__).addHandler(handler)
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(load._converted, gguf)
            assert conversion.began.wait(_WAIT_S)
            second = pool.submit(load._converted, gguf)
            assert first.result(_WAIT_S) == second.result(_WAIT_S)
    finally:
        logging.getLogger(load.__name__).removeHandler(handler)
    assert len(conversion.targets) == 1
    assert load._converted(gguf) == conversion.targets[0]
    assert len(conversion.targets) == 1


def test_gguf_wait_for_another_worker_is_bounded(
    load: ModuleType, gguf: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_CONVERSION_S", 0.01)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(load._converted, gguf)
        try:
            assert conversion.began.wait(_WAIT_S)
            with pytest.raises(
                EngineFailed, match=r"another process has not finished converting .*tiny\.gguf"
            ):
                load._converted(gguf)
        finally:
            conversion.go_on.set()


def test_broken_gguf_is_named_and_releases_the_lock(load: ModuleType, gguf: Path) -> None:
    # transformers 4 looks for the package gguf before it opens the file
    says = r"tiny\.gguf can't be converted|needs the package gguf"
    for _ in range(2):
        with pytest.raises(ConfigError, match=says):
            load._converted(gguf)
