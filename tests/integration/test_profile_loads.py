"""`profile` sends loads through a frontend, from which its worker learns."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_trtllm import serve
from dynamo_trtllm.cli import profile
from dynamo_trtllm.cli.profile_loads import FrontendRequests, ProfileLoads
from dynamo_trtllm.observability.metrics import PREFIX
from dynamo_trtllm.observability.metrics_aggregator import sum_samples
from dynamo_trtllm.support.network.addresses import free_ports

MODEL = "tiny-gpt-oss"
STEP_TOKENS = 256


class Profiled:
    """A deployment with one aggregated worker of the mock engine, by its addresses."""

    def __init__(self, frontend_url: str, worker_url: str) -> None:
        self.frontend_url = frontend_url
        self.worker_url = worker_url

    def output_tokens(self) -> float:
        """Return how many tokens the worker has generated."""
        with urllib.request.urlopen(f"{self.worker_url}/metrics") as response:
            return sum_samples(response.read().decode(), PREFIX)["output_tokens_total"]


@pytest.fixture(scope="module")
def profiled() -> Iterator[Profiled]:
    port = free_ports()
    settings = {
        "system_port": port,
        "override_engine_args": {"step_s": 0.001, "prefill_tokens_per_step": STEP_TOKENS},
    }
    with serve(
        MODEL, engine="mock", aggregated=1, prefill=0, decode=0, worker_settings=settings
    ) as deployment:
        yield Profiled(deployment.url, f"http://127.0.0.1:{port}")


def test_loads_reach_the_worker(profiled: Profiled) -> None:
    requests = FrontendRequests(profiled.frontend_url, {}, None)
    loads = ProfileLoads(requests.ask, STEP_TOKENS)
    # The only model is taken, whatever the name of the constants.
    asyncio.run(requests.use_model("some/other-model"))
    asyncio.run(loads.run(1.0))
    before = profiled.output_tokens()
    alone = asyncio.run(loads.alone())
    assert alone.prompt_tokens == STEP_TOKENS // 64
    assert alone.seconds > 0.001
    assert profiled.output_tokens() >= before + 9


@pytest.mark.parametrize(
    ("is_worker", "problem"),
    [(True, "/v1/models answers 404"), (False, "pass the address of a frontend")],
)
def test_address_without_a_frontend_is_named(
    is_worker: bool,
    problem: str,
    profiled: Profiled,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    frontend = profiled.worker_url if is_worker else "http://127.0.0.1:1"
    words = [MODEL, "--url", profiled.worker_url, "--gpu", "cpu", "--frontend-url", frontend]
    with pytest.raises(SystemExit) as ended:
        profile.main([*words, "--out", str(tmp_path / "constants.yaml")])
    assert ended.value.code == 1
    assert problem in capsys.readouterr().err
