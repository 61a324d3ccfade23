"""`python -m dynamo_trtllm.frontend`: configuration to a serving frontend. Wires the rooms together, nothing else."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack

import uvicorn
import uvloop

from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.discovery.etcd import EtcdDiscovery, tls_files
from dynamo_trtllm.errors import ConfigError, DynamoError, InternalError
from dynamo_trtllm.frontend.app import build_app
from dynamo_trtllm.frontend.canary import Canaries, CanaryOptions
from dynamo_trtllm.frontend.connection import http_server
from dynamo_trtllm.frontend.models import Models
from dynamo_trtllm.frontend.pipeline import Pipeline, PipelineOptions
from dynamo_trtllm.frontend.recovery import RecoveryLimits
from dynamo_trtllm.frontend.responses.shelf import store_limits
from dynamo_trtllm.observe import logging as observe_logging
from dynamo_trtllm.observe.metrics import FrontendMetrics
from dynamo_trtllm.plane.jetstream import JetStreamStore
from dynamo_trtllm.plane.linked import PlaneLimits
from dynamo_trtllm.plane.nats import NatsPlane
from dynamo_trtllm.plane.store import MemoryStore, Store
from dynamo_trtllm.router.pairs import PairBook
from dynamo_trtllm.router.view import ClusterView

PROG = "python -m dynamo_trtllm.frontend"
_DESCRIPTION = "The OpenAI-compatible HTTP frontend: renders, routes to prefill and decode workers, parses, streams."
_BACKLOG = 2048
_SETTLE_S = 15.0  # longest wait for the models that are there already, before the first request is taken

_log = logging.getLogger(__name__)


def main() -> None:
    """Exit status: 0 after a signal, 2 for a bad configuration, 1 for anything that failed later."""
    try:
        config = load(FrontendConfig, prog=PROG, description=_DESCRIPTION).config
        observe_logging.setup(config.log_level, "frontend")
        uvloop.run(serve(config))
    except ConfigError as exc:
        exit_with(PROG, exc)
    except DynamoError as exc:
        _log.error("%s: %s", exc.code, exc.message)
        raise SystemExit(1) from exc


async def serve(config: FrontendConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError when the port is taken, Unreachable with no etcd or NATS."""
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(_listen(config.http_host, config.http_port))
        # asked twice within the time-out: a worker that answers neither is dead
        plane = await NatsPlane.connect(config.nats_server, PlaneLimits(ping_interval_s=config.stall_timeout_s / 2))
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(config.etcd_endpoints, tls=tls_files(config))
        stack.push_async_callback(discovery.aclose)
        view, book, metrics = ClusterView(), PairBook(), FrontendMetrics()
        tries_pairs = config.canary_interval_s > 0
        models = Models(view, discovery, plane, config.namespace, book if tries_pairs else None)
        stack.push_async_callback(models.aclose)
        pipeline = Pipeline(view, plane, _options(config), book)
        stack.push_async_callback(pipeline.aclose)
        tasks = [models.watch(), plane.until_ended()]
        if tries_pairs:
            options = CanaryOptions(interval_s=config.canary_interval_s, timeout_s=config.canary_timeout_s)
            tasks.append(Canaries(view, pipeline, book, options).run(plane, metrics))
        store = await _store(config)
        stack.push_async_callback(store.aclose)
        app = build_app(config, models, pipeline, metrics, store)
        # A model that was not heard of yet is not unknown: until then, and for this long, early clients wait
        settled = asyncio.wait_for(models.settled(), _SETTLE_S)
        await _until_stopped(http_server(app, config, backlog=_BACKLOG), sock, tasks, settled)


def _options(config: FrontendConfig) -> PipelineOptions:
    return PipelineOptions(
        limits=RecoveryLimits(retries=config.retry_limit, migrations=config.migration_limit),
        hold_s=config.hold_for_roles_s,
        decode_fallback=config.decode_fallback,
    )


async def _store(config: FrontendConfig) -> Store:
    """Raises Unreachable when it is JetStream and there is none."""
    if config.response_store == "jetstream":
        return await JetStreamStore.connect(config.nats_server, config.namespace, store_limits(config))
    return MemoryStore(store_limits(config))


async def _until_stopped(
    server: uvicorn.Server,
    sock: socket.socket,
    work: Sequence[Coroutine[None, None, None]],
    settled: Coroutine[None, None, None],
) -> None:
    """The HTTP server, from `settled` on, the watch on discovery and the canaries: the end of any ends all."""
    tasks = [asyncio.create_task(each) for each in work]
    settling = asyncio.create_task(settled)
    for task in tasks:
        task.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        _log.info("listening on http://%s:%d", *sock.getsockname()[:2])
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        await asyncio.wait({settling, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        # `serve` would raise the signal once more at its end, which kills the process before it has closed anything
        await server._serve([sock])
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
                raise InternalError("the watch on discovery or the canaries ended; restart the frontend")
    finally:
        for task in (settling, *tasks):
            task.cancel()
        await asyncio.gather(settling, *tasks, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    """Listens before anything is started: a taken port is the first thing that is said, and early clients wait."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"--http-port {port} on {host} can't be used ({exc.strerror}); stop what uses it or choose another",
            field="http_port",
        ) from exc
    return sock
