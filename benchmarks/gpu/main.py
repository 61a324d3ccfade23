"""GPU benchmarks: runs the selected steps, writes a result file after each, and prints a table at
the end.

The run ends after --budget-s. A step without enough time fails, and the table says so.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..deployment import NotReady
from . import overhead, parity, scenario, vllm_router
from .deployment import GpuDeployment, phases
from .machine import gpu_names
from .model import FULL_LAYERS, write_model
from .plan import MODEL_NAME, STEP_TOKENS, Plan, disaggregated, replicas
from .report import table
from .result import Result, Row, make_result, write

STEPS = ("startup", "parity", "shapes", "cancels", "kill", "overhead", "vllm-router")
_DEFAULT = tuple(step for step in STEPS if step != "vllm-router")  # starts engines of its own
# steps that need this deployment
_DISAGGREGATED = ("startup", "parity", "shapes", "cancels", "kill", "vllm-router")
_AGGREGATED = ("startup", "parity", "shapes")
_MIN_START_S = 30.0  # no engine starts faster
_ROUND_S = 60.0  # of the overhead step, both arms
_QUICK = scenario.Sizes(
    parity_prompts=12,
    longest=6000,
    parity_osl=16,
    parity_concurrency=6,
    shapes=((1000, 64, 8),),
    cancel_requests=60,
    cancel_isl=2000,
    overhead_isl=2048,
    overhead_osl=64,
    overhead_concurrency=16,
    overhead_requests=48,
    overhead_rounds=1,
    alone_requests=8,
    shape_s=15.0,
)
_TINY = replace(
    _QUICK,
    longest=200,
    shortest=20,
    shapes=((100, 32, 4),),
    cancel_isl=100,
    overhead_isl=128,
    parity_prompts=8,
)


class Run:
    """The steps of one command."""

    def __init__(self, args: argparse.Namespace, plan: Plan, sizes: scenario.Sizes) -> None:
        self._only = set(args.only)
        self._victims: Sequence[str] = args.victims
        self._places: int = args.places
        self._plan = plan
        self._sizes = sizes
        self._out: Path = args.out
        self._until_s: float = time.monotonic() + args.budget_s
        self.results: list[Result] = []

    def left_s(self) -> float:
        """Return the rest of the budget in seconds."""
        return self._until_s - time.monotonic()

    async def all(self) -> None:
        """Run the steps.

        The failure of a step becomes a row of the table, and the next steps run.
        """
        reference: parity.Reference | None = None
        if self._only & set(_AGGREGATED):
            reference = await self._aggregated()
        pair: scenario.ShapeResults = {}
        if self._only & set(_DISAGGREGATED):
            pair = await self._disaggregated(reference)
        if "overhead" in self._only:
            until_s = self._until_s - _ROUND_S
            work = overhead.run(
                self._plan, self._sizes, self._out / "logs", places=self._places, until_s=until_s
            )
            await self._step("overhead", work)
        if "vllm-router" in self._only:
            await self._step(
                "shapes-vllm-router",
                vllm_router.run(self._plan, self._sizes, self._out / "logs", pair),
            )

    async def _aggregated(self) -> parity.Reference | None:
        """Run the steps of the aggregated deployment.

        Return its answers to the prompts of parity.
        """
        deployment = GpuDeployment(
            self._plan, replicas(self._plan), self._out / "logs" / "aggregated.log"
        )
        reference: parity.Reference | None = None
        try:
            if not await self._start("aggregated", deployment):
                return reference
            if "parity" in self._only:
                async with asyncio.timeout(max(1.0, self.left_s())):
                    reference = await parity.reference(deployment.url, self._sizes)
            if "shapes" in self._only:
                await self._step("shapes-aggregated", self._shapes(deployment, "aggregated"))
        except (NotReady, OSError, TimeoutError) as exc:
            self._record("aggregated", [_failed("aggregated deployment", exc)], {}, 0.0)
        finally:
            deployment.stop()
        return reference

    async def _disaggregated(self, reference: parity.Reference | None) -> scenario.ShapeResults:
        """Run the steps of the disaggregated deployment. Return the results of its shapes."""
        result: scenario.ShapeResults = {}
        deployment = GpuDeployment(
            self._plan, disaggregated(self._plan), self._out / "logs" / "disaggregated.log"
        )
        try:
            if not await self._start("disaggregated", deployment):
                return result
            if reference is not None:
                await self._step("parity", parity.parity(deployment.url, reference, self._sizes))
            if "cancels" in self._only:
                await self._step("cancels", scenario.cancellations(deployment, self._sizes))
            if self._only & {"shapes", "vllm-router"}:
                result = await self._step(
                    "shapes-disaggregated", self._shapes(deployment, "disaggregated")
                )
            for victim in self._victims if "kill" in self._only else ():
                await self._step(
                    f"kill-{victim}", scenario.kill_worker(deployment, victim, self._sizes)
                )
        finally:
            deployment.stop()
        return result

    async def _shapes(self, deployment: GpuDeployment, arm: str) -> scenario.ScenarioResult:
        result = await scenario.measure_shapes(deployment.url, self._sizes)
        return scenario.shape_rows(arm, result, len(self._plan.gpus)), dict(result)

    async def _start(self, name: str, deployment: GpuDeployment) -> bool:
        """Start a deployment and record how long it took. Return False if it failed.

        Blocks in this thread, because the servers end with the thread that started them.
        """
        if self.left_s() < _MIN_START_S:
            self._record(
                f"startup-{name}",
                [_failed(f"{name} deployment", NotReady("no time left"))],
                {},
                0.0,
            )
            return False
        say(f"starting the {name} deployment")
        try:
            deployment.start()
        except NotReady as exc:
            self._record(
                f"startup-{name}", [_failed(f"{name} deployment", exc)], {}, deployment.started_s
            )
            return False
        rows = [
            Row(
                what=f"{name} deployment: all processes ready",
                value=f"{deployment.started_s:.1f} s",
            )
        ]
        result = phases(deployment.lines)
        rows += [Row(what=f"{name}: {phase}", value=line) for phase, line in result.items()]
        self._record(f"startup-{name}", rows, dict(result), deployment.started_s)
        return True

    async def _step(self, name: str, work: Awaitable[scenario.ScenarioResult]) -> dict[str, Any]:
        """Run a step and record its rows. Return its details, or {} if it failed."""
        begun_s = time.monotonic()
        say(f"{name}: starting, {self.left_s():.0f} s left")
        try:
            async with asyncio.timeout(max(1.0, self.left_s())):
                rows, detail = await work
        except TimeoutError:
            rows = [Row(what=name, value="stopped: no time left", bar="a result", met=False)]
            detail = {}
        except (NotReady, OSError) as exc:
            rows = [_failed(name, exc)]
            detail = {}
        self._record(name, rows, detail, time.monotonic() - begun_s)
        return detail

    def _record(self, step: str, rows: list[Row], detail: dict[str, Any], seconds: float) -> None:
        result = make_result(
            step, setup=self._plan.setup(), seconds=seconds, rows=rows, detail=detail
        )
        write(result, self._out / f"{step}.json")
        self.results.append(result)
        say(table([result]))


def _failed(what: str, exc: BaseException) -> Row:
    return Row(
        what=what, value=f"failed: {type(exc).__name__}: {exc}"[-1500:], bar="a result", met=False
    )


def say(text: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `plan_of` reads, besides `only`."""
    add = parser.add_argument
    add(
        "--engine",
        choices=("vllm", "torch", "mock"),
        default="vllm",
        help="inference engine (default: vllm)",
    )
    add("--model", help="model folder; default: gpt-oss-120b's architecture with dummy weights")
    add(
        "--layers",
        type=int,
        default=FULL_LAYERS,
        help="layers of the model with dummy weights (default: 36, all)",
    )
    add("--eager", action="store_true", help="disable CUDA graphs: faster start, slower tokens")
    add("--gpus", help="comma-separated GPU numbers; default: all that nvidia-smi lists")
    add("--prefix-caching", action="store_true", help="enable prefix caching")
    add(
        "--max-num-tokens",
        type=int,
        default=STEP_TOKENS,
        help=f"most tokens of a step (default: {STEP_TOKENS})",
    )
    add(
        "--ready-s",
        type=float,
        default=900.0,
        help="longest wait for engines to become ready (default: 900)",
    )
    add("--engine-args", type=_object, default={}, help="JSON object with engine arguments")
    add("--compile-cache", type=Path, help="folder for compiled kernels, which a later run uses")
    add("--warm-up-budget-s", type=float, help="of the workers, for a short start")


