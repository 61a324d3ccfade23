"""Measures the time to first token with each --router-mode, with mock workers.

Part of `benchmarks.routing`.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import uvloop

from .deployment import NAME_VARIABLE, LaunchedDeployment
from .load_client import Load, measure_load

_DOCUMENT_BLOCKS = 33  # blocks of 32 tokens that a document needs
_RUNNING_PROMPTS = 4  # prompts for which a worker has space beside the cached documents


class RoutedWorkers(LaunchedDeployment):
    """Four prefill workers and two decode workers of the mock engine.

    One is slow, or all cache a few documents.
    """

    def __init__(self, mode: str, documents: int) -> None:
        self._mode = mode
        self._cached_documents = documents // 4
        # The prompt tokens of each worker per step.
        self._prefill_tokens = {
            "prefill-1": 100 if documents else 25,
            "prefill-2": 100,
            "prefill-3": 100,
            "prefill-4": 100,
        }
        super().__init__(
            workers=(*self._prefill_tokens, "decode-1", "decode-2"), model="mock", ready_s=120.0
        )

    def description(self) -> dict[str, Any]:
        frontend = {
            "http-host": "127.0.0.1",
            "http-port": self.http_port,
            "router-mode": self._mode,
        }
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": frontend,
            "workers": [self._worker(name) for name in self.workers],
        }

    def _worker(self, name: str) -> dict[str, Any]:
        arguments = {
            "step_s": 0.02,
            "prefill_tokens_per_step": self._prefill_tokens.get(name, 8192),
        }
        flags = {
            "model": "mock",
            "engine": "mock",
            "override-engine-args": arguments,
            "system-port": 0,
        }
        if self._cached_documents:
            flags["publish-kv-events"] = True
            arguments["enable_prefix_caching"] = True
            if name in self._prefill_tokens:
                num_prompts = self._cached_documents + _RUNNING_PROMPTS
                arguments["kv_cache_blocks"] = _DOCUMENT_BLOCKS * num_prompts
        return {
            "name": name,
            "disaggregation_mode": name.partition("-")[0],
            "flags": flags,
            "env": {NAME_VARIABLE: name},
        }


def measure_modes(arguments: argparse.Namespace) -> None:
    """Print a row per mode."""
    prompts = _prompts(arguments.requests, arguments.documents)
    print("mode           ok  failed  TTFT ms p50       p99  ITL ms p99")
    for mode in arguments.modes:
        deployment = RoutedWorkers(mode, arguments.documents)
        try:
            deployment.start()
            load = Load(
                url=deployment.url,
                model="mock",
                rate=arguments.rate,
                requests=arguments.requests,
                osl=16,
                seed=1,
                prompts=prompts,
                seconds=600.0,
            )
            result, _ = uvloop.run(measure_load(load, warmup=8, pids={}))
        finally:
            deployment.stop()
        ttft = result["ttft_ms"]
        itl = result["itl_ms"]
        failed = sum(result["errors"].values())
        print(
            f"{mode:12} {result['ok']:4} {failed:7} {ttft['p50']:12.1f} {ttft['p99']:9.1f}"
            f" {itl['p99']:11.1f}",
            flush=True,
        )


def _prompts(count: int, num_documents: int) -> tuple[str, ...]:
    """Return prompts of random length. They begin with one of the documents, if there are any."""
    rnd = random.Random(1)
    documents = [f"{number} " + "word " * 1000 for number in range(num_documents)]
    prompts: list[str] = []
    for number in range(count):
        if documents:
            document = rnd.choice(documents)
            prompt = f"{document} {number} " + "more " * rnd.randint(5, 50)
        else:
            prompt = f"{number} " + "word " * rnd.randint(50, 1500)
        prompts.append(prompt)
    return tuple(prompts)
