"""`serve()`: a deployment on a thread of this process."""

from __future__ import annotations

import importlib.util
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_trtllm import ConfigError, serve
from dynamo_trtllm.launch.embedded import EmbeddedDeployment
from dynamo_trtllm.protocol.errors import EngineFailed, EngineNotReady
from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S

MODEL = "tiny-gpt-oss"


def ask(deployment: EmbeddedDeployment) -> int:
    """Return the number of tokens of an answer."""
    body = {"model": deployment.model, "prompt": "Hi", "max_tokens": 5, "ignore_eos": True}
    response = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=SOON_S, **PLAIN)
    return int(response.raise_for_status().json()["usage"]["completion_tokens"])


def test_deployments_with_and_without_a_block_both_answer() -> None:
    other = serve(MODEL, engine="mock", prefill=0, decode=0, aggregated=1)
    with pytest.raises(EngineNotReady, match=r"use `with`, or call start\(\)"):
        _ = other.url
    settings = {"served_model_name": "m"}
    with serve(Path(MODEL), engine="mock", worker_settings=settings) as deployment:
        other.start()
        assert deployment.model == "m"
        assert ask(deployment) == 5
        assert ask(other) == 5
    other.stop()
    other.stop()
    with pytest.raises(RuntimeError, match="starts once"):
        other.start()
    assert "serve" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.long
def test_deployment_of_the_torch_engine_answers_with_the_model() -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "temperature": 0,
    }
    with serve(MODEL) as deployment:
        url = f"{deployment.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=6 * SOON_S, **PLAIN).raise_for_status().json()
    assert "I am tiny-gpt-oss" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("planner", [True, False])
def test_planner_runs_beside_elastic_workers(
    planner: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limits = {"router_mode": "slo", "slo_ttft_ms": 2000.0, "slo_itl_ms": 100.0}
    with serve(
        MODEL,
        engine="mock",
        prefill=0,
        decode=0,
        elastic=2,
        planner=planner,
        frontend_settings=limits,
    ) as deployment:
        assert ask(deployment) == 5
    assert ("planning the shares" in caplog.text) is planner


async def test_deployment_when_an_event_loop_runs_then_it_answers() -> None:
    with serve(MODEL, engine="mock") as deployment:
        assert ask(deployment) == 5  # blocks this event loop, but not that of the deployment


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_block_when_it_raises_then_the_deployment_ends(error: type[BaseException]) -> None:
    def run() -> None:
        with serve(MODEL, engine="mock"):
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(error):
        run()
    assert "serve" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("block_raises", [False, True])
def test_block_when_a_worker_fails_then_it_ends_with_the_error(block_raises: bool) -> None:
    async def fail() -> None:
        raise EngineFailed("planted")

    def run() -> None:
        with serve(MODEL, engine="mock") as deployment:
            worker = deployment._workers[0]
            loop = deployment._loop
            assert loop is not None
            loop.call_soon_threadsafe(lambda: worker._tasks.start(fail(), "planted"))
            assert deployment._thread is not None
            deployment._thread.join(SOON_S)
            if block_raises:
                raise ValueError("of the block")

    with pytest.raises(EngineFailed, match="planted") as raised:
        run()
    assert isinstance(raised.value.__context__, ValueError) is block_raises


def test_deployment_when_the_start_fails_then_error_is_raised() -> None:
    wrong = {"override_engine_args": {"no_such": 1}}
    deployment = serve(MODEL, engine="mock", worker_settings=wrong)
    with pytest.raises(ConfigError, match="no_such"), deployment:
        pytest.fail("the block was entered")
    with pytest.raises(EngineNotReady, match=r"call serve\(\) again"):
        _ = deployment.url
    assert "serve" not in {thread.name for thread in threading.enumerate()}


def test_start_when_interrupted_then_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    deployment = serve(MODEL, engine="mock")
    monkeypatch.setattr(deployment._started, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deployment.start()
    assert "serve" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefill": 0}, "prefill=0 and decode=1 serve no request together"),
        ({"prefill": 0, "decode": 0}, "pass at least one of each, or aggregated=1"),
        ({"decode": -1}, "decode=-1 workers are not possible"),
        ({"decode": "1"}, "decode='1' workers are not possible"),
        ({"elastic": 65}, "elastic=65 workers are not possible; pass 0 to 64"),
        ({"aggregated": 65}, "aggregated=65 workers are not possible; pass 0 to 64"),
        ({"engine": "vllm"}, "dynamo-trtllm serve MODEL --engine vllm"),
        ({"engine": "no-such"}, "engine"),
        ({"model": None}, "model is None; pass the name of a bundled model, or a folder"),
        ({"model": 5}, "model is 5; pass the name"),
        ({"worker_settings": ["x"]}, "worker_settings is .* pass a mapping of names"),
        ({"worker_settings": "x"}, "worker_settings is 'x'; pass a mapping of names"),
        ({"worker_settings": {5: 1}}, "worker_settings is {5: 1}; pass a mapping of names"),
        ({"worker_settings": {"max_batch_size": 10**5000}}, "max_batch_size is <int>"),
        ({"frontend_settings": 5}, "frontend_settings is 5; pass a mapping of names"),
        ({"worker_settings": {"no_such": 1}}, "there is no setting no_such"),
        ({"worker_settings": {"engine": "mock"}}, "remove it from worker_settings"),
        ({"frontend_settings": {"nats_server": "inproc://"}}, "from frontend_settings"),
    ],
)
def test_serve_when_an_argument_is_wrong_then_it_says_what_to_do(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(**{"model": MODEL, "engine": "mock", **arguments})


def test_serve_without_torch_names_the_extra_and_the_mock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*'\.\[torch\]'.*engine=\"mock\""):
        serve(MODEL)


