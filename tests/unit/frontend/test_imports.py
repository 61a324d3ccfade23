"""What a frontend must not import before its first word, and what not before a model asks for
it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ENGINES = {"torch", "transformers", "numpy", "nixl", "vllm", "tensorrt_llm", "safetensors"}
# the first card that names a renderer imports it
OF_MODELS = {"openai_harmony", "fastokens", "tokenizers", "jinja2"}
LATER = {"nats", "grpc", "google", "prometheus_client", "yaml"}
OURS_LATER = {
    "dynamo_trtllm.frontend.api.chat",
    "dynamo_trtllm.frontend.routing.request_router",
    "dynamo_trtllm.frontend.process.run_app",
}


def imported(module: str) -> set[str]:
    """What a process has in memory that imports just this module."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "not_yet"),
    [
        ("dynamo_trtllm.frontend.process.main", ENGINES | OF_MODELS | LATER | OURS_LATER),
        ("dynamo_trtllm.frontend.process.run_app", ENGINES | OF_MODELS | {"yaml"}),
    ],
)
def test_imports_of_a_start_stage_load_nothing_heavier(module: str, not_yet: set[str]) -> None:
    found = imported(module)
    assert module in found
    assert found & not_yet == set()


def test_package_when_imported_then_no_module_of_it_is_loaded() -> None:
    found = imported("dynamo_trtllm")
    assert {name for name in found if name.startswith("dynamo_trtllm.")} == set()
