"""Run a worker: start, serve, drain, close.

A worker registers at the end of its start, and deregisters at the beginning of its drain.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.cluster.connect import connect_plane, open_discovery
from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.cluster.discovery.discovery_interface import Discovery
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.cluster.request_plane.subjects import load_subject
from dynamo_trtllm.config.engine_names import BUILT_IN, DEFAULT_ENGINE
from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.config.value_errors import check_settings_type
from dynamo_trtllm.engines.capabilities import GuardsKvTransfers, PublishesKvEvents
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo
from dynamo_trtllm.engines.factory import (
    EngineFactory,
    EngineKind,
    check_prerequisites,
    check_settings,
    engine_kind,
    find_engine,
)
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.keys import TransferKeys
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.kv_transfer.signer import TransferSigner
from dynamo_trtllm.models import locate, resolve
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent, recorder_folder
from dynamo_trtllm.observability.recording_server import answer_queries
from dynamo_trtllm.protocol.cost_model import CostModel
from dynamo_trtllm.protocol.errors import ConfigError, DynamoError
from dynamo_trtllm.protocol.kv_events import KvEventPublisher, kv_events_subject
from dynamo_trtllm.protocol.messages import (
    Instance,
    Role,
    SamplingDefaults,
)
from dynamo_trtllm.protocol.shares import Shares, ShareTable
from dynamo_trtllm.support.background import BackgroundTasks, wait_for_first
from dynamo_trtllm.support.garbage_collection import freeze_objects
from dynamo_trtllm.support.lifecycle import Lifecycle
from dynamo_trtllm.support.network.addresses import (
    address_towards,
    http_url,
    is_wildcard,
    resolve_host,
)
from dynamo_trtllm.support.network.listening import allow_files
from dynamo_trtllm.support.tls import server_certificate
from dynamo_trtllm.worker import startup
from dynamo_trtllm.worker.card import check_card_flags, sampling_defaults
from dynamo_trtllm.worker.cluster_watch import follow_cluster
from dynamo_trtllm.worker.description import admission_of, describe
from dynamo_trtllm.worker.health import Health, health_app, health_server
from dynamo_trtllm.worker.load_reports import broadcast_load
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.started_worker import StartedWorker
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming

log = logging.getLogger(__name__)

# The longest time for which an engine thread that returns from its GPU waits for the GIL while the
# event loop works. With Python's default of 5 ms, the slowest of a hundred steps waited for 5 ms.
SWITCH_S = 0.0005
# When an engine loads, its library creates 400,000 objects and hardly any garbage. With Python's
# default of 700 new objects, garbage collections take a seventh of the CPU time in which the torch
# engine loads.
_GC_THRESHOLDS = (50_000, 20, 100)
_ID_BITS = 53  # `/health` has ids as JSON numbers, for which JavaScript and jq have this precision
# The limit of open files. Each KV transfer takes one file; everything else takes about 128 files.
_MAX_OPEN_FILES = 8192
# Components of endpoints: of prefill workers, and of other workers whose engine is from another
# package. All other workers have the component that `BUILT_IN` names for their engine.
_PREFILL_COMPONENT = "prefill"
_OUTSIDE_ENGINE_COMPONENT = "backend"


def endpoint_of(config: WorkerConfig, engine: str) -> records.EndpointId:
    """Return the configured endpoint, or the default one for the role and the name of the
    engine.
    """
    if config.endpoint:
        return records.parse_endpoint(config.endpoint)
    if config.disaggregation_mode is Role.PREFILL:
        component = _PREFILL_COMPONENT
    elif engine in BUILT_IN:
        component = BUILT_IN[engine].component
    else:
        component = _OUTSIDE_ENGINE_COMPONENT
    return records.EndpointId(config.namespace, component, "generate")


class _CheckedSettings(NamedTuple):
    """The checked settings of a worker, before it creates its engine."""

    config: WorkerConfig
    sampling_defaults: SamplingDefaults
    kind: EngineKind


def _check_worker_settings(config: WorkerConfig, kind: EngineKind | None) -> _CheckedSettings:
    """Check the configuration, and find the engine.

    Return the configuration with the model's folder and this host's address. A bundled model keeps
    its served name although its path changes. The call may take seconds: it may write the model's
    folder, import the engine of another package, and block on DNS.

    Args:
        config: settings of the worker.
        kind: the engine; None for the engine of `config.engine`.

    Raises:
        ConfigError: a prerequisite of the engine is missing, or a flag has a wrong value.
    """
    if kind is None:
        check_prerequisites(config, process_environment(), locate)
        kind = find_engine(config)
    check_settings(config, kind)
    model = config.model_path
    if kind.traits.reads_model:
        update = {"model_path": str(resolve(model)), "served_model_name": config.model_name}
        config = config.model_copy(update=update)
        defaults = sampling_defaults(config, model)
    else:
        defaults = SamplingDefaults()
    records.check_model_name(config.model_name)
    check_card_flags(config, reads_model=kind.traits.reads_model)
    if kind.traits.uses_kv_transfer_host:
        config = _with_kv_transfer_host(config)
    return _CheckedSettings(config, defaults, kind)


def _with_kv_transfer_host(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration with the IP address at which other workers reach this one.

    May block on DNS.

    Raises:
        ConfigError: the configured name has no address, or the address is a wildcard.
    """
    if config.kv_transfer_host is None:
        servers = [] if config.uses_inproc_plane else [config.nats_server]
        if not config.uses_memory_discovery:
            servers += config.etcd_endpoints.split(",")
        host = address_towards(servers)
    else:
        host = resolve_host(config.kv_transfer_host, "--kv-transfer-host")
    if is_wildcard(host):
        raise ConfigError(
            f"--kv-transfer-host {config.kv_transfer_host} is a wildcard ({host}), not the address"
            " of one host; pass an IP address of this host",
            field="kv_transfer_host",
        )
    return config.model_copy(update={"kv_transfer_host": host})


