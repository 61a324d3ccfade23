"""Measures the cost of frontend and request plane per token at several loads ("points").

`ours` measures this project alone. `against-dynamo` installs Dynamo's frontend and mock workers
from PyPI once, into a folder outside this repository, runs both side by side and measures them in
turn while the other is idle.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import orjson

from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.support.subprocesses import scratch_folder

from . import dynamo, measure, report, uvicorn_recipe
from .certificate import make_certificate
from .measure import Run
from .ours import LimitedKey, Ours, write_key
from .points import COMPARED, POINTS, Point, by_engines, select
from .stack import NotReady, Recipe, Stack

RESULTS = Path(__file__).parents[1] / "results"


def measure_points(
    points: Sequence[Point],
    sides: Sequence[Recipe],
    repetitions: int,
    runs: list[Run],
    *,
    at_once: bool,
) -> None:
    """Measure all points and append to `runs`.

    The order of the sides alternates with each repetition. With `at_once`, all sides are measured
    at the same time, each with its part of the load.
    """
    for engines, group in by_engines(points):
        with ExitStack() as stack:
            stacks = [stack.enter_context(Stack(side, free_ports(), engines)) for side in sides]
            for repetition in range(repetitions):
                for point in group:
                    measured = [stack for stack in stacks if _is_measured(stack, point)]
                    if repetition % 2:
                        measured.reverse()
                    together = [measured] if at_once else [[stack] for stack in measured]
                    load = point.shared(len(measured)) if at_once else point
                    for group_of_sides in together:
                        for run in measure.run(load, group_of_sides, repetition):
                            runs.append(run)
                            _log(run)


def _is_measured(stack: Stack, point: Point) -> bool:
    # Dynamo's default tokenizer matters for long prompts only.
    return stack.name != "dynamo default" or point.name == "long-32"


def _log(run: Run) -> None:
    figures = run["figures"]
    cost = figures["processes"]["frontend"]["cpu_ms_per_1k_tokens"]
    sys.stderr.write(
        f"{run['point']:<11} {run['side']:<17} #{run['repetition'] + 1}:"
        f" {figures['tokens_per_s']:.0f} tokens/s, frontend {cost:.1f} ms/1k, {figures['ok']} ok,"
        f" {sum(figures['errors'].values())} errors, other processes {run['others_cores']:.2f}"
        " cores\n"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("ours", "against-dynamo"), help="what to measure")
    parser.add_argument(
        "--points",
        default="",
        help=f"comma-separated, of {','.join(point.name for point in POINTS)}",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=None,
        help="repetitions of each point (default: 3; quick: 1)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure few points with few requests, in a minute"
    )
    parser.add_argument(
        "--dynamo-folder",
        type=Path,
        default=dynamo.default_folder(),
        help="folder to install Dynamo into",
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help=(
            "measure all sides at the same time, each with its part of the streams, and print the"
            " ratios of the CPU times of frontends: other work of the machine slows all alike"
        ),
    )
    _add_sides(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    args = parser.parse_args()
    names = [name for name in args.points.split(",") if name]
    if args.what == "against-dynamo" and not names and not args.quick:
        names = list(COMPARED)
    try:
        args.chosen = select(names, quick=args.quick)
    except KeyError as exc:
        parser.error(f"unknown point {exc}")
    return args


def _add_sides(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose what of this project is measured."""
    parser.add_argument(
        "--beside", type=Path, help="checkout of another commit of this project to measure as well"
    )
    parser.add_argument(
        "--mock-engine",
        action="store_true",
        help=(
            "run our workers with the mock engine instead of the runner that vLLM and"
            " TensorRT-LLM use"
        ),
    )
    parser.add_argument(
        "--frontends",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[1],
        metavar="N,N",
        help="numbers of frontend processes to measure, e.g. 1,2,4 (default: 1)",
    )
    parser.add_argument(
        "--with-key",
        action="store_true",
        help="measure a frontend whose clients need an API key with limits as well",
    )
    parser.add_argument(
        "--with-consoles",
        type=int,
        default=0,
        metavar="N",
        help="measure a frontend with N open consoles as well",
    )
    parser.add_argument(
        "--with-tls",
        action="store_true",
        help=(
            "measure a frontend with TLS as well, and uvicorn, installed from PyPI, with TLS and"
            " without: it makes the tokens itself, without prompts, routing and workers"
        ),
    )
    parser.add_argument(
        "--uvicorn-folder",
        type=Path,
        default=uvicorn_recipe.default_folder(),
        help="folder to install uvicorn into",
    )


def main() -> None:
    """Run the command line.

    Results are written also after an error (exit status 1) and after Ctrl-C (130).
    """
    args = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with scratch_folder("dynamo-plane-key-") as folder:
        try:
            sides = _sides(args, folder)
        except NotReady as exc:
            raise SystemExit(str(exc)) from exc
        if args.at_once and len(sides) < 2:
            raise SystemExit("--at-once compares sides: name a second one, such as --beside FOLDER")
        _measure(args, sides)


def _sides(args: argparse.Namespace, folder: Path) -> list[Recipe]:
    """Return what to measure. API keys and a certificate are written into the folder.

    Raises:
        NotReady: no certificate could be made.
    """
    keys: list[LimitedKey | None] = [None]
    if args.with_key:
        keys.append(write_key(folder))
    sides: list[Recipe] = [
        Ours(uses_mock=args.mock_engine, num_frontends=number, key=key)
        for number in args.frontends
        for key in keys
    ]
    if args.with_consoles:
        sides.append(Ours(uses_mock=args.mock_engine, num_consoles=args.with_consoles))
    if args.with_tls:
        certificate = make_certificate(folder)
        uvicorn_recipe.install(args.uvicorn_folder)
        sides.append(Ours(uses_mock=args.mock_engine, certificate=certificate))
        sides.append(uvicorn_recipe.Uvicorn(args.uvicorn_folder, None))
        sides.append(uvicorn_recipe.Uvicorn(args.uvicorn_folder, certificate))
    if args.beside is not None:
        sides.append(Ours(args.beside.resolve(), uses_mock=args.mock_engine))
    if args.what == "against-dynamo":
        dynamo.install(args.dynamo_folder)
        sides.append(dynamo.Dynamo(args.dynamo_folder, "fastokens"))
        if any(point.name == "long-32" for point in args.chosen):
            sides.append(dynamo.Dynamo(args.dynamo_folder, "default"))
    return sides


def _measure(args: argparse.Namespace, sides: Sequence[Recipe]) -> NoReturn:
    """Measure, print and write the results. Exit."""
    runs: list[Run] = []
    status = 0
    try:
        repetitions = args.repetitions or (1 if args.quick else 3)
        measure_points(args.chosen, sides, repetitions, runs, at_once=args.at_once)
    except NotReady as exc:
        sys.stderr.write(f"{exc}\n")
        status = 1
    except KeyboardInterrupt:
        status = 130
    if runs:
        sys.stdout.write(report.table(runs))
        if args.what == "against-dynamo":
            sys.stdout.write("\n" + report.compare_bars(runs))
        if args.at_once:
            sys.stdout.write("\n" + report.ratios_at_once(runs))
        sys.stdout.write(f"\nwritten to {_write(args.results, args.what, runs)}\n")
    raise SystemExit(status)


def _write(folder: Path, what: str, runs: list[Run]) -> Path:
    now = datetime.datetime.now()
    path = folder / f"plane-{now:%Y-%m-%d-%H%M%S}.json"
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    found = {
        "what": what,
        "at": now.isoformat(timespec="seconds"),
        "machine": machine,
        "runs": runs,
    }
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return path


if __name__ == "__main__":
    main()
