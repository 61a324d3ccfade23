"""Run the worker of one rank of a Slurm or MPI job: its rank decides role, port and GPU.

    srun --ntasks 8 --ntasks-per-node 4 python examples/slurm_worker.py /models/gpt-oss-20b \\
        --engine vllm --prefill 2 --etcd-endpoints http://HEAD:2379 --nats-server nats://HEAD:4222

The first ranks are prefill workers, the others decode workers. Slurm sends SIGTERM to each rank,
which drains its worker.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping

from dynamo_trtllm import Role, Worker, WorkerConfig

FIRST_PORT = 9090
RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def number(names: tuple[str, ...], environment: Mapping[str, str]) -> int:
    """Return the value of the first variable that is set."""
    for name in names:
        if name in environment:
            return int(environment[name])
    raise SystemExit(f"none of {', '.join(names)} is set; start this script with srun or mpirun")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model_path")
    parser.add_argument("--engine", default="trtllm")
    parser.add_argument("--prefill", type=int, default=1, help="number of prefill workers")
    parser.add_argument("--etcd-endpoints", default="http://localhost:2379")
    parser.add_argument("--nats-server", default="nats://localhost:4222")
    settings = vars(parser.parse_args())
    rank = number(RANKS, os.environ)
    local_rank = number(LOCAL_RANKS, os.environ)  # within the node
    role = Role.PREFILL if rank < settings.pop("prefill") else Role.DECODE
    # srun with --gpus-per-task has assigned a GPU. Otherwise every rank of a node sees all.
    if "SLURM_GPUS_PER_TASK" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    config = WorkerConfig(**settings, disaggregation_mode=role, system_port=FIRST_PORT + local_rank)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    print(f"rank {rank}: {role} worker, GPUs {gpus}, port {config.system_port}", flush=True)
    Worker(config).run()


if __name__ == "__main__":
    main()