def test_deployment_when_its_program_ends_then_it_ends_before() -> None:
    program = f"""
import atexit, threading
from dynamo_trtllm import serve
atexit.register(lambda: print("serve" in [thread.name for thread in threading.enumerate()]))
print(serve({MODEL!r}, engine="mock").start().model)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{MODEL}\nFalse\n")
    assert done.stderr == ""


FORKING = f"""
import multiprocessing, sys
from dynamo_trtllm import serve
from tests.integration.test_serve_in_process import ask
def run_child():
    if deployment.url and during:
        assert ask(deployment) == 5  # the one of the parent
    with serve({MODEL!r}, engine="mock") as own:
        assert ask(own) == 5
during = sys.argv[1] == "during"
deployment = serve({MODEL!r}, engine="mock").start()
if not during:
    deployment.stop()
child = multiprocessing.get_context("fork").Process(target=run_child)
child.start()
child.join(20)
child.kill()
if during:
    assert ask(deployment) == 5
    deployment.stop()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("when", ["during", "after"])
def test_forked_process_can_start_a_deployment_of_its_own(when: str) -> None:
    command = [sys.executable, "-c", FORKING, when]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(3)", 3), ("raise ValueError", 1), ("deployment.stop()", 0)]
)
def test_forked_process_that_exits_leaves_the_deployment_running(end: str, status: int) -> None:
    program = f"""
import os, sys
from dynamo_trtllm import serve
from tests.integration.test_serve_in_process import ask
with serve({MODEL!r}, engine="mock") as deployment:
    ask(deployment)
    child = os.fork()
    if not child:
        {end}
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {status}
    assert ask(deployment) == 5
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


OF_SERVE = f"""
import sys
from dynamo_trtllm import serve
with serve({MODEL!r}, engine="mock"):
    pass
sys.exit(7)
"""
OF_RUN = """
import asyncio, os, signal, sys, threading
from dynamo_trtllm import Frontend, FrontendConfig
settings = {"nats_server": "inproc://", "etcd_endpoints": "memory://", "http_port": 0}
frontend = Frontend(FrontendConfig(**settings))
def end():
    asyncio.run(frontend.ready())
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end).start()
frontend.run()
sys.exit(7)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("program", [OF_SERVE, OF_RUN])
def test_program_with_closed_standard_streams_ends_normally(program: str, closed: str) -> None:
    # A socket with the number of a standard stream makes uvloop abort when it is closed.
    command = ["bash", "-c", f'exec "$@" {closed}', "-", sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 7
