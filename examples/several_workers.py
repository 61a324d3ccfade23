"""Start a prefill and a decode worker on each pair of GPUs, as processes of this program.

    python examples/several_workers.py /models/gpt-oss-20b --engine vllm --gpus 4
    dynamo-trtllm frontend

If a worker fails, the others are drained and the program ends with status 1: a cluster manager
restarts it. `dynamo-trtllm launch` also restarts single workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from multiprocessing.connection import wait
from typing import Any

from dynamo_trtllm import Role, Worker, WorkerConfig

ROLES = (Role.PREFILL, Role.DECODE)


def run_worker(gpu: int, settings: dict[str, Any]) -> None:
    # Ctrl-C goes to this program only, which drains its workers with one signal.
    os.setsid()
    # Before the engine is imported: a worker sees only its own GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    Worker(WorkerConfig(**settings, disaggregation_mode=ROLES[gpu % 2])).run()


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model_path")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--etcd-endpoints", default="http://localhost:2379")
    parser.add_argument("--nats-server", default="nats://localhost:4222")
    parser.add_argument("--namespace", default="dynamo")
    settings = vars(parser.parse_args())
    # A forked process would inherit threads and GPU contexts.
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=run_worker, args=(gpu, settings))
        for gpu in range(settings.pop("gpus"))
    ]
    for worker in workers:
        worker.start()

    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        if not is_stopping:  # a second SIGTERM would end a worker that drains
            is_stopping = True
            for worker in workers:
                worker.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    wait([worker.sentinel for worker in workers])  # until the first one ends
    stop()
    for worker in workers:
        worker.join()
    return 1 if any(worker.exitcode for worker in workers) else 0


if __name__ == "__main__":
    raise SystemExit(main())
