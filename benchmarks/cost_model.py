"""Measures how well the cost model of a worker predicts steps and first tokens, on loads that it
has not seen.

    python -m benchmarks.cost_model mock
    python -m benchmarks.cost_model torch
    python -m benchmarks.cost_model vllm --compile-cache /tmp/cc

One aggregated worker runs in this process, without a network; that of the mock engine in simulated
time. It learns from closed-loop loads with some lengths of prompts and numbers of concurrent
requests. Then it runs loads with others. Each prediction is made before its measurement is learned:
"online" while the worker goes on learning, as it does in service, "frozen" with the coefficients
and intervals at the end of the first loads. first_token is predicted when a request is sent, with
the queue. The columns are the median and the 90th percentile of the relative error, and the share
of times within the predicted interval, which should be 85 to 95%.

vllm: needs vLLM; without --model, gpt-oss-120b's architecture with dummy weights on the first GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import uvloop

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.capabilities import MeasuresSteps
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.models import resolve
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.clocks import SYSTEM_CLOCKS, Clocks
from dynamo_trtllm.protocol.cost_model import CostModel, EngineWork, StepSample
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    Instance,
    ModelDeploymentCard,
    Role,
    Sampling,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent
from dynamo_trtllm.simulate.memory_transfers import MemoryBackend
from dynamo_trtllm.simulate.virtual_time import run_virtual, virtual_clocks
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission

from .gpu.model import FULL_LAYERS, write_model
from .gpu.plan import ENVIRONMENT

_LEARN_S = 1.01  # a worker learns once a second
_KINDS = ("decode_step", "prefill_step", "first_token")


class Loads(NamedTuple):
    """Lengths of prompts and numbers of concurrent requests."""

    prompts: Sequence[int]
    concurrency: Sequence[int]


_LEARNED = {
    "mock": Loads((100, 500, 2000), (1, 4, 16, 48)),
    "torch": Loads((32, 128, 480), (1, 3, 8)),
    "vllm": Loads((256, 1024, 4096), (1, 4, 16, 64)),
}
_UNSEEN = {
    "mock": Loads((200, 1000, 3000), (2, 8, 32)),
    "torch": Loads((64, 256, 400), (2, 5, 12)),
    "vllm": Loads((512, 2048, 8192), (2, 8, 32)),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "mock": {
        "step_s": 0.02,
        "decode_request_s": 5e-4,
        "context_token_s": 2e-7,
        "prefill_token_s": 1e-4,
        "prefill_tokens_per_step": 2048,
        "step_noise": 0.05,
    },
    "torch": {"max_batch_size": 16, "enable_prefix_caching": False},
    "vllm": {"enable_prefix_caching": False},
}


class Judged(NamedTuple):
    """How good a prediction was."""

    error: float  # of the predicted time, as a share of the measured one
    is_within: bool  # the measured time was within the interval


@dataclass
class Bench:
    """One worker without a network."""

    engine: Engine
    service: WorkerService
    instance: Instance
    steps: deque[StepSample]
    clocks: Clocks
    model: CostModel | None = None  # the newest
    judged: defaultdict[str, list[Judged]] = field(default_factory=lambda: defaultdict(list))
    frozen: CostModel | None = None
    prefix: str = "learned"  # of the loads that run
    num_requests: int = 0
    report_number: int = 0  # of the last report
    new_requests: int = 0  # that were sent since that report
    new_tokens: int = 0  # of the prompts of these requests
    samples: list[dict[str, Any]] = field(default_factory=list)  # all that was measured, in order

    def on_outcome(self, kind: str, ratio: float, is_covered: bool) -> None:
        """Take the outcome of an online prediction.

        That of the first token is replaced by the router's view of it.
        """
        if kind != "first_token":
            self.judged[f"{self.prefix} {kind} online"].append(
                Judged(abs(1 / ratio - 1), is_covered)
            )

    def learn(self) -> None:
        """Evaluate the frozen model on the last steps, then let the worker learn from them, and
        report.
        """
        self.samples.extend({"loads": self.prefix, "step": step._asdict()} for step in self.steps)
        if self.frozen is not None:
            for step in self.steps:
                fit = self.frozen.prefill if step.prefill_tokens else self.frozen.decode
                if fit is not None:
                    kind = "prefill_step" if step.prefill_tokens else "decode_step"
                    ratio = step.seconds / fit.predict(step.features)
                    within = fit.low <= ratio <= fit.high
                    self.judged[f"{self.prefix} {kind} frozen"].append(
                        Judged(abs(1 / ratio - 1), within)
                    )
        self.model = self.service.load_report_with_cost().cost

    async def ask(self, source: random.Random, prompt_tokens: int, output_tokens: int) -> None:
        """Run one request, and judge the predictions of its first token.

        Args:
            source: chooses the tokens of the prompt.
            prompt_tokens: tokens of the prompt.
            output_tokens: tokens of the output.
        """
        self.num_requests += 1
        usual_ids = range(100, min(2000, self.instance.card.vocab_size))
        request = GenerateRequest(
            request_id=f"{self.num_requests:016x}",
            model=self.instance.card.name,
            token_ids=token_ids(source.choices(usual_ids, k=prompt_tokens)),
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            deadline=self.clocks.epoch() + 600,
        )
        begun_s = self.clocks.monotonic()
        first_s = 0.0
        work = self._work(prompt_tokens)
        models = (("online", self.model), ("frozen", self.frozen))
        predictions = [
            (how, model.first_token_s(prompt_tokens, 0, work), model.first_token)
            for how, model in models
            if model is not None and model.first_token is not None
        ]
        ended = asyncio.get_running_loop().create_future()

        def on_event(event: StreamEvent) -> None:
            nonlocal first_s
            if isinstance(event, DynamoError):
                ended.set_exception(event)
                return
            if event.token_ids and not first_s:
                first_s = self.clocks.monotonic()
            if isinstance(event, Chunk) and event.finish_reason is not None:
                ended.set_result(None)

        self.service.generate(request, on_event)
        await ended
        taken_s = first_s - begun_s
        call = {"seconds": taken_s, "prompt_tokens": prompt_tokens, "work": work._asdict()}
        self.samples.append({"loads": self.prefix, "call": call})
        for how, predicted_s, fit in predictions:
            if math.isfinite(predicted_s):
                within = fit.low * predicted_s <= taken_s <= fit.high * predicted_s
                judged = Judged(abs(predicted_s / taken_s - 1), within)
                self.judged[f"{self.prefix} first_token {how}"].append(judged)

    def _work(self, prompt_tokens: int) -> EngineWork:
        """Return what the worker reports, and the prompts that were sent since, before this one."""
        report = self.service.load_report()
        if report.number != self.report_number:
            self.report_number = report.number
            self.new_tokens = 0
            self.new_requests = 0
        work = report.work(
            Role.AGGREGATED, more_tokens=self.new_tokens, more_requests=self.new_requests
        )
        self.new_tokens += prompt_tokens
        self.new_requests += 1
        return work

    async def run(self, loads: Loads, seconds: float, seed: int) -> None:
        """Run a load with each number of concurrent requests for some seconds."""
        for concurrency in loads.concurrency:
            until_s = self.clocks.monotonic() + seconds
            lanes = [
                self._lane(loads.prompts, until_s, seed + lane, lane / concurrency)
                for lane in range(concurrency)
            ]
            learning = asyncio.create_task(self._keep_learning())
            try:
                await asyncio.gather(*lanes)
            finally:
                learning.cancel()

    async def _lane(
        self, prompts: Sequence[int], until_s: float, seed: int, delay_s: float
    ) -> None:
        source = random.Random(seed)
        await asyncio.sleep(delay_s)
        while self.clocks.monotonic() < until_s:
            await self.ask(source, source.choice(prompts), source.randint(2, 60))
            if source.random() < 0.2:
                await asyncio.sleep(source.random() * 0.2)

    async def _keep_learning(self) -> None:
        while True:
            await asyncio.sleep(_LEARN_S)
            self.learn()


def instance_of(info: EngineInfo) -> Instance:
    """Return what the worker would register."""
    card = ModelDeploymentCard(
        name="bench",
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        renderer=info.renderer,
    )
    return Instance(
        id=1,
        namespace="bench",
        component="bench",
        endpoint="generate",
        subject="bench",
        role=Role.AGGREGATED,
        engine=info.engine,
        card=card,
        layout=info.layout,
        limits=info.limits,
    )


@contextmanager
def configured(args: argparse.Namespace) -> Iterator[WorkerConfig]:
    """Yield the worker's configuration, whose model folder exists in this context."""
    values = {
        "engine": args.engine,
        "disaggregation_mode": "prefill_and_decode",
        "served_model_name": "bench",
    }
    values["override_engine_args"] = _ARGUMENTS[args.engine] | args.engine_args
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.engine == "torch":
            model = str(resolve(model or "tiny-gpt-oss"))
        elif args.engine == "vllm":
            os.environ.update(ENVIRONMENT)
            values["override_engine_args"] = {"load_format": "dummy"} | values[
                "override_engine_args"
            ]
            if model is None:
                model = str(write_model(Path(folder, "bench"), layers=args.layers))
                values |= {"max_seq_len": 40_960, "max_num_tokens": 16_384, "max_batch_size": 256}
            if args.compile_cache is not None:
                values["compile_cache"] = args.compile_cache.absolute()
        yield WorkerConfig(model_path=model or "mock", **values)


