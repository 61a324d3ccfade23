"""One run on a GPU machine: what was asked for, step by step, a result file after each, a table at the end.

It keeps within --budget-s: a step for which there is no time is named and left out.
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

from benchmarks.gpu import overhead, parity, proxy, steps
from benchmarks.gpu.deployed import Deployed, phases
from benchmarks.gpu.machine import gpu_names
from benchmarks.gpu.model import FULL_LAYERS, write_model
from benchmarks.gpu.plan import MODEL_NAME, Plan, disaggregated, replicas
from benchmarks.gpu.report import table
from benchmarks.gpu.result import Result, Row, result, write
from benchmarks.launched import NotServing

STEPS = ("startup", "parity", "shapes", "cancels", "kill", "overhead", "proxy")
_DEFAULT = tuple(step for step in STEPS if step != "proxy")  # it runs the pair's shapes on engines of its own
_PAIR = ("startup", "parity", "shapes", "cancels", "kill", "proxy")
_WHOLE = ("startup", "parity", "shapes")
_LEAST_S = 30.0  # no engine comes up in less
_ROUND_S = 60.0  # of the overhead, both arms
_QUICK = steps.Sizes(
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
    _QUICK, longest=200, shortest=20, shapes=((100, 32, 4),), cancel_isl=100, overhead_isl=128, parity_prompts=8
)


class Run:
    """The steps of one command."""

    def __init__(self, args: argparse.Namespace, plan: Plan, sizes: steps.Sizes) -> None:
        self._only = set(args.only)
        self._victims: Sequence[str] = args.victims
        self._places: int = args.places
        self._plan = plan
        self._sizes = sizes
        self._out: Path = args.out
        self._until_s: float = time.monotonic() + args.budget_s
        self.results: list[Result] = []

    def left_s(self) -> float:
        """Of the budget, in seconds."""
        return self._until_s - time.monotonic()

    async def all(self) -> None:
        """What a step raises is its row; the next ones run."""
        wanted: parity.Reference | None = None
        if self._only & set(_WHOLE):
            wanted = await self._aggregated()
        pair: steps.Shapes = {}
        if self._only & set(_PAIR):
            pair = await self._disaggregated(wanted)
        if "overhead" in self._only:
            until_s = self._until_s - _ROUND_S
            work = overhead.run(self._plan, self._sizes, self._out / "logs", places=self._places, until_s=until_s)
            await self._step("overhead", work)
        if "proxy" in self._only:
            await self._step("shapes-proxy", proxy.run(self._plan, self._sizes, self._out / "logs", pair))

    async def _aggregated(self) -> parity.Reference | None:
        """What it answered to the prompts of parity."""
        deployed = Deployed(self._plan, replicas(self._plan), self._out / "logs" / "aggregated.log")
        wanted: parity.Reference | None = None
        try:
            if not await self._up("aggregated", deployed):
                return wanted
            if "parity" in self._only:
                async with asyncio.timeout(max(1.0, self.left_s())):
                    wanted = await parity.reference(deployed.url, self._sizes)
            if "shapes" in self._only:
                await self._step("shapes-aggregated", self._shapes(deployed, "aggregated"))
        except (NotServing, OSError, TimeoutError) as exc:
            self._note("aggregated", [_failed("aggregated deployment", exc)], {}, 0.0)
        finally:
            deployed.stop()
        return wanted

    async def _disaggregated(self, wanted: parity.Reference | None) -> steps.Shapes:
        """The figures of its shapes."""
        found: steps.Shapes = {}
        deployed = Deployed(self._plan, disaggregated(self._plan), self._out / "logs" / "disaggregated.log")
        try:
            if not await self._up("disaggregated", deployed):
                return found
            if wanted is not None:
                await self._step("parity", parity.parity(deployed.url, wanted, self._sizes))
            if "cancels" in self._only:
                await self._step("cancels", steps.cancels(deployed, self._sizes))
            if self._only & {"shapes", "proxy"}:
                found = await self._step("shapes-disaggregated", self._shapes(deployed, "disaggregated"))
            for victim in self._victims if "kill" in self._only else ():
                await self._step(f"kill-{victim}", steps.kill(deployed, victim, self._sizes))
        finally:
            deployed.stop()
        return found

    async def _shapes(self, deployed: Deployed, arm: str) -> steps.Found:
        found = await steps.shapes(deployed.url, self._sizes)
        return steps.shape_rows(arm, found, len(self._plan.gpus)), dict(found)

    async def _up(self, name: str, deployed: Deployed) -> bool:
        """Starts it here: its servers die with the thread that started them. Tells how long it took, and on what."""
        if self.left_s() < _LEAST_S:
            self._note(f"startup-{name}", [_failed(f"{name} deployment", NotServing("no time is left"))], {}, 0.0)
            return False
        say(f"starting the {name} deployment")
        try:
            deployed.start()
        except NotServing as exc:
            self._note(f"startup-{name}", [_failed(f"{name} deployment", exc)], {}, deployed.started_s)
            return False
        rows = [Row(what=f"{name} deployment: all serve, pair warm", value=f"{deployed.started_s:.1f} s")]
        found = phases(deployed.lines)
        rows += [Row(what=f"{name}: {phase}", value=line) for phase, line in found.items()]
        self._note(f"startup-{name}", rows, dict(found), deployed.started_s)
        return True

    async def _step(self, name: str, work: Awaitable[steps.Found]) -> dict[str, Any]:
        """Its figures; none if it failed."""
        begun_s = time.monotonic()
        say(f"{name}: begins, {self.left_s():.0f} s left")
        try:
            async with asyncio.timeout(max(1.0, self.left_s())):
                rows, detail = await work
        except TimeoutError:
            rows, detail = [Row(what=name, value="cut off: the time was over", bar="an answer", met=False)], {}
        except (NotServing, OSError) as exc:
            rows, detail = [_failed(name, exc)], {}
        self._note(name, rows, detail, time.monotonic() - begun_s)
        return detail

    def _note(self, step: str, rows: list[Row], detail: dict[str, Any], seconds: float) -> None:
        found = result(step, setup=self._plan.setup(), seconds=seconds, rows=rows, detail=detail)
        write(found, self._out / f"{step}.json")
        self.results.append(found)
        say(table([found]))


def _failed(what: str, exc: BaseException) -> Row:
    return Row(what=what, value=f"failed: {type(exc).__name__}: {exc}"[-1500:], bar="an answer", met=False)


def say(text: str) -> None:
    """Seen at once, also through a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def arguments(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "python -m benchmarks.gpu",
    description: str | None = __doc__,
    **defaults: object,
) -> argparse.Namespace:
    """Return what the command line asks for; `defaults` replace those of flags. Exits with 2 and a line for errors."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=("vllm", "torch", "mock"), default="vllm", help="default: vllm")
    add("--model", help="model folder; default: gpt-oss-120b's architecture with dummy weights")
    add("--layers", type=int, default=FULL_LAYERS, help="layers of the model with dummy weights; default all 36")
    add("--eager", action="store_true", help="no CUDA graphs: ready sooner, slower tokens")
    add("--gpus", help="comma-separated numbers; default all that nvidia-smi lists")
    add(
        "--only",
        default=",".join(_DEFAULT),
        help=f"comma-separated, of {', '.join(STEPS)}; proxy: shapes, beside vLLM's own pair",
    )
    add("--victims", default="decode,prefill", help="of the step kill, one after the other")
    add("--shapes", help="ISL/OSL/CONCURRENCY, comma-separated, instead of the guides'")
    add("--places", type=int, choices=(1, 2), default=2, help="overhead: 2 lets the servers change places")
    add("--prefix-caching", action="store_true", help="on; off, prompts of parity are computed anew each time")
    add("--quick", action="store_true", help="few and short requests: does everything work?")
    add("--budget-s", type=float, default=570.0, help="no step goes on after this")
    add("--ready-s", type=float, default=300.0, help="longest wait for engines to come up")
    add("--engine-args", type=_object, default={}, help="JSON object of engine arguments")
    add("--out", type=Path, default=Path("benchmarks/results/gpu/latest"), help="folder of the result files")
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    args.only, args.victims = args.only.split(","), args.victims.split(",")
    for given, known in ((args.only, STEPS), (args.victims, ("prefill", "decode"))):
        if wrong := sorted(set(given) - set(known)):
            parser.error(f"unknown: {', '.join(wrong)}; there are {', '.join(known)}")
    return args


def _object(text: str) -> dict[str, Any]:
    import json

    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return found


def plan_of(args: argparse.Namespace, folder: Path) -> Plan:
    """Writes the model folder, if one is needed, into `folder`."""
    if args.engine == "mock":
        return Plan(engine="mock", model=MODEL_NAME, extra=args.engine_args, ready_s=args.ready_s)
    if args.engine == "torch":
        model = args.model or "tiny-gpt-oss"
        return Plan(engine="torch", model=model, extra=args.engine_args, ready_s=args.ready_s)
    listed = len(gpu_names())
    gpus = tuple(int(gpu) for gpu in args.gpus.split(",")) if args.gpus else tuple(range(listed))
    needs_tokenizer = bool({"overhead", "proxy"} & set(args.only))
    model = args.model or str(write_model(folder / MODEL_NAME, layers=args.layers, tokenizer=needs_tokenizer))
    return Plan(
        engine="vllm",
        model=model,
        gpus=gpus,
        layers=args.layers,
        is_eager=args.eager,
        prefix_caching=args.prefix_caching,
        extra=args.engine_args,
        ready_s=args.ready_s,
    )


def sizes_of(args: argparse.Namespace) -> steps.Sizes:
    """As much as the engine can take in the time."""
    chosen = _TINY if args.engine == "torch" else _QUICK if args.quick else steps.Sizes()
    if not args.shapes:
        return chosen
    shapes = tuple(_shape(text) for text in args.shapes.split(","))
    return replace(chosen, shapes=shapes)


def _shape(text: str) -> tuple[int, int, int]:
    isl, osl, concurrency = (int(part) for part in text.split("/"))
    return isl, osl, concurrency


def main() -> None:
    """Exit status 1 when a bar was not met or a step failed."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        run = Run(args, plan_of(args, Path(folder)), sizes_of(args))
        asyncio.run(run.all())
    say("\n" + table(run.results))
    raise SystemExit(any(row.met is False for found in run.results for row in found.rows))
