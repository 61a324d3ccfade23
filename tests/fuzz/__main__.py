"""Fuzz the parsers of everything that comes from outside.

A target ends at its first finding: an exception that is not documented, a property that does not
hold, or too much time or memory for the size of the input. The input is then in build/fuzz.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

from tests.fuzz import corpus_file
from tests.fuzz.registry import MODULES, load

_ROOT: Final = Path(__file__).parents[2]
_TABLE_ROW: Final = "{:18} {:>7} {:>10} {:>7} {:>12} {:>12}  {}"
_TABLE_HEAD: Final = _TABLE_ROW.format(
    "target",
    "seconds",
    "executions",
    "per s",
    "lines",
    "branches",
    "coverage grew in the last tenth",
)
_FINDINGS: Final = _ROOT / "build" / "fuzz"
_MEMORY: Final = "/dev/shm"
_PROGRESS: Final = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+)")
# The limit of seconds is for a hang, and far above what an input takes on a busy machine.
_LIMITS: Final = ("-rss_limit_mb=3072", "-timeout=300", "-report_slow_units=300", "-reload=0")
_LAST_PART: Final = 0.9  # of a run: its last tenth begins here
_SHOWN_LINES: Final = 40  # of the output of a process that has found something


@dataclass
class _Search:
    """What the search for inputs of one target has done."""

    executions: int = 0
    seconds: float = 0.0
    growth: list[tuple[float, int]] = field(default_factory=list)  # seconds, edges reached
    output: list[str] = field(default_factory=list)  # its last lines
    finding: str = ""  # file of an input; "": nothing was found

    @property
    def grew_at_end(self) -> bool:
        """Return whether the coverage grew in the last tenth of the time."""
        edges = [reached for second, reached in self.growth if second < _LAST_PART * self.seconds]
        return bool(self.growth) and self.growth[-1][1] > max(edges, default=0)


def main() -> int:
    """Fuzz the targets of the command line. Return 1 if something was found."""
    given = _parser().parse_args()
    names = given.target or list(MODULES)
    if given.list:
        for name in names:
            print(f"{name:18} {load(name).summary}")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(
            "scripts/fuzz: atheris is not installed; it has builds for x86-64 only", file=sys.stderr
        )
        return 2
    print(_TABLE_HEAD)
    with ThreadPoolExecutor(given.jobs) as jobs:
        outcomes = list(jobs.map(partial(_fuzz, given=given), names))
    found = [name for name, is_found in zip(names, outcomes, strict=True) if is_found]
    if found:
        print(f"findings: {', '.join(found)}")
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="List the targets and exit.")
    parser.add_argument(
        "--target",
        action="append",
        choices=MODULES,
        metavar="NAME",
        help="Fuzz this target. May be repeated. Default: all.",
    )
    parser.add_argument(
        "--seconds", type=int, default=60, help="Seconds for each target. Default: 60."
    )
    parser.add_argument(
        "--executions",
        type=int,
        default=0,
        help="New inputs for each target, at most. With a seed, a run can be repeated then."
        " Default: no limit.",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="Targets to fuzz at the same time. Default: 1."
    )
    parser.add_argument("--seed", type=int, default=1, help="Seed of the search. Default: 1.")
    measures = parser.add_mutually_exclusive_group()
    measures.add_argument(
        "--no-coverage",
        action="store_true",
        help="Do not measure lines and branches: it is faster.",
    )
    measures.add_argument(
        "--keep",
        action="store_true",
        help="Add inputs that reach more to tests/fuzz/corpus, and leave out those without use.",
    )
    return parser


def _fuzz(name: str, given: argparse.Namespace) -> bool:
    """Fuzz one target and print its row. Return whether something was found."""
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as work:
        folder = Path(work) / "corpus"
        folder.mkdir()
        for number, data in enumerate(corpus_file.read(name)):
            (folder / f"kept-{number:04}").write_bytes(data)
        search = _search(name, folder, given)
        if search.finding:
            _report(name, search)
            return True
        measured = {} if given.no_coverage else _measured(name, folder)
        print(_row(name, search, measured), flush=True)
        if given.keep:
            kept = [(folder / file).read_bytes() for file in measured["inputs"]]
            corpus_file.write(name, kept)
    return False


def _search(name: str, folder: Path, given: argparse.Namespace) -> _Search:
    """Run the process that fuzzes a target. New inputs are written to the folder."""
    artifacts = folder.parent / "findings"
    artifacts.mkdir()
    arguments = [f"-seed={given.seed}", f"-max_total_time={given.seconds}", *_LIMITS]
    arguments += [f"-artifact_prefix={artifacts}/"]
    process_arguments = [name, str(folder), str(given.executions), *arguments]
    command = [sys.executable, "-m", "tests.fuzz.fuzz_process", *process_arguments]
    search = _Search()
    # libFuzzer ends the process without its cleaning up, so targets write their files here. The
    # folder is in memory, because some write one for each input.
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-", dir=_MEMORY) as files:
        # The same hashes in each run, because they decide the order of sets.
        environment = os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": files}
        with subprocess.Popen(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process:
            assert process.stdout is not None
            _follow(process.stdout, search)
    found = sorted(artifacts.iterdir())
    if found:
        _FINDINGS.mkdir(parents=True, exist_ok=True)
        search.finding = str(_FINDINGS / f"{name}-{found[0].name}")
        shutil.copyfile(found[0], search.finding)
    elif process.returncode:
        search.finding = "none: the process ended"
    return search


def _follow(output: IO[bytes], search: _Search) -> None:
    """Read the output of libFuzzer up to its end."""
    begun = time.monotonic()
    for line in output:
        text = line.decode("utf-8", "replace").rstrip("\n")
        search.output = [*search.output[-_SHOWN_LINES:], text]
        progress = _PROGRESS.match(text)
        if progress is None:
            continue
        if progress[2] == "INITED":
            begun = time.monotonic()
        search.executions = int(progress[1])
        search.seconds = time.monotonic() - begun
        edges = int(progress[3])
        if not search.growth or edges > search.growth[-1][1]:
            search.growth.append((search.seconds, edges))


def _measured(name: str, folder: Path) -> dict[str, Any]:
    """Return what the process that measures the coverage prints."""
    command = [sys.executable, "-m", "tests.fuzz.coverage_process", name, str(folder)]
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _row(name: str, search: _Search, measured: dict[str, Any]) -> str:
    lines = "-"
    branches = "-"
    if measured:
        lines = f"{measured['covered_lines']}/{measured['num_statements']}"
        branches = f"{measured['covered_branches']}/{measured['num_branches']}"
    rate = search.executions / max(search.seconds, 0.001)
    grew = "yes" if search.grew_at_end else "no"
    return _TABLE_ROW.format(
        name,
        f"{search.seconds:.0f}",
        search.executions,
        f"{rate:.0f}",
        lines,
        branches,
        grew,
    )


def _report(name: str, search: _Search) -> None:
    print(f"{name:18} {search.executions:10} FOUND, input: {search.finding}")
    shown: Sequence[str] = [line for line in search.output if not _PROGRESS.match(line)]
    for line in shown:
        print(f"    {line[:400]}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
