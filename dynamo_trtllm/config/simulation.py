"""Define the settings of the commands `simulate`, `plan` and `profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from dynamo_trtllm.config.client_commands import ServerUrl
from dynamo_trtllm.config.config_base import (
    Config,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option,
)
from dynamo_trtllm.config.http_access import HttpClientConfig
from dynamo_trtllm.config.token_counts import TokenCount

# A simulation keeps all of its requests in memory, about 1 KB each.
MAX_REQUESTS: Final = 1_000_000
RequestCount = Annotated[int, Field(gt=0, le=MAX_REQUESTS)]


class LimitsConfig(Config):
    """The limits of a good request. `simulate` and `plan` count the good requests."""

    ttft_ms: PositiveFloat = option(
        "load", 2000.0, help="A good request has its first token within these milliseconds."
    )
    mean_gap_ms: PositiveFloat = option(
        "load",
        20.0,
        help="By the first definition of goodput, a good request also keeps this limit of the mean"
        " time between two tokens (TPOT).",
    )
    worst_gap_ms: PositiveFloat = option(
        "load",
        100.0,
        help="By the second definition of goodput, a good request also keeps this limit of the"
        " longest time between two tokens.",
    )
    gpu: NonEmpty | None = option(
        "engine",
        None,
        help="GPU model, such as h200. It selects the constants of engines other than mock.",
    )
    constants: Path | None = option(
        "engine",
        None,
        help="YAML file with constants of your own, beside those of the package.",
    )
    json_output: bool = option("process", False, aliases=("--json",), help="Print JSON.")


class ProfileConfig(HttpClientConfig):
    """Write the constants that `simulate` and `plan` need, from what a running worker has learned.

    Every worker learns how long its steps take. With --frontend-url, this command sends loads to
    the worker for --seconds: prompts of all lengths up to a full step, 1 to 252 at a time.
    Otherwise, the worker must have had loads of your shapes, at low and high rates. An aggregated
    worker learns both kinds of steps; it must be the only worker of its model.

    examples:
      %(prog)s openai/gpt-oss-120b --url http://localhost:9090 --gpu h200 --out constants.yaml \\
        --frontend-url http://localhost:8000
      %(prog)s openai/gpt-oss-120b --url http://localhost:9090 --gpu h200 --out constants.yaml
    exit status: 0, 1 if a process is unreachable, a request fails or the worker has learned too
    little, 2 for a bad command line
    """

    model: NonEmpty = option("model", ..., positional=True, help="Model that the worker serves.")
    url: ServerUrl = option(
        "HTTP and routing", ..., is_address=True, help="Address of the worker's --system-port."
    )
    frontend_url: ServerUrl | None = option(
        "HTTP and routing",
        None,
        is_address=True,
        help="Address of a frontend that serves only this worker: send loads through it first.",
    )
    seconds: Annotated[float, Field(ge=1, le=3600)] = option(
        "load", 150.0, help="How long the loads take."
    )
    gpu: NonEmpty = option("engine", ..., help="GPU model of the worker, such as h200.")
    engine: NonEmpty = option("engine", "vllm", help="Engine of the worker.")
    engine_version: NonEmpty = option("engine", "unknown", help="Release of the worker's engine.")
    tensor_parallel_size: PositiveInt = option("engine", 1, help="GPUs of the worker.")
    kv_block_size: PositiveInt = option(
        "engine",
        16,
        help="Tokens per KV block of the worker. Aggregated workers of vLLM have 16.",
    )
    max_num_tokens: TokenCount = option(
        "engine", 8192, help="Maximum prompt tokens in one step of the worker."
    )
    max_batch_size: PositiveInt = option(
        "engine", 256, help="Maximum requests in one step of the worker."
    )
    out: Path = option("process", ..., help="YAML file to write, for --constants.")


class SimulateConfig(LimitsConfig):
    """Run a load on a deployment file in virtual time, without starting it.

    The router, the request flow, all limits and queues are the real ones. Engines are the mock
    engine, with the times that a model needs on a GPU. Equal commands print equal figures.

    examples:
      %(prog)s deploy/local/gpt-oss-120b-2gpu-vllm.yaml --gpu h200 --shape 8192/256 --rate 4
      %(prog)s deployment.yaml --gpu h200 --shape 2000/600 --rate 8 --requests 1000
      %(prog)s deployment.yaml --gpu h200 --trace conversation_trace.jsonl.gz --speed 2
    A trace has the format of Mooncake: timestamp (ms), input_length, output_length, hash_ids.
    exit status: 0, 2 for a bad command line, deployment or trace
    """

    deployment: Path = option(
        "process",
        ...,
        positional=True,
        help="YAML file that lists frontend and workers, as for launch.",
    )
    trace: Path | None = option(
        "load", None, help="Requests of this trace (JSON lines, may end with .gz)."
    )
    speed: PositiveFloat = option(
        "load", 1.0, help="How many times as fast as in the trace its requests come."
    )
    shape: NonEmpty | None = option(
        "load",
        None,
        help="Tokens of a prompt and of its answer, such as 8192/256, instead of a trace.",
    )
    rate: PositiveFloat | None = option(
        "load", None, help="Requests per second of --shape. They come independently (Poisson)."
    )
    concurrency: RequestCount | None = option(
        "load",
        None,
        help="Instead of --rate, so many requests of --shape at any time: one begins when another"
        " ends.",
    )
    requests: RequestCount | None = option(
        "load", None, help="Number of requests. Default: all of a trace, 500 of a shape."
    )
    seed: NonNegativeInt = option("load", 1, help="Seed of arrivals and of all random choices.")
    frontend_ms: NonNegativeFloat | None = option(
        "load",
        None,
        help="Milliseconds of a request outside of engines: HTTP, tokenization and messages."
        " Default: that of the constants, 0 with the mock engine.",
    )

    @model_validator(mode="after")
    def _load_is_complete(self) -> SimulateConfig:
        if (self.trace is None) == (self.shape is None):
            raise ValueError("the load is missing or given twice; give --trace or --shape")
        if self.shape is not None and (self.rate is None) == (self.concurrency is None):
            raise ValueError("--shape needs either --rate or --concurrency")
        if self.trace is not None and not (self.rate is None and self.concurrency is None):
            raise ValueError("a trace has its own times; use --speed instead of --rate")
        return self


class PlanConfig(LimitsConfig):
    """Say which topology keeps the most requests within their limits, or that disaggregation does
    not pay.

    It simulates aggregated workers and all splits into prefill and decode workers, at a quarter of
    the rate up to twice the rate. Goodput is the number of requests per second and GPU that keep
    their limits, by two definitions: TTFT and mean gap, TTFT and worst gap.

    examples:
      %(prog)s openai/gpt-oss-120b --gpu h200 --gpus 4 --shape 8192/256 --rate 8
      %(prog)s openai/gpt-oss-120b --gpu h200 --gpus 2 --shape 2000/600 --rate 4 --out plan
    exit status: 0, 2 for a bad command line, or without constants
    """

    model: NonEmpty = option(
        "model", ..., positional=True, help="Model folder, or ORG/NAME on the Hugging Face Hub."
    )
    engine: NonEmpty = option("engine", "vllm", help="Inference engine: vllm or trtllm.")
    gpus: PositiveInt = option("engine", 2, help="GPUs of all workers.")
    tensor_parallel_size: PositiveInt | None = option(
        "engine", None, help="GPUs of each worker. Default: those of the first constants."
    )
    kv_block_size: PositiveInt | None = option(
        "engine", None, help="Tokens per KV block. Default: that of the constants."
    )
    shape: NonEmpty = option(
        "load", ..., help="Tokens of a prompt and of its answer, such as 8192/256."
    )
    rate: PositiveFloat = option("load", ..., help="Requests per second of the whole deployment.")
    requests: RequestCount = option("load", 300, help="Requests of each simulation.")
    seeds: PositiveInt = option(
        "load",
        3,
        help="Simulations of each topology and rate, each with other arrivals. Goodput is printed"
        " with its range.",
    )
    decide_by: Literal["mean-gap", "worst-gap"] = option(
        "load", "mean-gap", help="The definition of goodput by which the topology is chosen."
    )
    out: Path | None = option(
        "process",
        None,
        help="Folder for deployment.yaml, with the chosen topology, and mock.yaml, which imitates"
        " it without a GPU. Both are for `dynamo-trtllm launch`.",
    )
    plot: Path | None = option(
        "process",
        None,
        help="SVG file for a chart of goodput by topology and rate, by both definitions. It needs"
        " matplotlib.",
    )
