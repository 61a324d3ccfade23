"""A baseline: vLLM's own servers behind vllm-router, in place of our frontend and workers.

vllm-router is vLLM's router for disaggregated serving, from PyPI. It sends a request to a prefill
server with `max_tokens` 1, and then, with the `kv_transfer_params` of the answer, to a decode
server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dynamo_trtllm.support.network.addresses import free_ports

from .machine import wait_free
from .plan import AGGREGATED, Plan, disaggregated
from .result import Row
from .scenario import ScenarioResult, ShapeResults, Sizes, measure_shapes, shape_rows
from .server import Command, Server, vllm_server

ARM = "vLLM's servers and vllm-router"
PREFIX = "vllm-router:"  # of a topology's name
_CONNECTOR = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
_ROUTER_READY_S = 60.0


class RoutedServers:
    """vLLM's servers and the router. Call `start` from the main thread and always call `stop`.

    Args:
        plan: engine arguments and model.
        workers: as for our deployment, see `plan.topology`.
        logs: folder for the logs.
    """

    def __init__(self, plan: Plan, workers: Sequence[dict[str, Any]], logs: Path) -> None:
        self._plan = plan
        self._workers = workers
        self._logs = logs
        self._running = ExitStack()
        self.lines: list[str] = []  # logs of all servers
        self.url = ""
        self.started_s = 0.0

    def start(self) -> None:
        """Block until all servers and the router are ready.

        Raise NotReady if one does not become ready.
        """
        wait_free(
            {
                gpu
                for worker in self._workers
                if worker["devices"] != "cpu"
                for gpu in worker["devices"]
            }
        )
        begun_s = time.monotonic()
        servers = [self._server(worker) for worker in self._workers]
        for server in servers:
            self._running.callback(server.stop)
            server.begin()
        for server in servers:
            server.wait()
        port = free_ports()
        roles = [worker["disaggregation_mode"] for worker in self._workers]
        argv = router_arguments(list(zip(roles, [server.url for server in servers], strict=True)))
        command = Command(
            module="vllm_router.launch_router",
            argv=[*argv, "--host=127.0.0.1", f"--port={port}", f"--prometheus-port={free_ports()}"],
            port=port,
            ready_s=_ROUTER_READY_S,
        )
        router = Server(command, self._logs / "vllm-router.log")
        self._running.callback(router.stop)
        router.begin()
        router.wait()
        self.url = router.url
        self.started_s = time.monotonic() - begun_s

    def _server(self, worker: dict[str, Any]) -> Server:
        gpus = () if worker["devices"] == "cpu" else worker["devices"]
        more = []
        env = {}
        if worker["disaggregation_mode"] != AGGREGATED:
            more = ["--kv-transfer-config", _CONNECTOR]
            env = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports()),
            }
        log = self._logs / f"vllm-{worker['name']}.log"
        return vllm_server(self._plan, gpus, log, more, env, lines=self.lines)

    def stop(self) -> None:
        """Stop the router and all servers. Idempotent."""
        self._running.close()


def router_arguments(servers: Sequence[tuple[str, str]]) -> list[str]:
    """Return the router's arguments for servers, given as (role, URL)."""
    argv = ["--policy=round_robin", "--log-level=warning"]
    aggregated = [url for role, url in servers if role == AGGREGATED]
    if aggregated:
        return [*argv, "--worker-urls", *aggregated]
    argv += ["--vllm-pd-disaggregation", "--kv-connector=nixl"]
    for role, url in servers:
        argv += [f"--{role}", url]
    return argv


def beside(pair: ShapeResults, found: ShapeResults) -> list[Row]:
    """Return the results of our workers as ratios of these, for shapes that both completed."""
    rows = []
    for name in found.keys() & pair.keys():
        ours = pair[name]
        theirs = found[name]
        if ours["ok"] == theirs["ok"] > 0:
            tokens = ours["tokens_per_s"] / theirs["tokens_per_s"]
            first = ours["ttft_ms"]["p50"] / theirs["ttft_ms"]["p50"]
            rows.append(
                Row(
                    what=f"{name}, ours / {ARM}",
                    value=f"tokens/s {tokens:.3f}, TTFT p50 {first:.3f}",
                )
            )
    return sorted(rows, key=lambda row: row.what)


async def run(plan: Plan, sizes: Sizes, logs: Path, pair: ShapeResults) -> ScenarioResult:
    """Measure the shapes with vLLM's servers and the router, and compare with our results from the
    same run.

    Raise NotReady if a server does not become ready.
    """
    servers = RoutedServers(plan, disaggregated(plan), logs)
    try:
        servers.start()  # in this thread, because servers end with the thread that started them
        found = await measure_shapes(servers.url, sizes)
    finally:
        servers.stop()
    return [*shape_rows(ARM, found, len(plan.gpus)), *beside(pair, found)], dict(found)
