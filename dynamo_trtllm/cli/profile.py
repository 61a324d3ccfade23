"""Write what a running worker has learned, for simulations (`dynamo-trtllm profile`)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import yaml

from dynamo_trtllm.config.commands import ProfileConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import CONSOLE
from dynamo_trtllm.observability.metrics import PREFIX, read_costs
from dynamo_trtllm.observability.metrics_aggregator import sum_samples
from dynamo_trtllm.protocol.cost_model import DECODE_TERMS, PREFILL_TERMS
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support import http_client

_TIMEOUT_S = 10.0
_MIN_SAMPLES = 100
_KINDS = {"decode": ("decode_step", DECODE_TERMS), "prefill": ("prefill_step", PREFILL_TERMS)}


class NotProfiled(Exception):
    """The worker can't be asked, or has learned too little. The message says what to do."""


@command(ProfileConfig, f"{CONSOLE} profile", NotProfiled)
def main(config: ProfileConfig) -> None:
    """Run the command.

    Exit with status 0; 1 if the worker is unreachable or has learned too little; 2 for a bad
    command line.
    """
    page = asyncio.run(_metrics(config.url.rstrip("/")))
    content = {"constants": [constants_of(page, config)]}
    try:
        config.out.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as exc:
        raise ConfigError(
            f"{config.out} can't be written: {exc.strerror or exc}; pass another path", field="out"
        ) from exc
    sys.stdout.write(f"wrote {config.out}\n")


async def _metrics(url: str) -> str:
    """Return the metrics of a worker as text.

    Raises:
        NotProfiled: it does not answer.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, body = await http_client.request(f"{url}/metrics", "GET")
    except (OSError, ValueError) as exc:  # TimeoutError is an OSError
        raise NotProfiled(
            f"{url} does not answer ({exc or 'no answer in time'}); pass the address of the"
            " worker's --system-port"
        ) from exc
    if status != 200:
        raise NotProfiled(f"{url}/metrics answers {status}; pass the address of a worker")
    return body.decode()


def constants_of(page: str, config: ProfileConfig) -> dict[str, Any]:
    """Return an entry for a file of constants.

    Args:
        page: metrics of a worker as text.
        config: says which worker it is.

    Raises:
        NotProfiled: the worker has learned too little.
    """
    learned = read_costs(page)
    costs: dict[str, list[float]] = {}
    counts: list[str] = []
    for name, (kind, terms) in _KINDS.items():
        found = learned.get(kind)
        num_samples = 0 if found is None else found.num_samples
        if found is None or num_samples < _MIN_SAMPLES:
            raise NotProfiled(
                f"the worker has learned from {num_samples} samples of {kind}; at least"
                f" {_MIN_SAMPLES} are needed: send more requests to it. Only aggregated workers"
                " learn both kinds"
            )
        costs[name] = [found.coefficients[term] for term in terms]
        counts.append(f"{num_samples} samples of {kind}")
    mock: dict[str, Any] = {
        "step_costs": costs,
        "prefill_tokens_per_step": config.max_num_tokens,
        "kv_block_size": config.kv_block_size,
    }
    kv_blocks = int(sum_samples(page, PREFIX).get("kv_blocks_total", 0))
    if kv_blocks:
        mock["kv_cache_blocks"] = kv_blocks
    return {
        "models": [config.model.rstrip("/").rpartition("/")[2].lower()],
        "engine": config.engine,
        "versions": [config.engine_version],
        "gpu": config.gpu.lower(),
        "gpus_per_worker": config.tensor_parallel_size,
        "source": f"learned by the worker at {config.url}",
        "fitted": ", ".join(counts),
        "mock": mock,
    }


if __name__ == "__main__":
    main()
