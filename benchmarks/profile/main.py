"""Sends a load to a running server, and writes a report.

  dynamo-trtllm bench                                    a minute on a laptop
  dynamo-trtllm bench --isl 8192 --osl 256 --request-rate 1,2,4 --goodput ttft:2000 tpot:20
  dynamo-trtllm bench --shape prompts-8k --concurrency 64,256,1024 --num-prompts 2048
  dynamo-trtllm bench --shape mine.yaml --compare benchmark-results/before \\
    --fail-under output_tokens_per_s=900

Writes run.json, records.jsonl.gz (one line per request), summary.csv and report.html, which is
self-contained. Ctrl-C ends the load, and the report has what was measured until then. Exit status:
0; 1 if a limit was missed, no request succeeded or Ctrl-C ended the load; 2 for invalid arguments,
and for a shape with more tokens than the model supports.
"""

from __future__ import annotations

import argparse
import errno
import logging
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_trtllm.cli.output_files import make_folder, write_text
from dynamo_trtllm.config.client_commands import DEFAULT_FRONTEND
from dynamo_trtllm.config.load import program
from dynamo_trtllm.config.token_counts import parse_tokens
from dynamo_trtllm.launch.running_deployments import frontend_here
from dynamo_trtllm.protocol.errors import ConfigError, install_hint
from dynamo_trtllm.protocol.number_text import parse_float, parse_int
from dynamo_trtllm.support.charts import can_draw

from ..arguments import count, seconds
from ..client import choose_model
from ..client_shards import AllRequestsFailed
from ..interrupts import Interrupts
from ..stream import RequestRecord
from ..summary import table
from . import PROG, aiperf, point
from .budget import Limit, limit, missed
from .goodput import TIMES, parse_goals
from .point import PointInterrupted, Target
from .result import REPORT_FILE, Line, Point, Run, load_lines, load_run, save, summary
from .shapes import LAPTOP, SHAPES, Level, Shape, find_shape

log = logging.getLogger(PROG)
N = TypeVar("N", int, float)
# What a file system reports that became full or read-only during the load.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. `argv` defaults to the arguments of the process."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    args = parser().parse_args(argv)
    words = list(argv) if argv is not None else sys.argv[1:]
    try:
        shape = shape_of(args)
        limits = _limits(args)
        goals_ms = parse_goals(args.goodput)
        earlier = (
            None if args.compare is None else (load_run(args.compare), load_lines(args.compare))
        )
        draw = _load_report()
        url = args.url or frontend_here(args.deployment_name)[0]
    except ValueError as exc:
        parser().error(str(exc))
    except ConfigError as exc:
        parser().error(exc.message)
    model, longest = choose_model(url, args.model)
    try:
        shape.check_fits(model, longest)
    except ValueError as exc:
        log.error("%s: %s", program(PROG), exc)
        raise SystemExit(2) from exc
    target = Target(url=url, model=model, timeout_s=args.timeout_s, goals_ms=goals_ms)
    folder = args.out or Path("benchmark-results") / f"{shape.name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        with _results_in(folder):
            with Interrupts() as interrupts:
                run, lines, is_complete = _run(args, shape, target, interrupts)
            save(run, lines, folder)
            log.info("drawing the report")
            command = shlex.join([*PROG.split(), *words])
            write_text(folder / REPORT_FILE, draw(run, lines, earlier, command), "out")
    except ConfigError as exc:
        log.error("%s: %s", program(PROG), exc.message)
        raise SystemExit(2) from exc
    log.info("report: %s", folder / REPORT_FILE)
    misses = missed(limits, summary(run))
    for line in misses:
        log.error("limit missed: %s", line)
    succeeded = sum(point.figures["ok"] for point in run.points)
    if not succeeded:
        log.error("no request succeeded")
    if misses or not succeeded or not is_complete:
        raise SystemExit(1)