def _engine(config: WorkerConfig, clocks: Clocks, seed: int) -> Engine:
    """Return the engine: the mock engine in virtual time, or another one."""
    if config.engine != "mock":
        return create_engine(config, instance_id=1)
    backend = MemoryBackend({})
    return MockEngine(config, instance_id=1, backend=backend, clocks=clocks, seed=seed)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all loads. Return the results."""
    clocks = virtual_clocks() if args.engine == "mock" else SYSTEM_CLOCKS
    with configured(args) as config:
        engine = _engine(config, clocks, args.seed)
        try:
            info = await engine.start()
            instance = instance_of(info)
            metrics = WorkerMetrics()
            prior = info.cost_prior if args.prior else None
            cost = prior or CostModel(
                step_tokens=getattr(info.cost_prior, "step_tokens", 0) or info.limits.max_num_tokens
            )
            assert isinstance(engine, MeasuresSteps)
            bench = Bench(engine, None, instance, engine.steps, clocks)  # type: ignore[arg-type]
            metrics.observe_prediction = bench.on_outcome  # type: ignore[method-assign]
            bench.service = WorkerService(
                engine,
                instance,
                WorkerAdmission(),
                files={},
                metrics=metrics,
                cost_prior=cost,
                clocks=clocks,
            )
            await bench.run(Loads(args.prompts, args.concurrency), args.load_s, args.seed)
            bench.learn()
            bench.frozen = bench.model
            bench.prefix = "unseen"
            await bench.run(
                Loads(args.unseen_prompts, args.unseen_concurrency), args.load_s, args.seed + 1000
            )
            bench.learn()
        finally:
            await engine.aclose()
    if args.samples is not None:
        args.samples.write_text("".join(json.dumps(sample) + "\n" for sample in bench.samples))
    return {
        "engine": args.engine,
        "rows": rows(bench.judged),
        "model": msgspec.to_builtins(bench.frozen),
        "requests": bench.num_requests,
    }


def rows(judged: dict[str, list[Judged]]) -> list[dict[str, Any]]:
    """Return a row per kind of load, time and prediction."""
    found = []
    for loads in ("learned", "unseen"):
        for kind in _KINDS:
            for how in ("online", "frozen"):
                values = judged.get(f"{loads} {kind} {how}", [])
                if not values:
                    continue
                errors = sorted(value.error for value in values)
                num_within = sum(value.is_within for value in values)
                found.append(
                    {
                        "loads": loads,
                        "time": kind,
                        "prediction": how,
                        "count": len(values),
                        "error_p50": median(errors),
                        "error_p90": errors[int(0.9 * len(errors))],
                        "within": num_within / len(values),
                    }
                )
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("engine", choices=sorted(_LEARNED))
    add("--model", help="model folder, or for torch the name of a bundled model")
    add(
        "--layers",
        type=int,
        default=FULL_LAYERS,
        help="vllm without --model: layers of the model (default: 36)",
    )
    add("--engine-args", type=json.loads, default={}, help="JSON object with engine arguments")
    add(
        "--compile-cache",
        type=Path,
        help="vllm: folder for compiled kernels, which a later run uses",
    )
    add(
        "--prior",
        action="store_true",
        help="begin with the prior of the engine's arguments, if it has one",
    )
    add("--load-s", type=float, default=10.0, help="seconds per load (default: 10)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="file for the results (JSON)")
    add(
        "--samples",
        type=Path,
        help="file for every measured step and call (a JSON object per line)",
    )
    for name, of in (("", "the loads to learn from"), ("unseen-", "the other loads")):
        add(f"--{name}prompts", type=int, nargs="+", help=f"tokens of the prompts of {of}")
        add(
            f"--{name}concurrency",
            type=int,
            nargs="+",
            help=f"concurrent requests of {of}, one load each",
        )
    args = parser.parse_args(argv)
    for prefix, loads in (("", _LEARNED[args.engine]), ("unseen_", _UNSEEN[args.engine])):
        for name, default in loads._asdict().items():
            if getattr(args, prefix + name) is None:
                setattr(args, prefix + name, default)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print a table."""
    args = arguments(argv)
    results = run_virtual(measure(args)) if args.engine == "mock" else uvloop.run(measure(args))
    print("loads    time          prediction  count  error p50   p90  within")
    for row in results["rows"]:
        print(
            f"{row['loads']:8} {row['time']:13} {row['prediction']:10} {row['count']:6}"
            f"{row['error_p50']:10.1%} {row['error_p90']:6.1%} {row['within']:6.1%}"
        )
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
