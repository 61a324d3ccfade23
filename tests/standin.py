"""Puts the stand-in of TensorRT-LLM where `import tensorrt_llm` finds it, playing a chosen release."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_CONNECTOR = "dynamo_trtllm.engines.vllm.connector"  # changes the vLLM that it finds when it is imported
FAKES = Path(__file__).parent / "fakes"
RELEASES = ("1.0.0", "1.1.0", "1.2.1", "1.3.0rc29")


@contextmanager
def playing(release: str = "1.2.1", *, backend: str = "tcp") -> Iterator[Any]:
    """Within the block `tensorrt_llm` is the stand-in, imported afresh. Engines started in it stay what they are."""
    environment = {"STANDIN_RELEASE": release, "STANDIN_CARRIER": backend}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    sys.path.insert(0, str(FAKES))
    _forget()
    try:
        yield importlib.import_module("tensorrt_llm")
    finally:
        _forget()
        sys.path.remove(str(FAKES))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def trap_names() -> list[str]:
    """Read off the source: importing the stand-in takes a second, which collecting tests should not."""
    tree = ast.parse((FAKES / "tensorrt_llm" / "standin" / "traps.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TRAPS":
            assert isinstance(node.value, ast.Dict)
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    raise AssertionError("traps.py has no TRAPS")


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter waits milliseconds where it would wait seconds, for answers that do not come and for statistics."""
    from dynamo_trtllm.engines.trtllm import inflight
    from dynamo_trtllm.engines.trtllm.inflight import TrtllmInflightRequest

    monkeypatch.setattr(inflight, "_TIMEOUT_S", 0.05)
    monkeypatch.setattr(inflight, "_PAUSE_S", 0.01)
    defaults = TrtllmInflightRequest.abort_and_drain.__kwdefaults__
    monkeypatch.setitem(defaults, "kv_wait_s", 0.5)
    monkeypatch.setitem(defaults, "answer_s", 0.5)


@contextmanager
def playing_vllm() -> Iterator[Any]:
    """Within the block `vllm` is the stand-in, imported afresh."""
    sys.path.insert(0, str(FAKES))
    _forget("vllm")
    before = dict(os.environ)
    try:
        yield importlib.import_module("vllm")
    finally:
        _forget("vllm")
        sys.path.remove(str(FAKES))
        for name in set(os.environ) - set(before):
            del os.environ[name]  # what the engine exported for it


def _forget(package: str = "tensorrt_llm") -> None:
    """The release is settled when the package is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == _CONNECTOR]:
        del sys.modules[name]
    importlib.invalidate_caches()