@contextmanager
def _results_in(folder: Path) -> Iterator[None]:
    """Check before the load that results can be written to a folder, which is created.

    A folder that was created and is still empty at the end is removed.

    Raises:
        ConfigError: the folder can't be written, or the file system became full.
    """
    is_new = not folder.exists()
    make_folder(folder, "out")
    try:
        yield
    except OSError as exc:
        if exc.errno not in _DISK_ERRORS:
            raise
        raise ConfigError(
            f"the results can't be written to {folder}: {exc.strerror}; free space, or pass --out"
            " with another folder, and run again",
            field="out",
        ) from exc
    finally:
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()


Draw = Callable[[Run, list[Line], tuple[Run, list[Line]] | None, str], str]


def _load_report() -> Draw:
    """Return what writes the report. Call it before anything is measured.

    Raise ValueError if the library of the charts is missing, which the first chart imports.
    """
    if not can_draw():
        raise ValueError(f"the report needs matplotlib; {install_hint('bench')}")
    from .plots import Series
    from .report import report

    def draw(
        run: Run, lines: list[Line], earlier: tuple[Run, list[Line]] | None, command: str
    ) -> str:
        series = [Series("this run", run, lines)]
        if earlier is not None:
            series.append(Series("earlier", *earlier))
        return report(run, series, command)

    return draw


def _run(
    args: argparse.Namespace, shape: Shape, target: Target, interrupts: Interrupts
) -> tuple[Run, list[Line], bool]:
    """Measure all points. The last value is False if some were not, or not to their end."""
    run = Run(
        shape=shape,
        url=target.url,
        model=target.model,
        driver="aiperf" if args.aiperf else "client",
        began_at=datetime.now(UTC).isoformat(timespec="seconds"),
        gpus=args.gpus or shape.gpus,
        machine=_machine(),
        goals_ms=target.goals_ms,
    )
    installed = aiperf.install(args.aiperf_dir) if args.aiperf else None
    lines: list[Line] = []
    for repetition in range(1, args.repetitions + 1):
        for level in shape.levels:
            log.info("%s, repetition %d of %d", level, repetition, args.repetitions)
            try:
                found, records = _measure(
                    installed, shape, target, level, repetition, args, interrupts
                )
            except PointInterrupted as exc:
                found, records = exc.point, exc.records
            except KeyboardInterrupt:  # of aiperf, which keeps no results; or a second one
                records = []
            except AllRequestsFailed as exc:
                if not run.points:
                    raise SystemExit(f"{program(PROG)}: {exc}") from exc
                log.error("%s. The report contains the earlier points.", exc)
                return run, lines, False
            if not records:
                if not run.points:
                    raise SystemExit(f"{program(PROG)}: interrupted before a request was measured")
                log.error("interrupted. The report contains the earlier points.")
                return run, lines, False
            log.info("%s", table(found.figures).rstrip())
            if found.good is not None:
                log.info("%s", _goodput(found))
            run.points.append(found)
            lines += [Line(level=level, repetition=repetition, record=record) for record in records]
            if interrupts.is_set:
                log.error("interrupted. The report contains what was measured until now.")
                return run, lines, False
    return run, lines, True