def arguments(
    argv: Sequence[str] | None = None,
    *,
    prog: str = f"python -m {__package__}",
    description: str | None = __doc__,
    **defaults: object,
) -> argparse.Namespace:
    """Parse the command line.

    `defaults` override the defaults of flags. Exit with status 2 on errors.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    plan_arguments(parser)
    add(
        "--only",
        default=",".join(_DEFAULT),
        help=(
            f"comma-separated steps out of {', '.join(STEPS)}; vllm-router: the shapes on vLLM's"
            " own servers"
        ),
    )
    add(
        "--victims",
        default="decode,prefill",
        help="workers that the step kill kills, comma-separated",
    )
    add("--shapes", help="comma-separated ISL/OSL/CONCURRENCY; default: those of the Dynamo guides")
    add(
        "--places",
        type=int,
        choices=(1, 2),
        default=2,
        help="overhead: 2 also measures with the GPUs swapped",
    )
    add(
        "--quick", action="store_true", help="few and short requests, to test that everything works"
    )
    add(
        "--budget-s",
        type=float,
        default=570.0,
        help="stop all steps after this time (default: 570)",
    )
    add(
        "--out",
        type=Path,
        default=Path("benchmarks/results/gpu/latest"),
        help="folder for the result files",
    )
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    args.victims = args.victims.split(",")
    for given, known in ((args.only, STEPS), (args.victims, ("prefill", "decode"))):
        if wrong := sorted(set(given) - set(known)):
            parser.error(f"unknown: {', '.join(wrong)}; choose from {', '.join(known)}")
    return args


def _object(text: str) -> dict[str, Any]:
    import json

    result = json.loads(text)
    if not isinstance(result, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return result


def plan_of(args: argparse.Namespace, folder: Path | None) -> Plan:
    """Return the plan.

    Write a model folder into `folder`, if there is one and a model is needed.
    """
    if args.engine == "mock":
        return Plan(engine="mock", model=MODEL_NAME, extra=args.engine_args, ready_s=args.ready_s)
    if args.engine == "torch":
        model = args.model or "tiny-gpt-oss"
        return Plan(engine="torch", model=model, extra=args.engine_args, ready_s=args.ready_s)
    listed = len(gpu_names())
    gpus = tuple(int(gpu) for gpu in args.gpus.split(",")) if args.gpus else tuple(range(listed))
    needs_tokenizer = bool({"overhead", "vllm-router"} & set(args.only))
    model = args.model or MODEL_NAME
    if args.model is None and folder is not None:
        model = str(write_model(folder / MODEL_NAME, layers=args.layers, tokenizer=needs_tokenizer))
    return Plan(
        engine="vllm",
        model=model,
        gpus=gpus,
        layers=args.layers,
        is_eager=args.eager,
        prefix_caching=args.prefix_caching,
        max_num_tokens=args.max_num_tokens,
        compile_cache=None if args.compile_cache is None else str(args.compile_cache.absolute()),
        warm_up_budget_s=args.warm_up_budget_s,
        extra=args.engine_args,
        ready_s=args.ready_s,
    )


def sizes_of(args: argparse.Namespace) -> scenario.Sizes:
    """Return the sizes for the engine and the flags."""
    chosen = _TINY if args.engine == "torch" else _QUICK if args.quick else scenario.Sizes()
    if not args.shapes:
        return chosen
    shapes = tuple(_shape(text) for text in args.shapes.split(","))
    return replace(chosen, shapes=shapes)


def _shape(text: str) -> tuple[int, int, int]:
    isl, osl, concurrency = (int(part) for part in text.split("/"))
    return isl, osl, concurrency


def main() -> None:
    """Run the benchmarks. The exit status is 1 if a target was not met or a step failed."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        run = Run(args, plan_of(args, Path(folder)), sizes_of(args))
        asyncio.run(run.all())
    say("\n" + table(run.results))
    raise SystemExit(any(row.met is False for result in run.results for row in result.rows))
