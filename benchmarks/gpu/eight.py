"""The guides' own topology: prefill on the first half of all GPUs, decode on the second, gpt-oss-120b's full shape.

python -m benchmarks.gpu.eight [--gpus 0,1,2,3,4,5,6,7] [--out FOLDER]

Eight GPUs give TP4 and EP4 to each role, two give one GPU to each. Parity with aggregated replicas on the same GPUs,
the guides' shapes at rising concurrency on both, the prefill worker killed once; one result file and a table. On two
H200 starts and parity took 350 s, a shape takes half a minute on each side.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import main as one_run
from benchmarks.gpu.report import table
from benchmarks.gpu.result import Result, Row, result, write

# A replica of an aggregated deployment gets half of these.
SHAPES = ((32_000, 256, 4), (32_000, 256, 16), (1000, 2000, 16), (1000, 2000, 64), (1000, 2000, 128))
_ONLY = "startup,parity,shapes,kill"
_BUDGET_S = 1500.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a run, with the steps and shapes of this one as defaults."""
    args = one_run.arguments(
        argv,
        prog="python -m benchmarks.gpu.eight",
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
    """All steps as one result; each row says which step it is of."""
    rows = [
        Row(what=f"{found.step}: {row.what}", value=row.value, bar=row.bar, met=row.met)
        for found in results
        for row in found.rows
    ]
    detail = {found.step: found.detail for found in results}
    return result(
        "topology", setup=results[0].setup, seconds=sum(found.seconds for found in results), rows=rows, detail=detail
    )


def main() -> None:
    """Exit status 1 when a bar was not met or a step failed."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        sizes = replace(one_run.sizes_of(args), waves=1, shape_s=30.0)
        run = one_run.Run(args, one_run.plan_of(args, Path(folder)), sizes)
        asyncio.run(run.all())
    found = merged(run.results)
    write(found, args.out.parent / "topology.json")
    sys.stdout.write("\n" + table([found]) + "\n")
    raise SystemExit(any(row.met is False for row in found.rows))


if __name__ == "__main__":
    main()