class Worker(Lifecycle):
    """A worker with one engine, in this process.

    Use a worker with `async with`, which registers it and drains it at the end of the block; or run
    `serve()` in a task; or call `run()` in a program that does nothing else. Only `run` handles
    signals and changes settings of the process.

    Attributes:
        instance_id: id under which the worker registers.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        engine: EngineFactory | None = None,
        timing: WorkerTiming = TIMING,
    ) -> None:
        """Create the worker, which does nothing yet.

        Args:
            config: its settings.
            engine: class or function that creates an engine of your own. It is called as
                `engine(config, instance_id=...)` when the worker starts. Default: the engine of
                `config.engine`.
            timing: how long the parts of the worker wait. Tests pass shorter times.

        Raises:
            ConfigError: `config` is no WorkerConfig, `engine` is no such class or function, or
                `config.engine` is set as well.
        """
        super().__init__()
        check_settings_type(config, WorkerConfig)
        if engine is not None and config.engine is not None:
            raise ConfigError(
                f"the worker has two engines: --engine {config.engine}, and the engine that it was"
                " created with; leave one out",
                field="engine",
            )
        self._config = config
        # None: `start` finds the engine of `config.engine`.
        self._engine_kind = None if engine is None else engine_kind(engine)
        if self._engine_kind is None:
            engine_name = config.engine or DEFAULT_ENGINE
        else:
            engine_name = self._engine_kind.name
        self._endpoint = endpoint_of(config, engine_name)
        self._timing = timing
        self.instance_id = secrets.randbits(_ID_BITS)
        self._metrics = WorkerMetrics()
        self._health = Health(instance_id=f"{self.instance_id:x}")
        self._tasks = BackgroundTasks(self._background_failed)
        self._started_worker: StartedWorker | None = None
        self._owns_process = False  # True if nothing but this worker runs in the process
        self._system_port: int | None = None  # the port of the health server, once it listens

    @property
    def url(self) -> str | None:
        """The URL of health and metrics. None without `system_port`, or before the health server
        listens.
        """
        if self._system_port is None:
            return None
        config = self._config
        uses_tls = config.tls_files is not None
        return http_url(config.system_host, self._system_port, "", uses_tls=uses_tls)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or `stop()`, in the main thread only.

        While it stops, another SIGTERM or SIGINT exits with 1 at once. If the engine or a library
        does not end, the process exits after 30 s, or 5 s after the second signal.

        Raises:
            ConfigError: the configuration is invalid.
            Unreachable: NATS or etcd does not answer.
            EngineFailed: the engine failed, or a restart was requested.
            RuntimeError: the thread is not the main thread, or it runs an event loop.
        """
        self._prepare_run()
        self._owns_process = True
        sys.setswitchinterval(SWITCH_S)
        gc.set_threshold(*_GC_THRESHOLDS)
        allow_files(_MAX_OPEN_FILES, " for more concurrent KV transfers")
        self._run_loop(self._run_with_signals())

    def _background_failed(self, reason: str) -> None:
        self._health.failure = reason

    async def _run_with_signals(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            # A second signal skips the drain.
            if self._stop_event.is_set():
                self._force_exit()
                task.cancel()
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        self._stop_on_hangup()
        try:
            await self.serve()
        except asyncio.CancelledError:
            if not self._is_exit_forced:
                raise  # the event loop ends because of another error
            raise SystemExit(1) from None

    async def _serve(self) -> None:
        """Start, serve, drain and close. If it is cancelled, it closes without a drain."""
        status = 1
        async with AsyncExitStack() as stack:
            try:
                await self._serve_until_stopped(stack)
                status = 0
            finally:
                # The engine closes now, which may hang.
                self._limit_exit(status)

    async def _serve_until_stopped(self, stack: AsyncExitStack) -> None:
        """Start, serve and drain. `stack` closes the parts of the worker."""
        started = await wait_for_first(
            self._start(stack), self._stop_event.wait(), self._tasks.until_failed()
        )
        if not isinstance(started, StartedWorker):
            # `stop` was called before the worker had started.
            log.info("stopped during start-up")
            return
        self._note_ready()
        log.info("serving as instance %x (%s)", self.instance_id, self._config.disaggregation_mode)
        try:
            await wait_for_first(
                self._stop_event.wait(),
                started.service.until_failed(),
                self._tasks.until_failed(),
            )
        except DynamoError as exc:
            log.error("shutting down (%s): %s", exc.code, exc.message)
            if not self._health.failure:
                self._health.failure = exc.message
            # Calls that still run end with this error, and not as if the worker was stopped.
            started.server.failure = exc.message
            await self._drain(started)
            raise
        except asyncio.CancelledError:
            # If `stop` was not called, something in the event loop has raised SystemExit, maybe
            # because of a request. Frontends must not take this for a drain, because they would
            # then send the request to one worker after the other.
            if self._owns_process and not self._stop_event.is_set():
                started.server.failure = "its event loop was stopped"
            raise
        await self._drain(started)

    async def _start(self, stack: AsyncExitStack) -> StartedWorker:
        """Start the parts of the worker, which `stack` closes."""
        self._start_recorder(stack)
        checked = await asyncio.to_thread(_check_worker_settings, self._config, self._engine_kind)
        config = checked.config
        self._config = config
        engine = checked.kind.create(config, instance_id=self.instance_id)
        stack.push_async_callback(engine.aclose)
        keys = self._transfer_keys()
        addresses = None
        if config.disaggregation_mode in (Role.DECODE, Role.ELASTIC):
            addresses = PrefillAddresses(stay_s=config.kv_transfer_ttl_s)
        count_rejected = self._metrics.transfer_rejected
        if isinstance(engine, GuardsKvTransfers):
            guard = TransferGuard(keys, addresses=addresses, count=count_rejected)
            engine.use_transfer_guard(guard)
        await self._serve_health(engine, stack)
        plane = await self._connect(stack)
        discovery = open_discovery(config, self._tasks, lease_ttl_s=config.lease_ttl_s)
        stack.push_async_callback(discovery.aclose)
        if addresses is not None:
            self._follow_cluster(discovery, addresses, stack)
        self._health.phase = "loading"
        info = await self._load(engine, discovery)
        self._health.phase = "registering"
        instance, files = describe(
            config, self._endpoint, self.instance_id, info, checked.sampling_defaults
        )
        service = WorkerService(
            engine,
            instance,
            admission_of(config, instance, self._timing),
            files=files,
            metrics=self._metrics,
            signer=TransferSigner(self.instance_id, keys, count=count_rejected),
            kv_events=self._publish_kv_events(engine, plane, instance, stack),
            cost_prior=info.cost_prior or CostModel(step_tokens=info.limits.max_num_tokens),
            timing=self._timing,
        )
        server = await plane.serve(instance.subject, service, service.load_report)
        stack.push_async_callback(server.aclose)
        self._start_broadcasts(service, plane, stack)
        started = StartedWorker(
            service=service,
            server=server,
            # The registration is the last step, because requests arrive from now on.
            registration=await discovery.register(instance),
            register=partial(discovery.register, instance),
            health=self._health,
            drain_timeout_s=config.drain_timeout_s,
            tasks=self._tasks,
            timing=self._timing,
        )
        self._started_worker = started
        stack.push_async_callback(started.deregister)
        self._health.phase = "serving"
        return started

    def _follow_cluster(
        self, discovery: Discovery, addresses: PrefillAddresses, stack: AsyncExitStack
    ) -> None:
        """Follow the other workers and the shares of this one until `stack` is closed."""
        self._note_shares(None)
        following = follow_cluster(
            discovery, self._endpoint.namespace, addresses, self._note_shares
        )
        task = self._tasks.start(following, "cluster-watch")
        stack.push_async_callback(self._tasks.cancel, task)

    def _note_shares(self, table: ShareTable | None) -> None:
        """Show the shares of this worker, if it is elastic."""
        config = self._config
        if config.disaggregation_mode is not Role.ELASTIC:
            return
        self._health.shares = Shares(config.prefill_share, config.decode_share)
        self._health.shares_since = None
        if table is not None and self.instance_id in table.workers:
            self._health.shares = table.workers[self.instance_id]
            self._health.shares_since = table.since.get(self.instance_id)

    def _transfer_keys(self) -> TransferKeys | None:
        """Return the keys that sign this worker's KV transfers; None without a key file.

        Raises:
            ConfigError: the key file can't be used.
        """
        config = self._config
        if config.kv_transfer_key_file is not None:
            return TransferKeys(config.kv_transfer_key_file, self._metrics.key_reload_failed)
        if config.disaggregation_mode is not Role.AGGREGATED and not config.uses_inproc_plane:
            log.warning(
                "KV transfers are not signed: any client of NATS can make this worker transfer KV;"
                " give all workers the same --kv-transfer-key-file"
            )
        return None

    def _start_recorder(self, stack: AsyncExitStack) -> None:
        config = self._config
        RECORDER.start(
            recorder_folder(config.recorder_dir, process_environment()),
            namespace=self._endpoint.namespace,
            kind=str(config.disaggregation_mode),
            instance_id=self.instance_id,
        )
        stack.callback(RECORDER.stop)

    async def _serve_health(self, engine: Engine, stack: AsyncExitStack) -> None:
        """Serve health, metrics, /sleep and /wake until `stack` is closed."""
        config = self._config

        def render_metrics() -> bytes:
            return self._metrics.render(asdict(engine.stats()))

        actions = {"/sleep": self._sleep, "/wake": self._wake}
        access = AccessControl(config)
        access.count = self._metrics.count
        if config.api_keys_file is not None:
            following = self._tasks.start(access.follow_file(), "api-keys")
            stack.push_async_callback(self._tasks.cancel, following)
        certificate = server_certificate(config.tls_files)
        if certificate is not None:
            certificate.count = self._metrics.count
            following = self._tasks.start(certificate.follow_files(), "tls-certificate")
            stack.push_async_callback(self._tasks.cancel, following)
        app = health_app(self._health, render_metrics, actions, access.check_status)
        server = health_server(
            config.system_host, config.system_port, app, self._tasks, certificate
        )
        self._system_port = await stack.enter_async_context(server)

    async def _connect(self, stack: AsyncExitStack) -> RequestPlane:
        config = self._config
        limits = PlaneLimits(ping_interval_s=config.stall_timeout_s / 3)
        plane = await connect_plane(config, limits, self._tasks, self._metrics.message_unreadable)
        stack.push_async_callback(plane.aclose)
        # Called for each answer of `/health`.
        self._health.why_unreachable = plane.rejection
        return plane

    async def _load(self, engine: Engine, discovery: Discovery) -> EngineInfo:
        """Start the engine, after the preflight against live peers."""
        peers = await startup.live_peers(
            discovery,
            self._endpoint.namespace,
            model=self._config.model_name,
            role=self._config.disaggregation_mode,
        )
        await startup.preflight(engine, peers)
        info = await startup.start_engine(engine, self._health, self._timing)
        if self._owns_process:
            freeze_objects()
        return info

    def _start_broadcasts(
        self, service: WorkerService, plane: RequestPlane, stack: AsyncExitStack
    ) -> None:
        """Publish the load, and answer queries of recordings, until `stack` is closed."""
        namespace = service.instance.namespace
        publish = partial(plane.try_publish, load_subject(namespace))
        loads = broadcast_load(service.load_report_with_cost, service.called, publish, self._timing)
        stack.push_async_callback(self._tasks.cancel, self._tasks.start(loads, "load-reports"))
        answers = answer_queries(plane, namespace, self.instance_id)
        stack.push_async_callback(self._tasks.cancel, self._tasks.start(answers, "recordings"))

    def _publish_kv_events(
        self, engine: Engine, plane: RequestPlane, instance: Instance, stack: AsyncExitStack
    ) -> KvEventPublisher | None:
        """Publish the changes of the engine's prefix cache until `stack` is closed.

        Return None if the instance does not announce KV events.
        """
        if not instance.publishes_kv_events or not isinstance(engine, PublishesKvEvents):
            return None
        subject = kv_events_subject(instance.namespace)
        publisher = KvEventPublisher(self.instance_id, partial(plane.try_publish, subject))
        stack.callback(publisher.close)
        engine.start_kv_events(publisher.on_events)
        return publisher

    async def _drain(self, started: StartedWorker) -> None:
        self._health.phase = "draining"
        RECORDER.record_process(RecordedEvent.DRAINING)
        # The worker deregisters first, so that frontends send no more requests.
        await started.deregister()
        await started.drain()
        self._health.phase = "stopped"

    def _sleep(self) -> str:
        """Begin to fall asleep. Return why the worker can't fall asleep; "" if it has begun."""
        if self._started_worker is None:
            return self._not_started()
        return self._started_worker.sleep()

    def _wake(self) -> str:
        """Begin to wake up. Return why the worker can't wake up; "" if it has begun."""
        if self._started_worker is None:
            return self._not_started()
        return self._started_worker.wake()

    def _not_started(self) -> str:
        return f"the worker is {self._health.phase}; retry later"
