"""Runs a benchmark of the Dynamo gpt-oss-120b guides against a running server and writes a report.

  dynamo-trtllm bench --shape laptop --url http://localhost:8000
  dynamo-trtllm bench --shape guide-003-disagg --concurrency 64,256,1024 --requests 2048 \\
    --repetitions 3
  dynamo-trtllm bench --shape mine.yaml --compare benchmark-results/before \\
    --fail-under output_tokens_per_s=900

Writes run.json, records.jsonl.gz (one line per request), summary.csv and report.html, which is
self-contained. Exit status: 0; 1 if a limit was missed or no request succeeded; 2 for invalid
arguments, and for a shape with more tokens than the model supports.
"""

from __future__ import annotations

import argparse
import logging
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dynamo_trtllm.config.load import program
from dynamo_trtllm.protocol.errors import install_hint

from ..client import choose_model
from ..client_shards import AllRequestsFailed
from ..stream import RequestRecord
from ..summary import table
from . import PROG, aiperf, point
from .budget import Limit, limit, missed
from .point import Target
from .result import REPORT_FILE, Line, Point, Run, load_lines, load_run, save, summary
from .shapes import SHAPES, Shape, find_shape

log = logging.getLogger(PROG)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. `argv` defaults to the arguments of the process."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    args = parser().parse_args(argv)
    words = list(argv) if argv is not None else sys.argv[1:]
    try:
        shape = _shape(args)
        limits = _limits(args)
        earlier = (
            None if args.compare is None else (load_run(args.compare), load_lines(args.compare))
        )
        draw = _load_report()
    except ValueError as exc:
        parser().error(str(exc))
    model, longest = choose_model(args.url, args.model)
    try:
        shape.check_fits(model, longest)
    except ValueError as exc:
        log.error("%s: %s", PROG, exc)
        raise SystemExit(2) from exc
    target = Target(url=args.url, model=model, timeout_s=args.timeout_s)
    run, lines, is_complete = _run(args, shape, target)
    folder = args.out or Path("benchmark-results") / f"{shape.name}-{datetime.now():%Y%m%d-%H%M%S}"
    save(run, lines, folder)
    (folder / REPORT_FILE).write_text(
        draw(run, lines, earlier, shlex.join([*PROG.split(), *words]))
    )
    log.info("report: %s", folder / REPORT_FILE)
    misses = missed(limits, summary(run))
    for line in misses:
        log.error("limit missed: %s", line)
    succeeded = sum(each.figures["ok"] for each in run.points)
    if not succeeded:
        log.error("no request succeeded")
    if misses or not succeeded or not is_complete:
        raise SystemExit(1)


Draw = Callable[[Run, list[Line], tuple[Run, list[Line]] | None, str], str]


def _load_report() -> Draw:
    """Import the report before anything is measured.

    Raise ValueError if its libraries are missing.
    """
    try:
        from .plots import Series
        from .report import report
    except ModuleNotFoundError as exc:
        raise ValueError(f"the report needs {exc.name}; {install_hint('bench')}") from exc

    def draw(
        run: Run, lines: list[Line], earlier: tuple[Run, list[Line]] | None, command: str
    ) -> str:
        series = [Series("this run", run, lines)]
        if earlier is not None:
            series.append(Series("earlier", *earlier))
        return report(run, series, command)

    return draw


def _run(args: argparse.Namespace, shape: Shape, target: Target) -> tuple[Run, list[Line], bool]:
    """Measure all points. The last value is False if some could not be measured."""
    run = Run(
        shape=shape,
        url=target.url,
        model=target.model,
        driver="aiperf" if args.aiperf else "client",
        began_at=datetime.now(UTC).isoformat(timespec="seconds"),
        gpus=args.gpus or shape.gpus,
        machine=_machine(),
    )
    program = aiperf.install(args.aiperf_dir) if args.aiperf else None
    lines: list[Line] = []
    for repetition in range(1, args.repetitions + 1):
        for concurrency in shape.concurrency:
            log.info(
                "concurrency %d, repetition %d of %d", concurrency, repetition, args.repetitions
            )
            try:
                found, records = _measure(program, shape, target, concurrency, repetition, args)
            except AllRequestsFailed as exc:
                if not run.points:
                    raise SystemExit(f"{PROG}: {exc}") from exc
                log.error("%s. The report contains the earlier points.", exc)
                return run, lines, False
            log.info("%s", table(found.figures).rstrip())
            run.points.append(found)
            lines += [
                Line(concurrency=concurrency, repetition=repetition, record=record)
                for record in records
            ]
    return run, lines, True


