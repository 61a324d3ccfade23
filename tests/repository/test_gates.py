"""Gates of tests that need what is not everywhere: asked for by name they fail loudly, otherwise
they are counted.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.kit.fake_packages import FAKES

REAL = "tests/gpu/trtllm"


def collect(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    without = [
        word
        for name in ("cacheprovider", "schemathesis", "hypothesispytest")
        for word in ("-p", f"no:{name}")
    ]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *without, REAL, *argv]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", **env}
    )


def test_trtllm_tests_are_deselected_by_default() -> None:
    done = collect()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("not run")]
    assert " trtllm" in line


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is installed"
)
def test_trtllm_when_asked_for_without_the_package_then_it_fails() -> None:
    done = collect("-m", "trtllm")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tensorrt_llm is not installed" in done.stderr


def test_trtllm_when_excluded_by_name_then_nothing_fails() -> None:
    assert "tensorrt_llm is not installed" not in collect("-m", "not trtllm").stderr


def test_trtllm_stand_in_is_not_the_package() -> None:
    done = collect("-m", "trtllm", PYTHONPATH=str(FAKES))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "stand-in" in done.stderr
