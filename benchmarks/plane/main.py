"""python -m benchmarks.plane ours | against-dynamo: what the frontend and the request plane cost, point by point.

`ours` measures this project alone. `against-dynamo` installs Dynamo's own frontend and mock workers from PyPI (once,
into a folder outside this one), keeps both sides up and measures them in turn: the one that is not measured is idle.
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

import orjson

from benchmarks.plane import dynamo, measure, report
from benchmarks.plane.measure import Run
from benchmarks.plane.ours import Ours
from benchmarks.plane.points import COMPARED, POINTS, Point, by_engines, select
from benchmarks.plane.stack import NotServing, Recipe, Stack
from dynamo_trtllm.subprocesses.ports import free_ports

RESULTS = Path(__file__).parents[1] / "results"


def measured(points: Sequence[Point], sides: Sequence[Recipe], repetitions: int, runs: list[Run]) -> None:
    """Appends to `runs`. The order of the sides turns round with every repetition."""
    for engines, group in by_engines(points):
        with ExitStack() as stack:
            up = [stack.enter_context(Stack(side, free_ports(), engines)) for side in sides]
            for repetition in range(repetitions):
                for point in group:
                    for each in up if repetition % 2 == 0 else reversed(up):
                        if each.name == "dynamo default" and point.name != "long-32":
                            continue  # the fastest tokenizer is the one to beat; the default is a line of its own
                        run = measure.run(point, each, repetition)
                        runs.append(run)
                        _tell(run)


def _tell(run: Run) -> None:
    figures = run["figures"]
    cost = figures["processes"]["frontend"]["cpu_ms_per_1k_tokens"]
    sys.stderr.write(
        f"{run['point']:<11} {run['side']:<17} #{run['repetition'] + 1}: {figures['tokens_per_s']:.0f} tokens/s, "
        f"frontend {cost:.1f} ms/1k, {figures['ok']} ok, "
        f"{sum(figures['errors'].values())} errors, others {run['others_cores']:.2f} cores\n"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plane", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("ours", "against-dynamo"))
    parser.add_argument("--points", default="", help=f"some of {','.join(point.name for point in POINTS)}")
    parser.add_argument("--repetitions", type=int, default=None, help="default 3; 1 when quick")
    parser.add_argument("--quick", action="store_true", help="a minute's run: few points, few requests, once")
    parser.add_argument("--dynamo-folder", type=Path, default=dynamo.default_folder(), help="where Dynamo is installed")
    parser.add_argument("--beside", type=Path, help="checkout of another commit of this project, measured in turn")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    names = [name for name in args.points.split(",") if name]
    if args.what == "against-dynamo" and not names and not args.quick:
        names = list(COMPARED)
    try:
        args.chosen = select(names, quick=args.quick)
    except KeyError as exc:
        parser.error(f"there is no point {exc}")
    return args


def main() -> None:
    """Exit status 1 when a side does not serve, 130 after Ctrl-C; what was measured till then is written."""
    args = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sides: list[Recipe] = [Ours()]
    if args.beside is not None:
        sides.append(Ours(args.beside.resolve()))
    if args.what == "against-dynamo":
        dynamo.install(args.dynamo_folder)
        sides.append(dynamo.Dynamo(args.dynamo_folder, "fastokens"))
        if any(point.name == "long-32" for point in args.chosen):
            sides.append(dynamo.Dynamo(args.dynamo_folder, "default"))
    runs: list[Run] = []
    status = 0
    try:
        measured(args.chosen, sides, args.repetitions or (1 if args.quick else 3), runs)
    except NotServing as exc:
        sys.stderr.write(f"{exc}\n")
        status = 1
    except KeyboardInterrupt:
        status = 130
    if runs:
        sys.stdout.write(report.table(runs))
        if args.what == "against-dynamo":
            sys.stdout.write("\n" + report.judged(runs))
        sys.stdout.write(f"\nwritten to {_write(args.results, args.what, runs)}\n")
    raise SystemExit(status)


def _write(folder: Path, what: str, runs: list[Run]) -> Path:
    now = datetime.datetime.now()
    path = folder / f"plane-{now:%Y-%m-%d-%H%M%S}.json"
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
    found = {"what": what, "at": now.isoformat(timespec="seconds"), "machine": machine, "runs": runs}
    path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return path


if __name__ == "__main__":
    main()
