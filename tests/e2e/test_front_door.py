"""The modules people start, as processes: help without engine libraries, and one line for what is
wrong.
"""

from __future__ import annotations

import re

import pytest

from tests.kit.cluster import Ended, run_in_one

MODULES = [
    "dynamo_trtllm",
    "dynamo_trtllm.frontend",
    "dynamo_trtllm.launch",
    "dynamo_trtllm.clear_namespace",
]

Results = dict[tuple[str, str], Ended]
ENGINE_LIBRARIES = ("torch", "transformers", "vllm", "tensorrt_llm", "nixl")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each module said to `--help`, to an unknown flag, and the launcher to a wrong file."""
    path = tmp_path_factory.mktemp("deployment") / "d.yaml"
    path.write_text("worker: []\n")
    lines = {(module, "help"): [module, "--help"] for module in MODULES}
    lines |= {(module, "flag"): [module, "--log-levl", "info"] for module in MODULES}
    lines["dynamo_trtllm.launch", "file"] = ["dynamo_trtllm.launch", str(path)]
    return dict(zip(lines, run_in_one(list(lines.values()), without=ENGINE_LIBRARIES), strict=True))


@pytest.mark.parametrize("module", MODULES)
def test_help_answers_without_an_engine_library(ended: Results, module: str) -> None:
    done = ended[module, "help"]
    assert done.status == 0, done.stderr
    assert f"usage: python -m {module} " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("module", MODULES)
def test_unknown_flag_exits_with_2(ended: Results, module: str) -> None:
    done = ended[module, "flag"]
    assert done.status == 2
    assert (
        done.stderr == f"python -m {module}: unknown flag --log-levl; did you mean --log-level?\n"
    )
    assert done.stdout == ""


def test_deployment_file_typing_error_exits_with_2(ended: Results) -> None:
    done = ended["dynamo_trtllm.launch", "file"]
    assert done.status == 2
    assert re.fullmatch(
        r"python -m dynamo_trtllm\.launch: \S+/d\.yaml: unknown key 'worker'; did you mean"
        r" 'workers'\?\n",
        done.stderr,
    )