def _measure(
    program: Path | None,
    shape: Shape,
    target: Target,
    concurrency: int,
    repetition: int,
    args: argparse.Namespace,
) -> tuple[Point, list[RequestRecord]]:
    if program is None:
        return point.measure(shape, target, concurrency, repetition)
    folder = args.aiperf_dir / "artifacts" / f"{shape.name}-{concurrency}-{repetition}"
    try:
        return aiperf.measure(program, shape, target, concurrency, repetition, folder)
    except (subprocess.CalledProcessError, ValueError) as exc:
        raise SystemExit(f"{PROG}: {exc}") from exc


def _shape(args: argparse.Namespace) -> Shape:
    """Return the shape with the changes of flags. Raise ValueError."""
    shape = find_shape(args.shape)
    changes = {
        "concurrency": tuple(int(word) for word in args.concurrency.split(","))
        if args.concurrency
        else None,
        "requests": args.requests,
        "warmup": args.warmup,
    }
    return msgspec.structs.replace(
        shape, **{name: value for name, value in changes.items() if value is not None}
    )


def _limits(args: argparse.Namespace) -> list[Limit]:
    return [
        *(limit(text, is_floor=True) for text in args.fail_under),
        *(limit(text, is_floor=False) for text in args.fail_over),
    ]


def _machine() -> dict[str, str]:
    """Describe the client's machine."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = done.stdout.strip()
    except FileNotFoundError:  # container images have no git
        commit = ""
    return {
        "client's machine": f"{platform.platform()}, {platform.machine()}",
        "Python": platform.python_version(),
        "commit": commit or "not a repository",
    }


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(
        prog=program(PROG),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_load(made)
    _add_results(made)
    return made


def _add_load(made: argparse.ArgumentParser) -> None:
    """Add the arguments that define the load and its server."""
    add = made.add_argument
    add(
        "--shape",
        required=True,
        help=f"{', '.join(SHAPES)}, or a YAML file with isl, osl, concurrency, ...",
    )
    add(
        "--url",
        default="http://localhost:8000",
        help="address of the server (default: http://localhost:8000)",
    )
    add("--model", help="name of the model; default: the only served model")
    add(
        "--concurrency",
        metavar="N,N,...",
        help="concurrent requests, one point each; default: the shape's",
    )
    add("--requests", type=_count, help="requests per point; default: the shape's")
    add(
        "--warmup",
        type=_count,
        help="requests per point before the measured ones; default: the shape's",
    )
    add(
        "--repetitions",
        type=_count,
        default=1,
        help="repetitions of all points; the report shows median and spread",
    )
    add(
        "--gpus",
        type=_count,
        help="number of GPUs of the deployment, for figures per GPU; default: the guide's",
    )
    add(
        "--timeout-s",
        type=float,
        default=3600.0,
        help="longest wait for one response (default: 3600)",
    )
    add(
        "--aiperf",
        action="store_true",
        help=f"send the load with aiperf {aiperf.VERSION} instead of our client",
    )
    aiperf_dir = "folder for aiperf, which is installed if it is missing (1.2 GB; default: .aiperf)"
    add("--aiperf-dir", type=Path, default=Path(".aiperf"), help=aiperf_dir)


def _add_results(made: argparse.ArgumentParser) -> None:
    """Add what becomes of the results: a folder, a comparison, limits."""
    add = made.add_argument
    add("--out", type=Path, help="folder for the results; default: benchmark-results/SHAPE-TIME")
    add("--compare", type=Path, metavar="FOLDER", help="results of an earlier run to compare with")
    minimum = "fail if the median of a metric is lower; metrics: see summary.csv; may be repeated"
    add("--fail-under", action="append", default=[], metavar="METRIC=VALUE", help=minimum)
    maximum = "fail if the median of a metric is higher; may be repeated"
    add("--fail-over", action="append", default=[], metavar="METRIC=VALUE", help=maximum)
