"""Fault injection: kills or freezes processes of a deployment under load and verifies every
response.

Starts two prefill workers, two decode workers, a frontend, etcd and NATS on free ports in a
temporary folder. Keeps streams running, applies the fault in the middle of the load, and classifies
each request by how it ended:

  right        complete, with the same text as without the fault
  named_error  an error of the API with a code, as status or as the last event of the stream
  cut          its frontend died
  wrong        another text or another length
  lost         neither an end nor an error
  hung         silent for longer than --hung-s
  leaked       resources that were not released: requests, KV blocks, KV transfers, processes, files
  silence_s    the longest wait of a client for the next data (not in --json)

The exit status is 1 if wrong, lost, hung or leaked is not 0, if a request was rejected that another
worker could have taken, or if a worker ended that the fault did not target.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import orjson

from dynamo_trtllm.config.load import program
from dynamo_trtllm.protocol.errors import install_hint

from ..arguments import count, seconds
from .verdict import Outcome, Verdict

# The faults need most of the package, so --help is several times as fast where they are imported
# only for their use.
if TYPE_CHECKING:
    from .deployment import Options
    from .fault_run import RunConfig
    from .faults import Fault

MIGRATION = "migration"
_MIGRATION = (
    "kill -9 of decode workers until 100 greedy requests continued on another worker (torch engine,"
    " fp32)"
)
_COLUMNS = ("sent", *(outcome.value for outcome in Outcome), "leaked")


async def run_all(names: Sequence[str], options: Options, config: RunConfig) -> list[Verdict]:
    """Run faults one after the other.

    Leftovers of the last deployment count as leaks of the last fault.
    """
    from . import migration
    from .fault_run import FaultRunner

    runner = FaultRunner(options, config)
    verdicts: list[Verdict] = []
    try:
        for number, name in enumerate(names, start=1):
            _progress(f"{number}/{len(names)} {name}: {_description(name)}")
            if name == MIGRATION:
                verdict = await migration.run()
            else:
                verdict = await runner.run(_faults()[name])
            verdicts.append(verdict)
            # A run of all faults takes long. If it is interrupted, these lines remain.
            sys.stderr.write(line(verdict) + "\n")
    finally:
        leftovers = runner.close()
    verdicts[-1].add_leaks(leftovers)
    return verdicts


def is_good(verdict: Verdict) -> bool:
    """Return whether the deployment handled the fault as required."""
    fault = _faults().get(verdict.fault)
    return verdict.is_good and not (
        verdict.early_errors and fault is not None and fault.spares_requests
    )


def line(verdict: Verdict) -> str:
    """Return a verdict as one line of text."""
    row = verdict.row()
    counts = ", ".join(f"{name} {row[name]}" for name in _COLUMNS)
    mark = "" if is_good(verdict) else ", BAD"
    return f"{verdict.fault}: {counts}{mark}"


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a text table with a row per fault, followed by the notes."""
    width = max(len(verdict.fault) for verdict in verdicts)
    lines = [
        f"{'fault':<{width}}" + "".join(f"{name:>13}" for name in _COLUMNS) + f"{'silence_s':>11}"
    ]
    for verdict in verdicts:
        row = verdict.row()
        mark = "" if is_good(verdict) else "  BAD"
        numbers = "".join(f"{row[name]:>13}" for name in _COLUMNS)
        lines.append(f"{verdict.fault:<{width}}{numbers}{verdict.silence_s:>11.1f}{mark}")
    notes = [f"{verdict.fault}: {note}" for verdict in verdicts for note in verdict.notes]
    return "\n".join([*lines, *notes]) + "\n"


def as_json(verdicts: Sequence[Verdict]) -> str:
    """Return one JSON object with a row per fault and the notes."""
    notes = [f"{verdict.fault}: {note}" for verdict in verdicts for note in verdict.notes]
    return (
        orjson.dumps({"faults": [verdict.row() for verdict in verdicts], "notes": notes}).decode()
        + "\n"
    )


def _faults() -> Mapping[str, Fault]:
    from .faults import FAULTS

    return FAULTS


def _description(name: str) -> str:
    return _MIGRATION if name == MIGRATION else _faults()[name].description


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(text + "\n")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    prog = program(f"python -m {__package__}")
    made = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("fault", nargs="*", type=_fault, metavar="FAULT", help="fault to run; see --list")
    add("--all", action="store_true", help="run every fault, one after the other")
    add("--list", action="store_true", help="print the faults and exit")
    load = (
        "seconds of load per fault: 30%% before, 40%% during and 30%% after the fault (default: 20)"
    )
    add("--seconds", type=seconds, default=20.0, help=load)
    add("--streams", type=count, default=16, help="concurrent requests (default: 16)")
    add("--osl", type=count, default=50, help="tokens per answer (default: 50)")
    engine = (
        "torch: tiny-gpt-oss on the CPU, greedy; trtllm: the same, with the adapter and a stand-in"
        " of TensorRT-LLM"
    )
    add("--engine", choices=("mock", "torch", "trtllm"), default="mock", help=engine)
    stall = "--stall-timeout-s of the frontend; workers get twice this value (default: 5)"
    add("--stall-timeout-s", type=seconds, default=5.0, help=stall)
    add(
        "--hung-s",
        type=seconds,
        help="longest allowed silence; default: duration of the fault + 2 x stall timeout + 10",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return made


def _fault(name: str) -> str:
    if name not in (*_faults(), MIGRATION):
        raise argparse.ArgumentTypeError(f"unknown fault {name!r}; see --list")
    return name


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser()
    args = made.parse_args(argv)
    args.names = (*_faults(), MIGRATION) if args.all else tuple(args.fault)
    if not args.names and not args.list:
        made.error("give a fault, --all or --list")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. `argv` defaults to the arguments of the process."""
    args = _arguments(argv)
    if args.list:
        names = (*_faults(), MIGRATION)
        width = max(map(len, names)) + 2
        sys.stdout.writelines(f"{name:<{width}}{_description(name)}\n" for name in names)
        return
    if importlib.util.find_spec("psutil") is None:
        parser().error(f"faults need psutil; {install_hint('bench')}")
    from .deployment import Options
    from .fault_run import RunConfig

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # closes the deployment
    options = Options(
        engine=args.engine,
        stall_timeout_s=args.stall_timeout_s,
        worker_stall_timeout_s=2 * args.stall_timeout_s,
    )
    config = RunConfig(seconds=args.seconds, streams=args.streams, osl=args.osl, hung_s=args.hung_s)
    verdicts = asyncio.run(run_all(args.names, options, config))
    sys.stdout.write((as_json if args.json else table)(verdicts))
    raise SystemExit(0 if all(is_good(verdict) for verdict in verdicts) else 1)
