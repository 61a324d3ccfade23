"""`scripts/chaos`: kills, freezes and fools the parts of a deployment under load, and judges every request.

Starts two prefill workers, two decode workers, a frontend, etcd and NATS on free ports in a temporary folder, keeps
streams running through them, applies the fault in the middle of the load, and looks at the end of each request:

  right        whole, and the text of an undisturbed run
  named_error  an error of the API's form with a code, as a status or as the stream's last event
  cut          its frontend died
  wrong        other text, or another length
  lost         neither an end nor an error
  hung         silent for longer than --hung-s
  leaked       things that are still held after it: requests, KV blocks, tickets, processes, files
  silence_s    the longest that a client waited for a sign of life (not in --json)

Exit status 1 when wrong, lost, hung or leaked is not 0, when a request was refused that another worker could have
served, and when a worker ended that was not the fault's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence

import orjson

from benchmarks.chaos import course, migration
from benchmarks.chaos.course import Course
from benchmarks.chaos.deployment import Deployment, NotServing, Options
from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.judge import Kind, Verdict
from benchmarks.chaos.load import undisturbed

MIGRATION = "migration"
_MIGRATION = "kill -9 of decode workers until 100 greedy requests continued on another worker (torch engine, fp32)"
_COLUMNS = ("sent", *(kind.value for kind in Kind), "leaked")


class Stage:
    """Keeps one deployment for many faults; a spoiled one is replaced, and the launcher's faults spoil theirs."""

    def __init__(self, options: Options, plan: Course) -> None:
        self._options = options
        self._plan = plan
        self._deployment: Deployment | None = None
        self._left: list[str] = []  # left over by earlier deployments
        self._texts: dict[int, Sequence[str]] = {}  # undisturbed answers by their length in tokens

    async def run(self, fault: Fault) -> Verdict:
        try:
            deployment = await self._deployment_for(fault)
            osl = self._plan.osl_of(fault, deployment.options)
            if osl not in self._texts:
                self._texts[osl] = await undisturbed(deployment, osl=osl)
            verdict = await course.run(deployment, fault, self._plan, self._texts[osl])
        except NotServing as exc:
            verdict = Verdict(fault=fault.name)
            verdict.leak([f"the deployment itself: {exc}"])
        if fault.is_launcher or verdict.leaked:
            verdict.leak(self.close())
        return verdict

    async def _deployment_for(self, fault: Fault) -> Deployment:
        """Return the one that runs, if it is of the kind that the fault needs, or a new one."""
        options = dataclasses.replace(
            self._options,
            engine=fault.engine or self._options.engine,
            is_launcher_victim=fault.is_launcher,
            has_network=fault.has_network,
        )
        if self._deployment is None or fault.is_launcher or self._deployment.options != options:
            self._left = self.close()
            self._deployment = Deployment(options)
            self._deployment.start()
            osl = self._plan.osl
            self._texts[osl] = await undisturbed(self._deployment, osl=osl)  # also checks that the deployment works
        return self._deployment

    def close(self) -> list[str]:
        """What the deployment has left behind."""
        deployment, self._deployment = self._deployment, None
        left, self._left = self._left, []
        return left if deployment is None else [*left, *deployment.stop()]


async def run_all(names: Sequence[str], options: Options, plan: Course) -> list[Verdict]:
    """One after the other. What the last deployment leaves behind is charged to the last fault."""
    stage = Stage(options, plan)
    verdicts: list[Verdict] = []
    try:
        for number, name in enumerate(names, start=1):
            _say(f"{number}/{len(names)} {name}: {_what(name)}")
            if name == MIGRATION:
                verdicts.append(await migration.run())
            else:
                verdicts.append(await stage.run(FAULTS[name]))
    finally:
        left = stage.close()
    verdicts[-1].leak(left)
    return verdicts


def is_good(verdict: Verdict) -> bool:
    """Whether the fault was borne as it must be."""
    fault = FAULTS.get(verdict.fault)
    return verdict.is_good and not (verdict.early and fault is not None and fault.spares_requests)


def table(verdicts: Sequence[Verdict]) -> str:
    """For people: a row per fault, then what is behind the numbers that are not 0."""
    width = max(len(verdict.fault) for verdict in verdicts)
    lines = [f"{'fault':<{width}}" + "".join(f"{name:>13}" for name in _COLUMNS) + f"{'silence_s':>11}"]
    for verdict in verdicts:
        row = verdict.row()
        mark = "" if is_good(verdict) else "  BAD"
        numbers = "".join(f"{row[name]:>13}" for name in _COLUMNS)
        lines.append(f"{verdict.fault:<{width}}{numbers}{verdict.silence_s:>11.1f}{mark}")
    notes = [f"{verdict.fault}: {note}" for verdict in verdicts for note in verdict.notes]
    return "\n".join([*lines, *notes]) + "\n"


def as_json(verdicts: Sequence[Verdict]) -> str:
    """For programs: one object, a row per fault, and the notes of the table."""
    notes = [f"{verdict.fault}: {note}" for verdict in verdicts for note in verdict.notes]
    return orjson.dumps({"faults": [verdict.row() for verdict in verdicts], "notes": notes}).decode() + "\n"


def _what(name: str) -> str:
    return _MIGRATION if name == MIGRATION else FAULTS[name].what


def _say(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(text + "\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = (*FAULTS, MIGRATION)
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("fault", nargs="*", choices=[*names, []], metavar="FAULT", help="by name; --list tells them")
    add("--all", action="store_true", help="every fault, one after the other")
    add("--list", action="store_true", help="names and meanings, and nothing else")
    add("--seconds", type=float, default=20.0, help="of load per fault: 3/10 before it, 4/10 of it, 3/10 after it")
    add("--streams", type=int, default=16, help="requests under way at once")
    add("--osl", type=int, default=50, help="tokens per answer")
    add("--engine", choices=("mock", "torch"), default="mock", help="torch: tiny-gpt-oss on the CPU, greedy")
    twice = "--stall-timeout-s of the frontend; the workers get twice as much"
    add("--stall-timeout-s", type=float, default=5.0, help=twice)
    add("--hung-s", type=float, help="longest silence; default: the fault's time + 2 x stall timeout + 10")
    add("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args(argv)
    args.names = names if args.all else tuple(args.fault)
    if not args.names and not args.list:
        parser.error("name a fault, or --all, or --list")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """`argv`: those of the process, if None."""
    args = _arguments(argv)
    if args.list:
        names = (*FAULTS, MIGRATION)
        width = max(map(len, names)) + 2
        sys.stdout.writelines(f"{name:<{width}}{_what(name)}\n" for name in names)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a deployment is closed on the way
    options = Options(
        engine=args.engine, stall_timeout_s=args.stall_timeout_s, worker_stall_timeout_s=2 * args.stall_timeout_s
    )
    plan = Course(seconds=args.seconds, streams=args.streams, osl=args.osl, hung_s=args.hung_s)
    verdicts = asyncio.run(run_all(args.names, options, plan))
    sys.stdout.write((as_json if args.json else table)(verdicts))
    raise SystemExit(0 if all(is_good(verdict) for verdict in verdicts) else 1)
