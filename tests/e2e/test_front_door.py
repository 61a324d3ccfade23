"""The modules people start, as processes: help without engine libraries, and one line for what is wrong."""

import subprocess
import sys

import pytest

MODULES = ["dynamo_trtllm", "dynamo_trtllm.frontend", "dynamo_trtllm.launch", "dynamo_trtllm.clear_namespace"]

# An import of a name that is None in sys.modules fails.
WITHOUT_ENGINES = """
import runpy, sys
for name in ("torch", "transformers", "vllm", "tensorrt_llm", "nixl"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def start(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_ENGINES, module, *words], capture_output=True, text=True, check=False, timeout=50
    )


@pytest.mark.parametrize("module", MODULES)
def test_front_door_when_no_engine_library_is_installed_then_help_answers(module):
    done = start(module, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: python -m {module} " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("module", MODULES)
def test_front_door_when_a_flag_is_unknown_then_one_line_and_status_two(module):
    done = start(module, "--log-levl", "info")
    assert done.returncode == 2
    assert done.stderr == f"python -m {module}: unknown flag --log-levl; did you mean --log-level?\n"
    assert done.stdout == ""


def test_front_door_when_the_deployment_file_has_a_typing_error_then_one_line_and_status_two(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("worker: []\n")
    done = start("dynamo_trtllm.launch", str(path))
    assert done.returncode == 2
    assert done.stderr == f"python -m dynamo_trtllm.launch: {path}: unknown key 'worker'; did you mean 'workers'?\n"
