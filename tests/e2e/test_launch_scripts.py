"""scripts/launch as on a machine without GPUs: the guides' variables, the mock engine, a killed
worker, Ctrl-C.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.launcher_process import LauncherProcess, ask_until_answered
from tests.kit.waiting import SOON_S

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts/launch").glob("gpt_oss_*.sh"))
MODEL = "openai/gpt-oss-120b"

# As a script in the background of another one is started.
SIGINT_IGNORED = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]

pytestmark = pytest.mark.timeout(300)


def environment(port: int) -> dict[str, str]:
    return {
        "PYTHON": sys.executable,
        "MODEL_PATH": "tiny-gpt-oss",
        "DYN_HTTP_PORT": str(port),
        "DYN_NAMESPACE": f"scripts-{port}",
    }


@pytest.mark.parametrize(
    "script",
    # The others start the same deployment with other settings, or a part of it.
    [
        pytest.param(path, marks=() if path.stem == "gpt_oss_disagg" else pytest.mark.long)
        for path in SCRIPTS
    ],
    ids=lambda path: path.stem,
)
def test_script_restarts_a_worker_and_stops_all_on_sigint(script: Path, tmp_path: Path) -> None:
    port = free_ports()
    command = [*SIGINT_IGNORED, str(script)]
    launched = LauncherProcess(tmp_path, "--engine", "mock", command=command, env=environment(port))
    try:
        launched.wait_line(r"launch +\| Ready")
        ask_until_answered(port, MODEL)
        workers = {
            pid: command
            for pid, command in launched.pids().items()
            if " -m dynamo_trtllm --" in command
        }
        assert len(workers) == (1 if "agg" in script.stem.split("_") else 2)
        killed = next(
            pid for pid, command in workers.items() if "--disaggregation-mode=prefill" in command
        )
        others = {
            pid for pid, command in launched.pids().items() if "output_relay" not in command
        } - {killed}
        seen = len(launched.lines)
        os.kill(killed, signal.SIGKILL)
        launched.wait_line("was killed by SIGKILL; starting it again", seen)
        launched.wait_line("(prefill|agg) is ready after", seen)
        ask_until_answered(port, MODEL)
        assert others <= set(launched.pids())
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == (0, "")
        launched.wait_gone(SOON_S)
        assert not list(tmp_path.iterdir())
    finally:
        launched.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_lists_every_variable_with_its_default(script: Path) -> None:
    said = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    (name,) = re.findall(r"launch (deploy/local/\S+\.yaml)", script.read_text())
    text = re.sub(r"^#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    variables = set(re.findall(r"\$\{([A-Z_0-9]+:-[^}]*)\}", text))
    assert {variable.split(":-")[0] for variable in variables} >= {
        "MODEL_PATH",
        "SERVED_MODEL_NAME",
        "DYN_HTTP_PORT",
    }
    shown = re.findall(r"^  ([A-Z_0-9]+)=(.*)\n      \S", said, re.MULTILINE)
    assert sorted(shown) == sorted(tuple(variable.split(":-")) for variable in variables)
    assert name in said


def test_script_flag_without_value_exits_with_2() -> None:
    done = subprocess.run([SCRIPTS[0], "--deployment"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"{SCRIPTS[0]}: --deployment needs a file\n")


def test_script_starts_the_named_deployment(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("workers: []\n")
    command = [SCRIPTS[0], f"--deployment={tmp_path / 'mine.yaml'}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment(0)
    )
    assert done.returncode == 2
    assert "mine.yaml: workers" in done.stderr
