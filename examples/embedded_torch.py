"""Run a worker inside your own program, on its event loop and beside its other tasks.

    python examples/embedded_torch.py \\
        --etcd-endpoints http://localhost:2379 --nats-server nats://localhost:4222
    dynamo-trtllm frontend --http-port 8000

Then send requests for the model `embedded` to the frontend. SIGTERM or Ctrl-C drains the worker and
exits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from dynamo_trtllm import Role, Worker, WorkerConfig

log = logging.getLogger("embedded")


async def other_work() -> None:
    """Do what else your program does."""
    minutes = 0
    while True:
        await asyncio.sleep(60)
        minutes += 1
        log.info("%d minutes of other work", minutes)


async def run(config: WorkerConfig) -> None:
    worker = Worker(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    async with asyncio.TaskGroup() as group:
        other = group.create_task(other_work())
        # until worker.stop(); raises if the engine fails, which cancels the group
        await worker.serve()
        other.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--etcd-endpoints", default="http://localhost:2379")
    parser.add_argument("--nats-server", default="nats://localhost:4222")
    parser.add_argument("--namespace", default="dynamo")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    config = WorkerConfig(
        model_path="tiny-gpt-oss",  # a bundled model, or a folder
        served_model_name="embedded",
        engine="torch",
        disaggregation_mode=Role.AGGREGATED,
        etcd_endpoints=given.etcd_endpoints,
        nats_server=given.nats_server,
        namespace=given.namespace,
        override_engine_args={"max_batch_size": 8},
    )
    asyncio.run(run(config))


if __name__ == "__main__":
    main()
