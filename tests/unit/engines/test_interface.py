"""Engines that are served have all of the interface by which workers and frontends tell how busy
they are.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.streams import Generator, KvHolder

MAY_LACK = {"preflight", "progress", "sleep_obstacle", "sleep", "wake"}
PARTS = {
    name: part
    for interface in (Generator, KvHolder, Engine)
    for name, part in vars(interface).items()
    if not name.startswith("_") and name not in MAY_LACK
}


@pytest.mark.parametrize("name", ["Mock", "Torch", "Trtllm", "Vllm"])
def test_engine_implements_its_own_interface_defaults(name: str) -> None:
    if name == "Torch":
        pytest.importorskip("torch")
    engine: type[Engine] = getattr(
        importlib.import_module(f"dynamo_trtllm.engines.{name.lower()}.engine"), f"{name}Engine"
    )
    assert {"release", "stats", "steps", "start_kv_events"} <= PARTS.keys()
    assert [
        part for part, default in PARTS.items() if inspect.getattr_static(engine, part) is default
    ] == []
