"""A worker's life in four lines: start, serve, drain, close. Registration is the last act of start, deregistration the
first of drain.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm import __version__
from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.demo_models import locate, resolve
from dynamo_trtllm.discovery import keys
from dynamo_trtllm.discovery.base import Registration
from dynamo_trtllm.discovery.etcd import EtcdDiscovery, tls_files
from dynamo_trtllm.discovery.records import check_model_name
from dynamo_trtllm.engines.base import Engine, EngineInfo, HasStats
from dynamo_trtllm.engines.factory import check_prerequisites, create_engine
from dynamo_trtllm.errors import ConfigError, DynamoError, EngineFailed
from dynamo_trtllm.messages import WIRE_VERSION, Instance, ModelDeploymentCard, Role, SamplingDefaults
from dynamo_trtllm.network.addresses import address_towards, allow_files, is_wildcard, resolve_host
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.request_plane.base import ServerHandle
from dynamo_trtllm.request_plane.client import PlaneLimits
from dynamo_trtllm.request_plane.nats import NatsPlane
from dynamo_trtllm.worker import startup
from dynamo_trtllm.worker.admission import Admission, AdmissionLimits
from dynamo_trtllm.worker.health import Health, HealthServer
from dynamo_trtllm.worker.service import WorkerService, digest, drain

_log = logging.getLogger(__name__)

_CHECK_EVERY_S = 2.0  # engines are asked, they do not tell: how soon a dead engine is noticed when no request meets it
# So long an engine thread that comes back from its GPU may wait for the GIL while the loop has work. With Python's own
# 5 ms the worst of a hundred steps waited just that.
SWITCH_S = 0.0005
_ID_BITS = 53  # `/health` shows ids as JSON numbers, of which JavaScript and jq keep this many bits
_FILES = 8192  # open at once: one per KV transfer, and about 128 for everything else
_COMPONENTS = {Role.PREFILL: "prefill", Role.DECODE: "tensorrt_llm", Role.AGGREGATED: "tensorrt_llm"}
_VLLM_COMPONENTS = {**_COMPONENTS, Role.DECODE: "backend", Role.AGGREGATED: "backend"}  # as Dynamo's vLLM workers


def endpoint_of(config: WorkerConfig) -> keys.EndpointId:
    """The one that is configured, else one by role and engine."""
    if config.endpoint:
        return keys.parse_endpoint(config.endpoint)
    components = _VLLM_COMPONENTS if config.engine == "vllm" else _COMPONENTS
    return keys.EndpointId(config.namespace, components[config.disaggregation_mode], "generate")


class _RunningWorker(NamedTuple):
    """What a started worker is made of; the exit stack of `serve` closes it."""

    plane: NatsPlane
    engine: Engine
    service: WorkerService
    serving: ServerHandle
    registration: Registration


def _resolved(config: WorkerConfig) -> WorkerConfig:
    """The name of a bundled model becomes its folder; clients still use the name. May write the folder: seconds.

    Raises ConfigError for what this machine lacks.
    """
    check_prerequisites(config, process_environment(), locate)
    if config.engine == "mock":
        return config  # it has no weights: the path only gives the name
    name = config.served_model_name or config.model_path.rstrip("/").rpartition("/")[2]
    return config.model_copy(update={"model_path": str(resolve(config.model_path)), "served_model_name": name})


def _with_kv_transfer_host(config: WorkerConfig) -> WorkerConfig:
    """Return the IP address at which other workers reach this one. May wait for the name resolver.

    Raises ConfigError for a name that has no address, or a wildcard's.
    """
    if config.engine not in ("torch", "mock", "vllm"):
        return config
    if config.kv_transfer_host is None:
        host = address_towards([config.nats_server, *config.etcd_endpoints.split(",")])
    else:
        host = resolve_host(config.kv_transfer_host)
    if is_wildcard(host):
        raise ConfigError(
            f"--kv-transfer-host {config.kv_transfer_host} means {host}, which no other worker can connect to; give "
            "one of this host's addresses",
            field="kv_transfer_host",
        )
    return config.model_copy(update={"kv_transfer_host": host})


def _limits(config: WorkerConfig, info: EngineInfo) -> AdmissionLimits:
    batch = info.limits.max_batch_size  # 0: the engine does not tell
    return AdmissionLimits(
        active=batch + config.max_queued_requests if batch else None,
        max_pending_transfer_fraction=config.max_ticket_kv_fraction,
    )


class Worker:
    """Owns one engine. Embed it in a script of your own with `Worker(config).run()`, or await `serve()` in a loop."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.instance_id = secrets.randbits(_ID_BITS)
        self._sampling_defaults = SamplingDefaults()
        self._metrics = WorkerMetrics()
        self._health = Health(instance_id=f"{self.instance_id:x}")
        self._stop = asyncio.Event()
        self._wake = asyncio.Event()  # set when `_until_stopped` must check again
        self._tasks = BackgroundTasks(self._background_failed)

    def run(self) -> None:
        """Serves until SIGTERM, SIGINT or `stop()`; for the main thread, because signals come nowhere else.

        Raises ConfigError, Unreachable, EngineFailed. A second signal exits with 1 at once.
        """
        import uvloop

        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Worker.run handles signals and needs the main thread; in other threads await serve")
        sys.setswitchinterval(SWITCH_S)
        allow_files(_FILES, "; until then fewer KV transfers may run at once")
        uvloop.run(self._run_with_signals())

    def stop(self) -> None:
        """Drain and return from `serve`; a start under way is given up. Call it on the worker's loop."""
        self._stop.set()
        self._wake.set()

    def _background_failed(self, reason: str) -> None:
        self._health.failure = reason
        self._wake.set()

    async def _run_with_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            if self._stop.is_set():
                task.cancel()  # the second signal ends at once
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            await self.serve()
        except asyncio.CancelledError:
            raise SystemExit(1) from None

    async def serve(self) -> None:
        """Start, serve, drain, close; once per worker. Raises as `run`. Cancelled it closes without a drain."""
        async with AsyncExitStack() as stack:
            parts = await self._unless_stopped(self._start(stack))
            if parts is None:
                _log.info("stopped before it served")
                return
            _log.info("serving as instance %x (%s)", self.instance_id, self._config.disaggregation_mode)
            try:
                await self._until_stopped(parts)
            except DynamoError as exc:
                _log.error("leaving, %s: %s", exc.code, exc.message)
                await self._drain(parts)
                raise
            await self._drain(parts)

    async def _unless_stopped(self, start: Coroutine[Any, Any, _RunningWorker]) -> _RunningWorker | None:
        """None when `stop` comes first; the start has then ended too. Raises what ended a background task meanwhile."""
        starting = asyncio.create_task(start, name="worker-start")
        stopping = asyncio.create_task(self._stop.wait(), name="worker-stop")
        failing = asyncio.create_task(self._tasks.until_failed(), name="worker-failure")
        try:
            await asyncio.wait({starting, stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            self._tasks.check()
            return None
        finally:
            for task in (starting, stopping, failing):
                task.cancel()
            await asyncio.gather(starting, stopping, failing, return_exceptions=True)

    async def _start(self, stack: AsyncExitStack) -> _RunningWorker:
        model = self._config.model_path
        self._config = config = await asyncio.to_thread(_resolved, self._config)
        self._sampling_defaults = await asyncio.to_thread(startup.sampling_defaults, config, model)
        check_model_name(self._model_name())
        await asyncio.to_thread(startup.check_flags, config)
        self._config = config = await asyncio.to_thread(_with_kv_transfer_host, config)
        engine = create_engine(config, instance_id=self.instance_id)
        stack.push_async_callback(engine.aclose)
        await stack.enter_async_context(
            HealthServer(
                config.system_host,
                config.system_port,
                self._health,
                lambda: self._render_metrics(engine),
                self._tasks,
            )
        )
        limits = PlaneLimits(ping_interval_s=config.stall_timeout_s / 3)
        plane = await NatsPlane.connect(config.nats_server, limits, self._tasks)
        stack.push_async_callback(plane.aclose)
        discovery = EtcdDiscovery(
            config.etcd_endpoints, tls=tls_files(config), lease_ttl_s=config.lease_ttl_s, tasks=self._tasks
        )
        stack.push_async_callback(discovery.aclose)
        self._health.phase = "loading"
        peers = await startup.live_peers(
            discovery, endpoint_of(self._config).namespace, model=self._model_name(), role=config.disaggregation_mode
        )
        await startup.preflight(engine, peers)
        info = await startup.start_engine(engine, self._health)
        instance, files = self._describe(info)
        admission = Admission(_limits(config, info), time.time)
        service = WorkerService(engine, instance, admission, files=files, metrics=self._metrics)
        serving = await plane.serve(instance.subject, service)
        stack.push_async_callback(serving.aclose)
        registration = await discovery.register(instance)
        stack.push_async_callback(registration.aclose)
        self._health.phase = "serving"
        return _RunningWorker(plane, engine, service, serving, registration)

    def _describe(self, info: EngineInfo) -> tuple[Instance, dict[str, Path]]:
        """The record to register, and the files it names by their hash."""
        config = self._config
        role = config.disaggregation_mode
        endpoint = endpoint_of(self._config)
        digests = {name: digest(path) for name, path in info.files.items()}
        made = ModelDeploymentCard(
            name=self._model_name(),
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            renderer=info.renderer,
            **startup.parsers(config, info.renderer),
            unsupported_features=info.unsupported_features,
            files=digests,
            sampling_defaults=startup.without_unsupported(self._sampling_defaults, info.unsupported_features),
        )
        instance = Instance(
            id=self.instance_id,
            namespace=endpoint.namespace,
            component=endpoint.component,
            endpoint=endpoint.endpoint,
            subject=keys.subject(endpoint, self.instance_id),
            role=role,
            engine=info.engine,
            card=made,
            layout=info.layout,
            limits=info.limits,
            kv_compat=info.kv_compat,
            can_aggregate=info.can_aggregate,
            strategy=config.disaggregation_strategy,
            version=__version__,
            wire=WIRE_VERSION,
        )
        return instance, {digests[name]: path for name, path in info.files.items()}

    def _model_name(self) -> str:
        return self._config.served_model_name or Path(self._config.model_path).name

    async def _until_stopped(self, parts: _RunningWorker) -> None:
        """Return when asked to stop. Raise EngineFailed when the engine failed or a restart was requested, Disconnected
        when the request plane is gone for good, and the failure of a background task."""
        while not self._stop.is_set():
            if parts.service.restart_asked.is_set():
                raise EngineFailed(f"asked to restart: {parts.service.restart_reason}")
            parts.plane.check()
            self._tasks.check()
            try:
                await parts.engine.check()
            except EngineFailed as exc:
                self._health.failure = exc.message
                raise
            try:
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _drain(self, parts: _RunningWorker) -> None:
        self._health.phase = "draining"
        await parts.registration.aclose()
        await drain(parts.engine, parts.serving, self._config.drain_timeout_s)
        self._health.phase = "stopped"

    def _render_metrics(self, engine: Engine) -> bytes:
        return self._metrics.render(engine.stats() if isinstance(engine, HasStats) else None)
