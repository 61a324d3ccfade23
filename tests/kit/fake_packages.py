"""Puts the fakes of TensorRT-LLM and vLLM on the import path."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.kit.engines import models_loaded_once

# Modules that bind names of vLLM, or change it, when they are imported.
_ADAPTER = ("dynamo_trtllm.engines.vllm.connector", "dynamo_trtllm.engines.vllm.patches.late_reads")
VLLM_RELEASES = ("0.24.0", "0.32.0")  # of the two forms that the stand-in has
FAKES = Path(__file__).parents[1] / "fakes"
RELEASES = ("1.1.0", "1.2.1", "1.3.0rc29", "1.4.0rc1")
# By release, the modules of the fake `tensorrt_llm`: to import them takes 0.1 s of CPU time.
_IMPORTED: dict[str, dict[str, ModuleType]] = {}


@contextmanager
def fake_tensorrt_llm(release: str = "1.2.1", *, backend: str = "tcp") -> Iterator[Any]:
    """Import the fake `tensorrt_llm` of a release for the context.

    Engines started in it keep it. They share the weights of a model folder.
    """
    environment = {"STANDIN_RELEASE": release, "STANDIN_BACKEND": backend}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    sys.path.insert(0, str(FAKES))
    _forget()
    sys.modules.update(_IMPORTED.get(release, {}))
    try:
        package = importlib.import_module("tensorrt_llm")
        # engines that earlier tests have not closed
        package.standin.core._live.clear()
        with models_loaded_once():
            yield package
    finally:
        _IMPORTED[release] = _forget()
        sys.path.remove(str(FAKES))
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def trap_names() -> list[str]:
    """Return the names of the fake's traps, read from its source because importing it takes a
    second.
    """
    tree = ast.parse((FAKES / "tensorrt_llm" / "standin" / "traps.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TRAPS":
            assert isinstance(node.value, ast.Dict)
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
    raise AssertionError("traps.py has no TRAPS")


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the adapter's timeouts from seconds to milliseconds."""
    from dynamo_trtllm.engines.external import runner
    from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller

    monkeypatch.setattr(StatsPoller, "timeout_s", 0.05)
    monkeypatch.setattr(StatsPoller, "pause_s", 0.01)
    monkeypatch.setattr(runner, "KV_WAIT_S", 0.5)
    monkeypatch.setattr(runner, "ANSWER_S", 0.5)


@contextmanager
def fake_vllm(release: str = VLLM_RELEASES[0]) -> Iterator[Any]:
    """Import the fake `vllm` of a release for the context. Engines started in it keep it."""
    sys.path.insert(0, str(FAKES))
    _forget("vllm")
    before = dict(os.environ)
    os.environ["STANDIN_VLLM"] = release
    try:
        yield importlib.import_module("vllm")
    finally:
        _forget("vllm")
        sys.path.remove(str(FAKES))
        for name in set(os.environ) - set(before):
            del os.environ[name]  # set here and by the engine


def _forget(package: str = "tensorrt_llm") -> dict[str, ModuleType]:
    """Remove the package from the imported modules, because it chooses its release at import.

    Return the modules of the package.
    """
    removed = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == package or name in _ADAPTER
    }
    for name in removed:
        del sys.modules[name]
        above, _, last = name.rpartition(".")
        if name in _ADAPTER and hasattr(sys.modules.get(above), last):
            delattr(sys.modules[above], last)  # else `from package import module` finds the old one
    importlib.invalidate_caches()
    return {name: module for name, module in removed.items() if name not in _ADAPTER}
