"""Runs the topology of the Dynamo gpt-oss-120b guides: prefill on the first half of all GPUs,
decode on the second.

python -m benchmarks.gpu.topology_8gpu [--gpus 0,1,2,3,4,5,6,7] [--out FOLDER]

With eight GPUs each role has TP4 and EP4, with two GPUs each role has one. Checks parity with
aggregated replicas on the same GPUs, measures the guides' shapes at rising concurrency on both, and
kills the prefill worker once. Writes one result file and prints a table. On two H200, starts and
parity take 350 s, and a shape takes 30 s per deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import main as one_run
from .report import table
from .result import Result, Row, make_result, write

# (ISL, OSL, concurrency). The two aggregated replicas share the concurrency.
SHAPES = (
    (32_000, 256, 4),
    (32_000, 256, 16),
    (1000, 2000, 16),
    (1000, 2000, 64),
    (1000, 2000, 128),
)
_ONLY = "startup,parity,shapes,kill"
_BUDGET_S = 1500.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, with the steps and shapes of this topology as defaults."""
    args = one_run.arguments(
        argv,
        prog=f"python -m {__package__}.topology_8gpu",
        description=__doc__,
        only=_ONLY,
        victims="prefill",
        shapes=",".join(f"{isl}/{osl}/{concurrency}" for isl, osl, concurrency in SHAPES),
        budget_s=_BUDGET_S,
        out=Path("benchmarks/results/gpu/eight"),
    )
    args.out /= "steps"
    return args


def merged(results: Sequence[Result]) -> Result:
    """Merge the results of all steps into one. Each row begins with its step."""
    rows = [
        Row(what=f"{result.step}: {row.what}", value=row.value, bar=row.bar, met=row.met)
        for result in results
        for row in result.rows
    ]
    detail = {result.step: result.detail for result in results}
    return make_result(
        "topology",
        setup=results[0].setup,
        seconds=sum(result.seconds for result in results),
        rows=rows,
        detail=detail,
    )


def main() -> None:
    """Run all steps. The exit status is 1 if a target was not met or a step failed."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        sizes = replace(one_run.sizes_of(args), waves=1, shape_s=30.0)
        run = one_run.Run(args, one_run.plan_of(args, Path(folder)), sizes)
        asyncio.run(run.all())
    result = merged(run.results)
    write(result, args.out.parent / "topology.json")
    sys.stdout.write("\n" + table([result]) + "\n")
    raise SystemExit(any(row.met is False for row in result.rows))


if __name__ == "__main__":
    main()
