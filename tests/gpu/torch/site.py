"""Models, workers and questions of the torch engine's tests on GPUs. Loads no torch by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.kit.cluster import Cluster, Process, gauges, until

PAIR = "pair"
AGGREGATED = "aggregated"
OUTPUT_TOKENS = 24
START_S = 240.0  # the first time on a machine, with three workers importing at once
IDLE_S = 20.0


@dataclass(frozen=True)
class Site:
    device: str  # cuda or cpu

    @cached_property
    def gpus(self) -> int:
        if self.device == "cpu":
            return 0
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
        ).stdout
        return listed.count("GPU ")

    def env(self, number: int) -> dict[str, str]:
        """A worker sees one GPU; all share it where there is but one."""
        return {"CUDA_VISIBLE_DEVICES": str(number % self.gpus)} if self.gpus else {}

    def engine_args(self, **more: Any) -> dict[str, Any]:
        """bf16 everywhere; little enough KV memory that several engines fit."""
        cpu = {"device": "cpu", "num_threads": 1} if self.device == "cpu" else {"device": "cuda"}
        return {
            **cpu,
            "dtype": "bfloat16",
            "kv_cache_gib": 4 if self.gpus else 0.2,
            "max_seq_len": 6144,
            **more,
        }


def write_gpt_oss_20b_shape(folder: Path, *, full: bool) -> Path:
    """A config.json alone: gpt-oss-20b's widths, experts and vocabulary in 4 layers of its 24.

    Not `full`: of that the
    vocabulary alone.
    """
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size": 2880 if full else 64,
        "intermediate_size": 2880 if full else 64,
        "num_local_experts": 32 if full else 4,
        "num_experts_per_tok": 4 if full else 2,
        "num_attention_heads": 64 if full else 4,
        "num_key_value_heads": 8 if full else 2,
        "head_dim": 64 if full else 16,
        "vocab_size": 201088,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "initializer_range": 0.05,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Pair:
    """Workers of one model: a prefill and a decode worker under one name, an aggregated one under
    another.
    """

    cluster: Cluster
    site: Site
    folder: Path
    flags: Sequence[str]
    engine_args: Mapping[str, Any]
    prefill: Process = field(init=False)
    decode: Process = field(init=False)
    aggregated: Process = field(init=False)

    def start(self, role: str, name: str, gpu: int) -> Process:
        args = [
            "--override-engine-args",
            json.dumps(self.site.engine_args(**self.engine_args)),
            "--lease-ttl-s",
            "2",
        ]
        return self.cluster.torch(
            role, name, *args, *self.flags, model=str(self.folder), env=self.site.env(gpu)
        )

    def start_prefill(self) -> None:
        self.prefill = self.start("prefill", PAIR, 0)

    def start_decode(self) -> None:
        self.decode = self.start("decode", PAIR, 1)

    def until_serving(self) -> None:
        for worker in (self.prefill, self.decode, self.aggregated):
            worker.wait_for(r"serving as instance ([0-9a-f]+)", START_S)
        for name in (PAIR, AGGREGATED):
            self.cluster.until_status(name, 200, timeout_s=60)

    def check_idle(self) -> None:
        """No request, no transfer and no KV block is left anywhere."""
        for worker in (self.prefill, self.decode, self.aggregated):
            until(partial(_is_idle, worker), IDLE_S)


def start_pair(
    cluster: Cluster, site: Site, folder: Path, flags: Sequence[str], **engine_args: Any
) -> Pair:
    pair = Pair(cluster, site, folder, flags, engine_args)
    pair.start_prefill()
    pair.start_decode()
    pair.aggregated = pair.start("prefill_and_decode", AGGREGATED, 0)
    pair.until_serving()
    return pair


def _is_idle(worker: Process) -> bool:
    now = gauges(worker)
    return not any(
        now[name] for name in ("running", "waiting", "kv_blocks_used", "pending_kv_transfers")
    )


class Answer(NamedTuple):
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Ids that every vocabulary here has."""
    return [
        100 + (number * number * 31 + number * 7 + seed * 101) % 1800 for number in range(length)
    ]


def body_of(model: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | more


def greedy(client: httpx.Client, model: str, prompt: Sequence[int]) -> Answer:
    answer = client.post("/v1/completions", json=body_of(model, prompt, logprobs=0))
    assert answer.status_code == 200, answer.text
    assert ("x-prefill-instance" in answer.headers) == (model == PAIR)
    (choice,) = answer.json()["choices"]
    assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
    return Answer(tuple(choice["logprobs"]["tokens"]), tuple(choice["logprobs"]["token_logprobs"]))
