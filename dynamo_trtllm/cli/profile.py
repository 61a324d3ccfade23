"""Write what a running worker has learned, for simulations (`dynamo-trtllm profile`)."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

import yaml

from dynamo_trtllm.cli.output_files import check_writable, write_text
from dynamo_trtllm.cli.profile_loads import Alone, FrontendRequests, LoadFailed, ProfileLoads
from dynamo_trtllm.config.commands import ProfileConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.observability.metrics import PREFIX, read_costs
from dynamo_trtllm.observability.metrics_aggregator import sum_samples
from dynamo_trtllm.protocol.cost_model import (
    DECODE_TERMS,
    PREFILL_TERMS,
    prefill_features,
    prior_fit,
)
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.simulate.constants import Constants, known_constants
from dynamo_trtllm.support import http_client
from dynamo_trtllm.support.tls import client_context

_TIMEOUT_S: Final = 10.0
# How long to wait for what a worker learns from the last load: it learns once a second.
_LEARNED_S: Final = 2.5
_MIN_SAMPLES: Final = 100  # the fewest samples of each kind of step
_MAX_METRICS_BYTES: Final = 1 << 20
_WORKER_METRIC: Final = "active_calls"  # a metric that only workers have
# For each key of `step_costs` of the mock engine: the kind of these costs in metrics, and the terms
# of their formula.
_KINDS: Final = {
    "decode": ("decode_step", DECODE_TERMS),
    "prefill": ("prefill_step", PREFILL_TERMS),
}
# Arguments of the mock engine that no worker learns, and that are the same for all models of an
# engine.
_OF_ENGINE: Final = (
    "kv_block_size",
    "recompute_last_token",
    "plan_ahead",
    "decodes_take_step_tokens",
    "splits_prompts",
)
# Arguments of the mock engine that no worker learns, and that depend on the model and the GPU, too.
_OF_MODEL: Final = (
    "prefill_launch_s",
    "max_graph_tokens",
    "kv_transfer_s",
    "kv_transfer_block_s",
    "kv_post_block_s",
)


class NotProfiled(Exception):
    """The worker can't be asked, or has learned too little. The message says what to do."""


@command(ProfileConfig, f"{COMMAND_NAME} profile", NotProfiled)
def main(config: ProfileConfig) -> None:
    """Run the command.

    Exit with status 0; 1 if a process is unreachable, a request fails or the worker has learned too
    little; 2 for a bad command line.
    """
    check_writable(config.out, "out")
    content = {"constants": [asyncio.run(_profiled(config))]}
    write_text(config.out, yaml.safe_dump(content, sort_keys=False), "out")
    sys.stdout.write(f"wrote {config.out}\n")


async def _profiled(config: ProfileConfig) -> dict[str, Any]:
    """Send the loads, if a frontend is given, and return what the worker has learned."""
    url = config.url.rstrip("/")
    frontend = config.frontend_url
    if frontend is None:
        return constants_of(await _metrics(url, config), config)
    # Check that the worker answers, before the loads that take minutes.
    await _metrics(url, config)
    requests = FrontendRequests(
        frontend,
        http_client.bearer(config.api_key),
        client_context(frontend, config.client_tls_files),
    )
    loads = ProfileLoads(requests.ask, config.max_num_tokens)
    try:
        served = await requests.use_model(config.model)
        if _short(served) != _short(config.model):
            _note(f"{frontend} serves {served}, whose times are written for {config.model}")
        await loads.run(config.seconds)
        alone = await loads.alone()
    except LoadFailed as exc:
        raise NotProfiled(str(exc)) from exc
    await asyncio.sleep(_LEARNED_S)
    return constants_of(await _metrics(url, config), config, alone)


