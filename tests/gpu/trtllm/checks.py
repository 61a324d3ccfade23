"""What TensorRT-LLM's engine must do as a worker, asked over HTTP.

Run with the real package, and with the stand-in so
that this text is known to work.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from tests.kit.cluster import Cluster, Process, events, gauges, until

PAIR = "pair"
AGGREGATED = "aggregated"
STEP_TOKENS = 2048  # in one step, and so the longest prompt without chunks
PROMPT_TOKENS = (1, 31, 33, 300)
OUTPUT_TOKENS = 24
START_S = 900.0  # weights, autotuning and graph capture of a large model
IDLE_S = 90.0  # TensorRT-LLM frees KV that was not fetched after 66 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the engines run and with which arguments."""

    model: str
    gpus: int  # 0: none is needed
    env: Mapping[str, str] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def devices(self, first: int, count: int = 1) -> dict[str, str]:
        """The environment of a worker on these GPUs; all share one where there are not enough."""
        if self.gpus == 0:
            return dict(self.env)
        chosen = ",".join(str((first + number) % self.gpus) for number in range(count))
        return {**self.env, "CUDA_VISIBLE_DEVICES": chosen}

    def arguments(self, role: str, **more: Any) -> dict[str, Any]:
        """Small enough that three engines fit on one large GPU."""
        chosen: dict[str, Any] = {
            "max_batch_size": 8,
            "max_num_tokens": STEP_TOKENS,
            "max_seq_len": 2 * STEP_TOKENS,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.2, "enable_block_reuse": False},
            "cuda_graph_config": None,
        }
        if role != "prefill_and_decode":
            chosen["cache_transceiver_config"] = {
                "backend": "UCX",
                "max_tokens_in_buffer": STEP_TOKENS,
            }
        chosen["disable_overlap_scheduler"] = role == "prefill"
        return chosen | dict(self.engine_args) | more


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One model served by a prefill and a decode worker, and by an aggregated worker, if any."""

    site: Site
    cluster: Cluster
    prefill: Process
    decode: Process
    aggregated: Process | None = None

    def workers(self) -> tuple[Process, ...]:
        pair = (self.prefill, self.decode)
        return pair if self.aggregated is None else (self.aggregated, *pair)

    def models(self) -> tuple[str, ...]:
        return (PAIR,) if self.aggregated is None else (PAIR, AGGREGATED)


def start_worker(
    cluster: Cluster, site: Site, role: str, name: str, gpu: int = 0, **more: Any
) -> Process:
    return cluster.trtllm(role, name, site.model, site.devices(gpu), **site.arguments(role, **more))


def start(
    cluster: Cluster, site: Site, start_decode: Callable[[Cluster], Process] | None = None
) -> Served:
    """Start all three workers. `start_decode` starts the decode worker in another way, and there is
    no aggregated worker then.
    """
    prefill = start_worker(cluster, site, "prefill", PAIR, gpu=1)
    if start_decode is not None:
        served = Served(site=site, cluster=cluster, prefill=prefill, decode=start_decode(cluster))
    else:
        served = Served(
            site=site,
            cluster=cluster,
            prefill=prefill,
            decode=start_worker(cluster, site, "decode", PAIR, gpu=2),
            aggregated=start_worker(cluster, site, "prefill_and_decode", AGGREGATED),
        )
    await_serving(*served.workers())
    cluster.until_ready(*served.models())
    return served


def await_serving(*workers: Process) -> None:
    for worker in workers:
        worker.wait_for(r"serving as instance ([0-9a-f]+)", START_S)


def prompt_of(length: int) -> list[int]:
    """Ids that every vocabulary has."""
    return [100 + (number * number * 31 + number * 7) % 800 for number in range(length)]


def body_of(model: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | more


def greedy(client: httpx.Client, model: str, length: int) -> str:
    """The answer's text.

    Log-probabilities would show its tokens, but a pair has none up to 1.2.1.
    """
    answer = client.post("/v1/completions", json=body_of(model, prompt_of(length)))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
    text: str = choice["text"]
    return text


def is_idle(worker: Process) -> bool:
    now = gauges(worker)
    return not any(
        now[name] for name in ("running", "waiting", "kv_blocks_used", "pending_kv_transfers")
    )


def check_idle(*workers: Process) -> None:
    for worker in workers:
        until(partial(is_idle, worker), IDLE_S)


def check_parity(served: Served) -> None:
    """Greedy tokens of a prefill and a decode call equal those of one engine."""
    with served.cluster.client(120.0) as client:
        for length in PROMPT_TOKENS:
            assert greedy(client, PAIR, length) == greedy(client, AGGREGATED, length), length
    check_idle(*served.workers())


def check_cancellation(served: Served) -> None:
    """A client that leaves frees requests, KV transfers and KV blocks."""
    for model in served.models():
        body = body_of(model, prompt_of(300), max_tokens=1500, stream=True)
        with (
            served.cluster.client(120.0) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            arriving = events(answer.iter_lines())
            for _ in range(3):
                next(arriving)
    check_idle(*served.workers())
    with served.cluster.client(120.0) as client:
        greedy(client, PAIR, 33)


def check_chunked_prefill(served: Served) -> None:
    """A prompt longer than a step gives the same tokens with chunked prefill, and is rejected
    without.
    """
    name = "chunked"
    length = 300
    small = {"max_num_tokens": 128, "max_batch_size": 4}
    worker = start_worker(
        served.cluster,
        served.site,
        "prefill_and_decode",
        name,
        enable_chunked_prefill=True,
        **small,
    )
    await_serving(worker)
    served.cluster.until_ready(name)
    with served.cluster.client(120.0) as client:
        assert greedy(client, name, length) == greedy(client, AGGREGATED, length)
        refused = client.post(
            "/v1/completions", json=body_of(AGGREGATED, prompt_of(STEP_TOKENS + 1))
        )
    assert refused.status_code == 400, refused.text
    assert "max_num_tokens" in refused.text
    worker.stop()


def check_attention_dp(served: Served) -> None:
    """Two ranks, each with aggregated requests: the same tokens as one, also for more requests."""
    name = "attention-dp"
    site = served.site
    arguments = site.arguments(
        "prefill_and_decode", tensor_parallel_size=2, enable_attention_dp=True
    )
    worker = served.cluster.trtllm(
        "prefill_and_decode", name, site.model, site.devices(0, count=2), **arguments
    )
    await_serving(worker)
    served.cluster.until_ready(name)
    with served.cluster.client(120.0) as client:
        for length in PROMPT_TOKENS:
            assert greedy(client, name, length) == greedy(client, AGGREGATED, length), length
    worker.stop()


def check_drain(served: Served) -> None:
    """SIGTERM while a request runs: the answer is finished, then the worker leaves with 0."""
    name = "leaving"
    worker = start_worker(served.cluster, served.site, "prefill_and_decode", name)
    await_serving(worker)
    served.cluster.until_ready(name)
    body = body_of(name, prompt_of(33), max_tokens=200, stream=True)
    with (
        served.cluster.client(120.0) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        arriving = events(answer.iter_lines())
        next(arriving)
        worker.send(signal.SIGTERM)
        reasons = [
            choice["finish_reason"] for event in arriving for choice in event.get("choices", ())
        ]
    assert [reason for reason in reasons if reason] == ["length"]
    assert worker.wait(60.0) == 0


def check_death(
    served: Served, kill: Callable[[Process], None], env: Mapping[str, str] = {}
) -> None:
    """When the executor dies under a running request, the client gets an error and the worker
    leaves with 1.
    """
    name = "dying"
    site = served.site
    worker = served.cluster.trtllm(
        "prefill_and_decode",
        name,
        site.model,
        {**site.devices(0), **env},
        **site.arguments("prefill_and_decode"),
    )
    await_serving(worker)
    served.cluster.until_ready(name)
    with served.cluster.client(120.0) as client:
        kill(worker)
        answer = client.post("/v1/completions", json=body_of(name, prompt_of(33), max_tokens=1500))
    assert answer.status_code >= 500, answer.text
    assert worker.wait(60.0) == 1
