"""The engines of this package have the methods of the interface, and say what they can do."""

from __future__ import annotations

import importlib

import pytest

from dynamo_trtllm.engines.capabilities import (
    ChecksHealth,
    MeasuresSteps,
    PublishesKvEvents,
    TransfersKv,
)
from dynamo_trtllm.engines.method_checks import check_engine_class

COMMON = (TransfersKv, ChecksHealth, MeasuresSteps, PublishesKvEvents)


@pytest.mark.parametrize("name", ["Mock", "Torch", "Trtllm", "Vllm"])
def test_engine_of_this_package_has_all_that_routing_reads(name: str) -> None:
    if name == "Torch":
        pytest.importorskip("torch")
    module = importlib.import_module(f"dynamo_trtllm.engines.{name.lower()}.engine")
    engine_class = getattr(module, f"{name}Engine")
    check_engine_class(engine_class)
    missing = [capability for capability in COMMON if not issubclass(engine_class, capability)]
    assert missing == []
