"""The default component of a worker is that of the guides."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.worker.worker import endpoint_of


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"engine": "trtllm", "disaggregation_mode": "prefill"}, ("dynamo", "prefill", "generate")),
        (
            {"engine": "trtllm", "disaggregation_mode": "decode"},
            ("dynamo", "tensorrt_llm", "generate"),
        ),
        ({"engine": "vllm", "disaggregation_mode": "prefill"}, ("dynamo", "prefill", "generate")),
        ({"engine": "vllm"}, ("dynamo", "backend", "generate")),
        ({"engine": "vllm", "endpoint": "dyn://a.b.c"}, ("a", "b", "c")),
    ],
)
def test_endpoint_when_none_is_chosen_then_the_guides_component(
    settings: dict[str, Any], wanted: Any
) -> None:
    config = WorkerConfig(model_path="m", **settings)
    assert tuple(endpoint_of(config, str(config.engine))) == wanted