def _measure(
    installed: Path | None,
    shape: Shape,
    target: Target,
    level: Level,
    repetition: int,
    args: argparse.Namespace,
    interrupts: Interrupts,
) -> tuple[Point, list[RequestRecord]]:
    if installed is None:
        return point.measure(shape, target, level, repetition, interrupts)
    name = f"{shape.name}-{shape.level_name}-{level.value:g}-{repetition}"
    try:
        with interrupts.raising():
            return aiperf.measure(
                installed, shape, target, level, repetition, args.aiperf_dir / "artifacts" / name
            )
    except (subprocess.CalledProcessError, ValueError) as exc:
        raise SystemExit(f"{program(PROG)}: {exc}") from exc


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the shape with the changes of flags. Raise ValueError."""
    shape = find_shape(args.shape)
    changes: dict[str, object] = {
        "isl": args.isl,
        "osl": args.osl,
        "requests": args.num_prompts,
        "warmup": args.warmup,
    }
    if args.concurrency is not None:
        changes |= {"concurrency": _numbers(args.concurrency, parse_int), "request_rate": ()}
    if args.request_rate is not None:
        changes |= {"request_rate": _numbers(args.request_rate, parse_float), "concurrency": ()}
        # the number of the shape belongs to its concurrency
        changes["requests"] = args.num_prompts or 0
    if args.isl is not None or args.osl is not None:
        changes["name"] = f"{args.isl or shape.isl}-{args.osl or shape.osl}"
    return msgspec.structs.replace(
        shape, **{name: value for name, value in changes.items() if value is not None}
    )


def _numbers(text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError as exc:
        raise ValueError(f"{text!r}: expected numbers with commas between them") from exc


def _goodput(found: Point) -> str:
    total = found.figures["ok"] + sum(found.figures["errors"].values())
    rate = (found.good or 0) / found.figures["wall_s"]
    return f"goodput: {found.good} of {total} requests met all goals, {rate:.2f} requests/s"


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


def _url(text: str) -> str:
    """Return an address with its scheme, as curl takes it without one."""
    return text if "://" in text else f"http://{text}"


def _described(shape: Shape) -> str:
    return f"{shape.name} ({shape.isl} tokens in, {shape.osl} out)"


def _tokens(text: str) -> int:
    """Return a number of tokens, which may have a suffix."""
    try:
        value = parse_tokens(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: {exc}") from exc
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more tokens")
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
    _add_measurement(made)
    _add_results(made)
    return made


def _add_load(made: argparse.ArgumentParser) -> None:
    """Add the arguments that define the load and its server."""
    add = made.add_argument
    add(
        "--shape",
        default=LAPTOP.name,
        help=f"{', '.join(_described(shape) for shape in SHAPES.values())}; or a YAML file with"
        f" isl, osl, concurrency or request_rate, ... (default: {LAPTOP.name})",
    )
    add(
        "--isl",
        type=_tokens,
        help="tokens of the prompt, about, such as 8192, 8k (8,000) or 8K (8,192); default: the"
        " shape's",
    )
    add("--osl", type=_tokens, help="tokens of the answer; default: the shape's")
    add(
        "--url",
        type=_url,
        help="address of the server; default: the deployment that was launched on this machine,"
        f" otherwise {DEFAULT_FRONTEND}",
    )
    add(
        "--deployment-name",
        help="name of a deployment of this machine, as status shows it; default: the only one",
    )
    add("--model", help="name of the model; default: the only served model")
    levels = made.add_mutually_exclusive_group()
    levels.add_argument(
        "--concurrency",
        metavar="N,N,...",
        help="concurrent requests, one point each; default: the shape's",
    )
    levels.add_argument(
        "--request-rate",
        metavar="R,R,...",
        help="requests per second, one point each: they are sent at random times (Poisson), however"
        " fast answers come; instead of --concurrency",
    )
    add(
        "--num-prompts",
        type=count,
        help="requests per point; default: the shape's, ten times the concurrency, or a minute at"
        " the request rate",
    )
    add(
        "--warmup",
        type=count,
        help="requests per point before the measured ones; default: the shape's",
    )


def _add_measurement(made: argparse.ArgumentParser) -> None:
    """Add the arguments that say how the load is measured, and by which client."""
    add = made.add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="TIME:MS",
        help=f"longest times of a good request in milliseconds, of {', '.join(TIMES)} (time to"
        " first token, mean time per later token, whole request, longest gap between tokens): the"
        " report counts the requests that met all of them",
    )
    add(
        "--repetitions",
        type=count,
        default=1,
        help="repetitions of all points; the report shows median and spread",
    )
    add(
        "--gpus",
        type=count,
        help="number of GPUs of the deployment, for figures per GPU; default: the guide's",
    )
    add(
        "--timeout-s",
        type=seconds,
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
