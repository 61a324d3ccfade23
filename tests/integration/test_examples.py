"""The scripts of `examples/`, in this process with the mock engine.

Others run with their engines: embedded_torch.py in tests/e2e/demo_model, embedded_trtllm.py and
llmapi_launch.sh in tests/e2e/test_stand_in.py, several_workers.py in tests/e2e/test_several_workers.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from dynamo_trtllm import Frontend, Role, Worker, WorkerConfig, create_engine
from dynamo_trtllm.protocol.errors import EngineFailed, Overloaded
from dynamo_trtllm.support.lifecycle import Lifecycle
from dynamo_trtllm.support.network.addresses import free_ports
from tests.kit.cluster import PLAIN
from tests.kit.waiting import SOON_S

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "tiny-gpt-oss"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lifecycle]]:
    """Let `run()` of workers and frontends return when they are ready, and stop them at the end."""
    servers: list[Lifecycle] = []
    threads: list[threading.Thread] = []

    def run(self: Lifecycle) -> None:
        thread = threading.Thread(target=asyncio.run, args=[self.serve()])
        thread.start()
        threads.append(thread)
        servers.append(self)
        asyncio.run(self.ready())

    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr(Frontend, "run", run)
    yield servers
    for server in servers:
        server.stop()
    for thread in threads:
        thread.join(SOON_S)


PAGE = (EXAMPLES.parent / "docs" / "embedding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- not run by tests: .* -->)?\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", [code for reason, code in BLOCKS if not reason])
def test_page_of_embedding_has_code_that_runs(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_one_process_answers_an_openai_client(capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / "one_process.py"
    lines = script.read_text().splitlines()
    code = [line for line in lines if line and not line.startswith(("#", '"""'))]
    assert len(code) == 10
    on_page = next(block for _, block in BLOCKS if "import serve" in block)
    assert [line for line in on_page.splitlines() if line] == code
    runpy.run_path(str(script))
    assert "CompletionUsage(completion_tokens=100" in capsys.readouterr().out


def test_ranks_and_frontend_with_middleware_serve_together(
    started: list[Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ["--nats-server", "inproc://examples", "--etcd-endpoints", "memory://examples"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    ranks = load("slurm_worker")
    monkeypatch.setattr(ranks, "FIRST_PORT", free_ports(2))
    for rank, variable in enumerate(("SLURM_PROCID", "PMI_RANK")):
        monkeypatch.delenv("SLURM_PROCID", raising=False)
        monkeypatch.setenv(variable, str(rank))
        monkeypatch.setenv("MPI_LOCALRANKID", str(rank))
        monkeypatch.setattr(sys, "argv", ["x", MODEL, "--engine", "mock", *cluster])
        ranks.main()
    monkeypatch.setattr(sys, "argv", ["x", "--http-port", "0", *cluster])
    load("middleware").main()
    prefill, decode, frontend = started
    assert isinstance(prefill, Worker)
    assert isinstance(decode, Worker)
    assert isinstance(frontend, Frontend)
    health = [httpx.get(f"{worker.url}/health", **PLAIN).json() for worker in (prefill, decode)]
    with httpx.Client(base_url=frontend.url, timeout=SOON_S, **PLAIN) as client:
        refused = client.get("/v1/models")
        assert refused.json()["error"]["code"] == "unknown_tenant"
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 3}
        headers = {"Authorization": "Bearer alice"}
        answered = client.post("/v1/completions", json=body, headers=headers)
        assert answered.raise_for_status().headers["x-tenant"] == "alice"
        assert client.get("/tenants/alice").json() == {"tenant": "alice", "requests": 1}
        roles = {worker["role"] for worker in client.get("/health").json()["instances"]}
    assert len(health) == 2, health
    assert roles == {"prefill", "decode"}


def test_rank_without_its_variables_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", MODEL])
    with pytest.raises(SystemExit, match="start this script with srun or mpirun"):
        load("slurm_worker").main()


async def test_batch_when_decode_fails_then_no_kv_is_held() -> None:
    config = WorkerConfig(model_path=MODEL, engine="mock", disaggregation_mode=Role.PREFILL)
    prefill = create_engine(config, instance_id=1)
    config = config.model_copy(update={"disaggregation_mode": Role.DECODE})
    never_started = create_engine(config, instance_id=2)
    await prefill.start()
    prompt = {"id": 1, "token_ids": [5, 6, 7], "max_tokens": 4}
    with pytest.raises(EngineFailed):
        await load("offline_batch").generate(prefill, never_started, prompt)
    assert prefill.stats().pending_kv_transfers == 0
    await asyncio.gather(prefill.aclose(), never_started.aclose())


def test_batch_when_interrupted_then_it_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[dict[str, Any]] = [
        {"id": number, "token_ids": [5, 6, 7], "max_tokens": 4} for number in range(5)
    ]
    prompts.append({"id": "wrong", "token_ids": [5], "max_tokens": 1})
    prompts.append({"id": "last", "token_ids": [5], "max_tokens": 1})
    given = tmp_path / "prompts.jsonl"
    given.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    answers = tmp_path / "answers.jsonl"
    monkeypatch.setattr(sys, "argv", ["x", MODEL, str(given), str(answers), "--engine", "mock"])
    module = load("offline_batch")
    generate = module.generate
    are_others_done = asyncio.Event()
    num_others = 0

    async def interrupted(prefill: Any, decode: Any, prompt: dict[str, Any]) -> list[int]:
        nonlocal num_others
        if prompt["id"] == "last":
            await are_others_done.wait()
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        output = await generate(prefill, decode, prompt)
        num_others += 1
        if num_others == len(prompts) - 1:
            are_others_done.set()
        if prompt["id"] == "wrong":
            raise Overloaded("planted")
        return list(output)

    monkeypatch.setattr(module, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.main()
    monkeypatch.setattr(module, "generate", generate)
    module.main()
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(str(row["id"]) for row in rows) == ["0", "1", "2", "3", "4", "last", "wrong"]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id[0]["token_ids"]) == 4
    assert by_id["wrong"]["error"] == "overloaded"
    assert rows[-1]["id"] == "last"
    assert len(rows[-1]["token_ids"]) == 1