async def _metrics(url: str, config: ProfileConfig) -> str:
    """Return the metrics of a worker as text.

    Raises:
        NotProfiled: the process does not answer, or is no worker.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            status, body = await http_client.request(
                f"{url}/metrics",
                "GET",
                headers=http_client.bearer(config.api_key),
                max_bytes=_MAX_METRICS_BYTES,
                tls=client_context(url, config.client_tls_files),
            )
    except (OSError, ValueError) as exc:  # TimeoutError is an OSError
        raise NotProfiled(
            f"{url} does not answer ({exc or 'no answer in time'}); pass the address of the"
            " worker's --system-port"
        ) from exc
    if status != 200:
        raise NotProfiled(f"{url}/metrics answers {status}; pass the address of a worker")
    page = body.decode()
    check_page(page, url)
    return page


def check_page(page: str, url: str) -> None:
    """Check that a page of metrics is that of a worker. Raise NotProfiled."""
    if _WORKER_METRIC not in sum_samples(page, PREFIX):
        raise NotProfiled(f"{url} is not a worker; pass the address of the worker's --system-port")


def constants_of(page: str, config: ProfileConfig, alone: Alone | None = None) -> dict[str, Any]:
    """Return an entry for a file of constants.

    Args:
        page: metrics of a worker as text.
        config: says which worker it is.
        alone: requests that ran alone. The time that they took besides their step is the frontend's
            time.

    Raises:
        NotProfiled: the worker has learned too little.
    """
    learned = read_costs(page)
    costs: dict[str, list[float]] = {}
    counts: list[str] = []
    for name, (kind, terms) in _KINDS.items():
        fit = learned.get(kind)
        num_samples = 0 if fit is None else fit.num_samples
        if fit is None or num_samples < _MIN_SAMPLES:
            raise NotProfiled(
                f"the worker has learned from {counted(num_samples, 'sample')} of {kind}; at least"
                f" {_MIN_SAMPLES} are needed: send more requests to it, or pass --frontend-url and"
                " longer --seconds. Only aggregated workers learn both kinds"
            )
        costs[name] = [fit.coefficients[term] for term in terms]
        counts.append(f"{counted(num_samples, 'sample')} of {kind}")
    mock: dict[str, Any] = {
        "step_costs": costs,
        "prefill_tokens_per_step": config.max_num_tokens,
        "max_batch_size": config.max_batch_size,
        "kv_block_size": config.kv_block_size,
    }
    source = f"learned by the worker at {config.url}"
    prior = _prior(config)
    if prior is not None:
        names = [*_OF_ENGINE]
        if _has_same_model_and_gpu(prior, config):
            names += _OF_MODEL
        mock |= {name: prior.mock[name] for name in names if name in prior.mock}
        source += f"; what a worker does not learn is from: {prior.source}"
    kv_blocks = int(sum_samples(page, PREFIX).get("kv_blocks_total", 0))
    if kv_blocks:
        # The prior may come from workers that transfer KV. Their blocks are larger than those of
        # this aggregated worker.
        num_tokens = kv_blocks * config.kv_block_size
        mock["kv_cache_blocks"] = num_tokens // mock["kv_block_size"]
    entry: dict[str, Any] = {
        "models": [_short(config.model)],
        "engine": config.engine,
        "versions": [config.engine_version],
        "gpu": config.gpu.lower(),
        "gpus_per_worker": config.tensor_parallel_size,
        "source": source,
        "fitted": ", ".join(counts),
        "mock": mock,
    }
    if alone is not None:
        entry["frontend_ms"] = round(1000 * _frontend_s(alone, costs["prefill"]), 2)
    return entry


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _frontend_s(alone: Alone, prefill: list[float]) -> float:
    """Return the seconds that requests that run alone take besides their only step."""
    tokens = alone.prompt_tokens
    step_s = prior_fit(prefill).predict(prefill_features(0, 0, tokens, tokens * tokens / 2))
    return max(0.0, alone.seconds - step_s)


def _short(model: str) -> str:
    """Return the name of a model without the organization."""
    return model.rstrip("/").rpartition("/")[2].lower()


def _prior(config: ProfileConfig) -> Constants | None:
    """Return constants of the package for what a worker does not learn.

    Constants of this engine, model and GPU are preferred. Otherwise, the first constants of this
    engine are returned. None: the package has no constants of this engine.
    """
    of_engine = [one for one in known_constants() if one.engine == config.engine]
    of_model = [one for one in of_engine if _has_same_model_and_gpu(one, config)]
    return next(iter(of_model + of_engine), None)


def _has_same_model_and_gpu(constants: Constants, config: ProfileConfig) -> bool:
    return _short(config.model) in constants.models and constants.gpu == config.gpu.lower()


if __name__ == "__main__":
    main()
