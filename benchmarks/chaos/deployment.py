"""The deployment of a chaos run: two prefill and two decode workers, a frontend, etcd and NATS.

Or three elastic workers, a planner, and a frontend with two processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..deployment import FRONTEND, NAME_VARIABLE, PLANNER, LaunchedDeployment, NotReady
from ..servers import Server
from .network import Network

__all__ = [
    "FRONTEND",
    "NUM_FRONTENDS",
    "PLANNER",
    "WORKERS",
    "Deployment",
    "NotReady",
    "Options",
    "role",
]

WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
_ELASTIC_WORKERS = ("elastic-1", "elastic-2", "elastic-3")
# Of an elastic worker: few, so that transfers in both directions wait for each other's blocks.
_ELASTIC_BLOCKS = 12
NUM_FRONTENDS = 2  # processes of the frontend of elastic workers
_NO_LIMIT_MS = 3_600_000.0  # the planner changes no shares that an operator has set
_READY_S = 300.0  # the torch engine loads for minutes on a busy machine
_STAND_IN = Path(__file__).parent / "stand_in"
_FAKES = Path(__file__).parents[2] / "tests" / "fakes"
_MODELS = {"mock": "mock", "torch": "tiny-gpt-oss", "trtllm": "tiny-gpt-oss"}
STEP_S = 0.02  # time per token of the mock engine
ENGINE_ARGS: Mapping[str, dict[str, Any]] = {
    "mock": {"step_s": STEP_S, "kv_cache_blocks": 1024},
    "torch": {
        "transfer_backend": "tcp",
        "dtype": "float32",
        "max_batch_size": 64,
        "kv_cache_blocks": 1024,
    },
    "trtllm": {
        "max_batch_size": 64,
        "max_num_tokens": 4096,
        "max_seq_len": 4096,
        "cuda_graph_config": None,
        "kv_cache_config": {"enable_block_reuse": False},
        "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 4096},
        "disable_overlap_scheduler": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the deployment."""

    # trtllm: with the stand-in for TensorRT-LLM in tests/fakes
    engine: Literal["mock", "torch", "trtllm"] = "mock"
    stall_timeout_s: float = 5.0  # of the frontend
    worker_stall_timeout_s: float = 10.0
    lease_ttl_s: float = 5.0
    kv_transfer_ttl_s: float = 5.0
    hold_s: float = 5.0
    is_launcher_victim: bool = False  # the launcher starts its own etcd and NATS, which end with it
    has_network: bool = False  # the frontend has its own NATS server behind a relay
    is_elastic: bool = False  # three elastic workers with few KV blocks, a planner, two frontends

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the worker names: two per role, or one if no worker has to replace another."""
        if self.is_elastic:
            return _ELASTIC_WORKERS
        return WORKERS[::2] if self.is_launcher_victim else WORKERS

    @property
    def model(self) -> str:
        return _MODELS[self.engine]


class Deployment(LaunchedDeployment):
    """A deployment with these options."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.network: Network | None = None
        super().__init__(
            workers=options.workers,
            model=options.model,
            ready_s=_READY_S,
            starts_servers=options.is_launcher_victim,
        )

    def _start_nats(self, folder: Path) -> Server:
        if not self.options.has_network:
            return super()._start_nats(folder)
        self.network = Network(folder)
        return self.network.workers

    def services(self) -> dict[str, str]:
        """Return the addresses for the launcher's file.

        With a network, workers get NATS from their environment.
        """
        addresses = super().services()
        return (
            addresses
            if self.network is None
            else addresses | {"nats": self.network.frontend_address}
        )

    def stop(self) -> list[str]:
        leftovers = super().stop()
        if self.network is not None:
            self.network.close()
        return leftovers

    def description(self) -> dict[str, Any]:
        options = self.options
        frontend: dict[str, Any] = {
            "http-host": "127.0.0.1",
            "http-port": self.http_port,
            "stall-timeout-s": options.stall_timeout_s,
            "hold-for-roles-s": options.hold_s,
        }
        planner: dict[str, float] | Literal["off"] = "off"
        if options.is_elastic:
            frontend["workers"] = NUM_FRONTENDS
            planner = {"slo-ttft-ms": _NO_LIMIT_MS, "slo-itl-ms": _NO_LIMIT_MS}
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": frontend,
            "planner": planner,
            "workers": [self._worker(name, number) for number, name in enumerate(options.workers)],
            "restart": {"max_restarts": 1000, "window_s": 1},
            "ready_timeout_s": _READY_S,
        }

    def _worker(self, name: str, number: int) -> dict[str, Any]:
        options = self.options
        flags = {
            "model": options.model,
            "engine": options.engine,
            "override-engine-args": self._engine_args(),
            "lease-ttl-s": options.lease_ttl_s,
            "stall-timeout-s": options.worker_stall_timeout_s,
            "kv-transfer-ttl-s": options.kv_transfer_ttl_s,
            "system-port": 0,
        }
        env = {
            NAME_VARIABLE: name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": _worker_path(options.engine),
        }
        if options.engine == "trtllm":
            env["STANDIN_BACKEND"] = "tcp"
        else:
            # another address per worker, as on different hosts
            flags["kv-transfer-host"] = f"127.0.0.{2 + number}"
        if self.network is not None:
            env["DYN_TRTLLM_NATS_SERVER"] = self.network.workers.address
        return {"name": name, "disaggregation_mode": role(name), "flags": flags, "env": env}

    def _engine_args(self) -> dict[str, Any]:
        more = {"kv_cache_blocks": _ELASTIC_BLOCKS} if self.options.is_elastic else {}
        return ENGINE_ARGS[self.options.engine] | more


def _worker_path(engine: str) -> str:
    """Return PYTHONPATH of a worker that a request of `query_of_death` can end."""
    paths = [str(_STAND_IN)]
    if engine == "trtllm":
        paths.append(str(_FAKES))
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    return os.pathsep.join(paths)


def role(name: str) -> str:
    """Return the role of a worker from its name."""
    return name.partition("-")[0]
