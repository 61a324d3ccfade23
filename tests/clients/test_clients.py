"""Drives each client as its users do: plain answers, streams, tool loops, structured output.

Steps run against the demo deployment (tiny-gpt-oss on CPUs).
Where a model must call tools well, they run against a stand-in with scripted answers.
A driver runs one step with the client's own interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dynamo_trtllm.models import resolve
from tests.clients.environments import ENVIRONMENTS
from tests.clients.scripted_model import MODEL, answer, call
from tests.kit.cluster import TINY

DRIVERS = Path(__file__).parent / "drivers"
# Generous, since a client that needs 30 s of CPU to start takes minutes on a busy machine.
STEP_TIMEOUT_S = 400.0
pytestmark = [
    pytest.mark.extra,
    pytest.mark.timeout(1500),
]  # the first step of a client also installs it

HEALTH = call("get_system_health", "{}")
LOOP = (HEALTH, answer("It is up."), answer("You are welcome."))
COMMAND = "echo ready > state.txt; cat state.txt"
SHELL = (call("exec_command", json.dumps({"cmd": COMMAND})), answer("Done."))
BASH = (call("Bash", json.dumps({"command": COMMAND, "description": "Write"})), answer("Done."))
READY = '{"is_ready":true}'
LOOP_WITH_FORMAT = (HEALTH, answer(READY), answer(READY))


class Step(NamedTuple):
    """One step of a driver.

    Args:
        answers: those of the stand-in; without any, the step runs against the demo deployment.
    """

    client: str
    driver: str
    name: str
    answers: Sequence[str] = ()

    @property
    def label(self) -> str:
        return f"{self.client}-{self.name}-{'stand-in' if self.answers else 'demo'}"


def steps(client: str, driver: str, *names: str, **scripted: Sequence[str]) -> list[Step]:
    """Return steps.

    Args:
        names: steps against the demo deployment.
        scripted: steps against the stand-in, with its answers.
    """
    demo = [Step(client, driver, name) for name in names]
    return demo + [Step(client, driver, name, answers) for name, answers in scripted.items()]


STEPS = [
    *steps(
        *("openai", "openai_python.py", "plain", "stream", "tools", "structured", "named_tool"),
        *("strict_tool_and_format", "responses", "responses_tools", "responses_structured"),
    ),
    *steps(
        "litellm",
        "litellm_sdk.py",
        "plain",
        "stream",
        "tools",
        "tools_openai",
        "structured",
        "messages",
    ),
    *steps(
        *(
            "openai-agents",
            "openai_agents.py",
            "plain",
            "stream",
            "structured",
            "chat",
            "chat_stream",
            "chat_structured",
        ),
        tools=LOOP,
        chat_tools=LOOP,
        tools_structured=LOOP_WITH_FORMAT,
        chat_tools_structured=LOOP_WITH_FORMAT,
    ),
    *steps(
        *(
            "langchain",
            "langchain_agents.py",
            "plain",
            "stream",
            "structured",
            "structured_by_function",
        ),
        tools=LOOP[:2],
        agent=LOOP,
        agent_stream=LOOP[:2],
        responses_agent=LOOP,
        agent_provider_strategy=LOOP_WITH_FORMAT,
        agent_tool_strategy=(HEALTH, call("Ready", READY), call("Ready", READY)),
    ),
    *steps(
        *(
            "instructor",
            "instructor_modes.py",
            "json_schema",
            "tools",
            "tools_strict",
            "responses_tools",
            "partial",
        ),
        json_mode=(answer('{"state": "healthy"}'),),
    ),
    *steps(
        *(
            "pydantic-ai",
            "pydantic_agents.py",
            "plain",
            "stream",
            "structured",
            "structured_by_tool",
        ),
        tools=LOOP,
        responses_tools=LOOP,
        tools_structured=LOOP_WITH_FORMAT,
    ),
    *steps(
        *("codex", "codex_cli.py", "plain"),
        tools=SHELL,
        tools_reduced=SHELL,
    ),
    *steps("claude-code", "claude_code.py", tools=BASH),
    *steps(
        *(
            "openai-node",
            "openai_node.mjs",
            "plain",
            "stream",
            "tools",
            "structured",
            "zod_tool_and_format",
        ),
        *("responses",),
        run_tools=LOOP[:2],
    ),
    *steps(
        *("ai-sdk", "ai_sdk.mjs", "plain", "stream", "structured"),
        tool_loop=LOOP,
        tools_structured=LOOP_WITH_FORMAT[:2],
    ),
    *steps("anthropic", "anthropic_python.py", "plain", "stream", "tools", "count_tokens"),
    *steps("llama-index", "llama_index_llm.py", "plain", "stream", "structured", tools=LOOP),
    *steps(
        *("smolagents", "smolagents_agent.py", "plain", "stream"),
        tools=(HEALTH, call("final_answer", '{"answer": "It is up."}')),
    ),
    *steps("litellm-proxy", "litellm_gateway.py", "chat", "responses"),
    *steps("lm-eval", "lm_eval_tasks.py", "likelihood", "generation", "chat"),
    *steps("aiperf", "aiperf_profile.py", "chat", "responses"),
    *steps("open-webui", "open_webui.py", "chat"),
]


@functools.cache
def installed(client: str) -> None:
    ENVIRONMENTS[client].install()


def run(step: Step, url: str, model: str, folder: Path) -> str:
    """Run a driver in a folder. Return what it shows. Fail with the end of its output.

    At the end no process of the step runs, also where the driver was killed at its time limit.
    """
    environment = ENVIRONMENTS[step.client]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{environment.programs}:{env['PATH']}"
    env["TOKENIZER"] = str(resolve(TINY))  # for programs that count tokens
    driver = environment.place(DRIVERS / step.driver)
    command = [environment.interpreter(driver), str(driver), url, model, step.name]
    stdout = folder / "stdout.txt"
    stderr = folder / "stderr.txt"
    with stdout.open("w") as out, stderr.open("w") as err:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        child = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True, **streams)
    try:
        outcome = f"exit status {child.wait(STEP_TIMEOUT_S)}"
    except subprocess.TimeoutExpired:
        outcome = f"no end within {STEP_TIMEOUT_S:.0f} s"
    finally:
        end_session(child)
    shown = stdout.read_text()
    if outcome != "exit status 0":
        end = f"{shown}{stderr.read_text()}"[-2000:]
        pytest.fail(f"{outcome}\n{end}", pytrace=False)
    return str(json.loads(shown.splitlines()[-1])["shown"])


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a driver and the servers that it started, such as a proxy."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
def test_client_when_it_runs_a_step_then_it_gets_what_it_expects(
    step: Step, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    installed(step.client)
    if step.answers:
        url, script = request.getfixturevalue("scripted")
        script.begin(step.answers)
        assert run(step, url, MODEL, tmp_path)
        assert (len(script.prompts), step.label) == (len(step.answers), step.label)
    else:
        url = request.getfixturevalue("demo_url")
        assert run(step, url, TINY, tmp_path)


DRIVER_WITH_A_SERVER = """
import fcntl, subprocess
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()])  # holds the lock until it ends
print("begun", flush=True)
raise SystemExit("failed")
"""


@pytest.mark.timeout(60)
def test_failing_driver_shows_output_and_stops_servers(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER_WITH_A_SERVER)
    with pytest.raises(pytest.fail.Exception, match="exit status 1\nbegun\nfailed"):
        run(Step("codex", str(driver), "plain"), "http://localhost", TINY, tmp_path)
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
