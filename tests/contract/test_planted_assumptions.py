"""A wrong assumption about TensorRT-LLM in the adapter turns a contract test red: else the test
would prove nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cases import each_case
from tests.kit.planted_assumptions import PLANTS, Plant

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trtllm-verification.md").read_text(encoding="utf-8")
PLUGINS = ("-p", "tests.kit.planted_assumptions", "-p", "no:cacheprovider")
PYTEST = ("-m", "pytest", "-q", "-n", "0", "--long", *PLUGINS)  # some of the tests are long ones


def pytest_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *PYTEST, *arguments]
    return subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@each_case("plant", PLANTS)
def test_planted_text_occurs_once_and_is_documented(plant: Plant) -> None:
    found = importlib.util.find_spec(plant.module)
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).read_text(encoding="utf-8").count(plant.old) == 1
    assert f"| {plant.topic} | {plant.assumes} |" in PAGE


def test_plant_when_its_test_is_collected_then_pytest_finds_it() -> None:
    tests = sorted({f"tests/{plant.test}" for plant in PLANTS})
    run = pytest_run("--collect-only", *tests)
    assert run.returncode == pytest.ExitCode.OK, run.stdout + run.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.assumes)
def test_contract_when_an_assumption_is_wrong_then_red(plant: Plant) -> None:
    run = pytest_run(
        "--tb=line", f"tests/{plant.test}", PLANTED=json.dumps([plant.module, plant.old, plant.new])
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert " failed" in run.stdout.splitlines()[-1], run.stdout  # not an error while it is set up
