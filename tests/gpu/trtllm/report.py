"""Answers every open question about the installed TensorRT-LLM on a machine with GPUs, and prints a
table.

python -m tests.gpu.trtllm.report --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from dynamo_trtllm.engines.trtllm.bindings import PACKAGE
from tests.gpu.trtllm import checks, probes
from tests.kit.cluster import Cluster, Process
from tests.kit.servers import TestServer

WORKS = "works"


class Row(NamedTuple):
    """One question with its answer."""

    question: str
    assumed: str
    found: str


def vendor_rows(model: str, runtime: str) -> Iterator[Row]:
    """Ask TensorRT-LLM itself, in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.trtllm.probes", model, runtime]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith(probes.ANSWERS)]
    if not lines:
        yield Row(f"one LLM, {runtime}", WORKS, f"exit status {run.returncode}; see the log above")
    for line in lines:
        for question, assumed, found in json.loads(line.removeprefix(probes.ANSWERS)):
            yield Row(f"{question} ({runtime})", assumed, found)


def worker_rows(site: checks.Site) -> Iterator[Row]:
    """Ask workers: each check of tests/gpu/trtllm/checks.py."""
    with tempfile.TemporaryDirectory(prefix="trtllm-report-") as folder:
        etcd, nats = (TestServer(kind, Path(folder) / kind) for kind in ("etcd", "nats"))
        cluster = Cluster(etcd.address, nats.address, f"report-{secrets.token_hex(4)}")
        try:
            served = checks.start(cluster, site)
            yield Row("workers start", WORKS, WORKS)
            for question, check in worker_checks(site):
                yield Row(question, WORKS, _outcome(lambda check=check: check(served)))  # type: ignore[misc]
        except Exception as exc:  # noqa: BLE001 - a row of the table
            yield Row("workers start", WORKS, f"{type(exc).__name__}: {exc}")
        finally:
            cluster.stop()
            etcd.stop()
            nats.stop()


def worker_checks(site: checks.Site) -> Iterator[tuple[str, Callable[[checks.Served], None]]]:
    """Yield the checks that this number of GPUs allows, by the question that they answer."""
    yield "greedy tokens of prefill and decode are those of one engine", checks.check_parity
    yield "a canceled request leaves nothing", checks.check_cancellation
    yield "a prompt longer than a step is chunked or rejected", checks.check_chunked_prefill
    if site.gpus >= 2:
        yield "attention DP gives the tokens of one rank", checks.check_attention_dp
    yield "a worker that is stopped finishes its requests", checks.check_drain
    yield (
        "a worker whose ranks are killed exits",
        lambda served: checks.check_death(served, _kill_ranks),
    )


def _kill_ranks(worker: Process) -> None:
    for child in psutil.Process(worker.pid).children(recursive=True):
        child.send_signal(signal.SIGKILL)


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as exc:  # noqa: BLE001 - a row of the table
        return f"{type(exc).__name__}: {exc}"
    return WORKS


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown. An answer that was not assumed is marked."""
    lines = ["| question | assumed | found | |", "|---|---|---|---|"]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ")[:200] for cell in row]
        lines.append(
            f"| {' | '.join(cells)} | {'' if row.assumed == row.found else '**differs**'} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the table. Return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="model folder; a small model is enough")
    model = str(parser.parse_args().model)
    version = PACKAGE.version()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    rows = list(vendor_rows(model, "CPP"))
    if probes.has_python_transceiver(version):
        rows += vendor_rows(model, "PYTHON")
    rows += worker_rows(checks.Site(model=model, gpus=listed.count("GPU "), env=dict(os.environ)))
    print(f"TensorRT-LLM {version}\n\n{table(rows)}", flush=True)
    return int(any(row.assumed != row.found for row in rows))


if __name__ == "__main__":
    sys.exit(main())
