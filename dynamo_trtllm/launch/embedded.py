"""Serve a model with prefill and decode workers and a frontend in this process, on a thread.

All is in one process, because notebooks and tests need a deployment that starts in a second, needs
no servers, and can't outlive its program. The deployment has a thread of its own, because the
program may block, or run an event loop of its own, while requests are served.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self

import uvloop

from dynamo_trtllm.config.config_base import INPROC, MEMORY
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.planner.process import PlannerProcess
from dynamo_trtllm.protocol.errors import ConfigError, Draining, EngineNotReady, install_hint
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.sanitize import shown
from dynamo_trtllm.support.standard_streams import open_standard_streams
from dynamo_trtllm.worker.worker import Worker

# A worker of these engines takes the memory of all GPUs that the process sees.
_ONE_PER_PROCESS: Final = ("trtllm", "vllm")
_MAX_WORKERS: Final = 64


def serve(
    model: str | os.PathLike[str],
    *,
    engine: str = "torch",
    prefill: int = 1,
    decode: int = 1,
    aggregated: int = 0,
    elastic: int = 0,
    planner: bool = True,
    worker_settings: Mapping[str, Any] | None = None,
    frontend_settings: Mapping[str, Any] | None = None,
) -> EmbeddedDeployment:
    """Serve a model in this process, for notebooks and tests.

    No etcd, NATS or network is needed. This also works where an event loop runs, as in a notebook.

        with serve("tiny-gpt-oss") as deployment:
            print(deployment.url, deployment.model)

    Args:
        model: bundled model, or folder.
        engine: engine of all workers. The mock engine generates random tokens.
        prefill: number of prefill workers.
        decode: number of decode workers.
        aggregated: number of workers that do both phases. With `prefill=0` and `decode=0`, these
            are the only workers.
        elastic: number of workers whose shares of prefill and decode work can change.
        planner: whether a planner sets these shares. It needs `slo_ttft_ms` and `slo_itl_ms` in
            `frontend_settings`, with `router_mode="slo"`. Without these limits, no planner runs.
        worker_settings: more fields of `WorkerConfig`, for every worker.
        frontend_settings: more fields of `FrontendConfig`. By default, the frontend accepts
            connections from this machine, on a free port.

    Returns:
        The deployment, which starts with its block or `start()`.

    Raises:
        ConfigError: a setting is wrong, or the torch engine is not installed.
    """
    counts = {
        Role.PREFILL: prefill,
        Role.DECODE: decode,
        Role.AGGREGATED: aggregated,
        Role.ELASTIC: elastic,
    }
    open_standard_streams()
    _check_counts(counts, engine)
    _check_model(model)
    _check_engine(engine)
    cluster = _own_cluster()
    common = {"model_path": os.fspath(model), "engine": engine, **cluster}
    configs = _worker_configs(counts, common, worker_settings)
    frontend_config = _frontend_config(cluster, frontend_settings)
    planner_process: PlannerProcess | None = None
    if planner and elastic > 0:
        planner_process = _planner(frontend_config, cluster)
    workers = [Worker(config) for config in configs]
    frontend = Frontend(frontend_config)
    return EmbeddedDeployment(workers, frontend, configs[0].model_name, planner=planner_process)


def _worker_configs(
    counts: Mapping[Role, int], common: Mapping[str, Any], more: Mapping[str, Any] | None
) -> list[WorkerConfig]:
    """Return the settings of each worker. Raise ConfigError if one is wrong."""
    _check_settings("worker_settings", more, [*common, "disaggregation_mode"])
    settings = {**common, **(more or {})}
    return [
        WorkerConfig(disaggregation_mode=role, **settings)
        for role, count in counts.items()
        for _ in range(count)
    ]


def _frontend_config(cluster: Mapping[str, str], more: Mapping[str, Any] | None) -> FrontendConfig:
    """Return the settings of the frontend. Raise ConfigError if one is wrong."""
    _check_settings("frontend_settings", more, cluster)
    # This address is the default: the program may set another one in `more`.
    settings: dict[str, Any] = {"http_host": "127.0.0.1", "http_port": 0, **cluster}
    return FrontendConfig(**(settings | dict(more or {})))


def _planner(frontend: FrontendConfig, cluster: Mapping[str, Any]) -> PlannerProcess | None:
    """Return a planner with the limits of the frontend; None: the frontend has no limits."""
    if frontend.slo_ttft_ms is None or frontend.slo_itl_ms is None:
        return None
    config = PlannerConfig(
        slo_ttft_ms=frontend.slo_ttft_ms, slo_itl_ms=frontend.slo_itl_ms, **cluster
    )
    return PlannerProcess(config)


def _check_engine(engine: str) -> None:
    """Raise ConfigError if the engine is not installed."""
    if engine == "torch" and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"serve() runs the torch engine, but torch is not installed; {install_hint('torch')},"
            ' or pass engine="mock", which generates random tokens',
            field="engine",
        )


def _check_model(model: object) -> None:
    """Raise ConfigError unless the model is a name or a path."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model is {shown(model)}; pass the name of a bundled model, or a folder", field="model"
        )


def _check_counts(counts: Mapping[Role, int], engine: str) -> None:
    """Raise ConfigError if these workers can't serve together in one process."""
    names = {Role.AGGREGATED: "aggregated"}
    for role, count in counts.items():
        if not isinstance(count, int) or not 0 <= count <= _MAX_WORKERS:
            name = names.get(role, role.value)
            raise ConfigError(
                f"{name}={shown(count)} workers are not possible; pass 0 to {_MAX_WORKERS}",
                field=name,
            )
    has_prefill = counts[Role.PREFILL] > 0
    has_decode = counts[Role.DECODE] > 0
    # An elastic worker is a partner for workers of either role.
    can_pair = (has_prefill and has_decode) or counts[Role.ELASTIC] > 0
    needs_pair = has_prefill or has_decode or counts[Role.AGGREGATED] == 0
    if needs_pair and not can_pair:
        raise ConfigError(
            f"prefill={counts[Role.PREFILL]} and decode={counts[Role.DECODE]} serve no request"
            " together; pass at least one of each, or aggregated=1 or elastic=2 without them",
            field="prefill",
        )
    if engine in _ONE_PER_PROCESS and sum(counts.values()) > 1:
        raise ConfigError(
            f"{sum(counts.values())} workers with engine={engine!r} can't share the GPUs of one"
            f" process; run `dynamo-trtllm serve MODEL --engine {engine}`, which starts processes,"
            " or pass prefill=0, decode=0, aggregated=1",
            field="engine",
        )


def _own_cluster() -> dict[str, str]:
    """Return the settings of a cluster that no other deployment of this process uses."""
    name = f"serve-{secrets.token_hex(8)}"
    return {"nats_server": INPROC + name, "etcd_endpoints": MEMORY + name, "namespace": name}


def _check_settings(argument: str, settings: object, names: Iterable[str]) -> None:
    """Raise ConfigError unless settings are a mapping by name, without these names.

    Args:
        argument: the argument of `serve`, for the error.
        settings: the value of this argument.
        names: the names of the settings that `serve` sets itself.
    """
    if settings is None:
        return
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise ConfigError(
            f"{argument} is {shown(settings)}; pass a mapping of names of settings to values",
            field=argument,
        )
    for name in names:
        if name in settings:
            raise ConfigError(f"serve() sets {name} itself; remove it from {argument}", field=name)


class EmbeddedDeployment:
    """Workers and a frontend of this process, which `serve` has created.

    Its block begins when requests are accepted. The end of the block stops everything after the
    running requests. An error in the block, or a Ctrl-C, stops everything at once. If a worker
    fails while the block runs, the end of the block raises the error of the worker.

    `start()` and `stop()` do the same where a block does not fit, as between cells of a notebook.
    A deployment that was not stopped ends with its program.

    Attributes:
        model: name that clients send as `model`.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        frontend: Frontend,
        model: str,
        *,
        planner: PlannerProcess | None = None,
    ) -> None:
        """Create the deployment, which does nothing yet. Call `serve` instead.

        Args:
            workers: its workers.
            frontend: its frontend.
            model: the name that clients send as `model`.
            planner: sets the shares of its elastic workers. None: the shares do not change.
        """
        self.model = model
        self._planner = planner
        self._workers = workers
        self._frontend = frontend
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._stopping = asyncio.Event()
        self._has_begun = threading.Event()  # `_loop` and `_task` are set, or the thread has ended
        self._started: Future[None] = Future()
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """The URL of the frontend. The API is below `{url}/v1`.

        Raises:
            EngineNotReady: the deployment has not started, or its start failed.
        """
        if not self._started.done():
            raise EngineNotReady("this deployment has not started; use `with`, or call start()")
        if self._started.exception() is not None:
            raise EngineNotReady(
                "the start of this deployment failed; call serve() again for another one"
            )
        return self._frontend.url

    def start(self) -> Self:
        """Start, and return when requests are accepted. Call it once.

        Raises:
            ConfigError: a setting is invalid.
            DynamoError: an engine failed.
            RuntimeError: `start` was called before.
        """
        if self._thread is not None:
            raise RuntimeError("a deployment starts once; call serve() again for another one")
        self._thread = threading.Thread(target=self._run_thread, name="serve", daemon=True)
        self._thread.start()
        atexit.register(self._cancel)
        try:
            self._started.result()
        except BaseException:
            # A KeyboardInterrupt ends the wait, too. Then the caller gets no deployment to stop.
            self._cancel()
            raise
        return self

    def stop(self) -> None:
        """Stop after the running requests, and return when all has ended. Idempotent.

        Raises:
            DynamoError: a worker or the frontend has failed since the start.
        """
        if self._thread is None:
            return
        self._call_soon(self._stopping.set)
        try:
            self._thread.join()
        finally:
            # After a KeyboardInterrupt, requests still run: they are cancelled.
            self._cancel()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
            return
        self._cancel()
        if isinstance(error, Exception) and self._failure is not None:
            raise self._failure  # the cause of the block's error

    def _cancel(self) -> None:
        """End everything at once, and wait until it has ended. Idempotent."""
        assert self._thread is not None
        self._has_begun.wait()
        if self._task is not None:
            self._call_soon(self._task.cancel)
        self._thread.join()
        atexit.unregister(self._cancel)

    def _call_soon(self, action: Callable[[], object]) -> None:
        """Run an action on the event loop, unless the loop has ended."""
        self._has_begun.wait()
        if self._loop is not None:
            # RuntimeError: the event loop is closed, so everything has ended.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(action)

    def _run_thread(self) -> None:
        try:
            uvloop.run(self._run())
        except asyncio.CancelledError:  # `_cancel` was called
            if not self._started.done():
                self._started.set_exception(Draining("the deployment was stopped; create another"))
        except BaseException as exc:  # noqa: BLE001 - `start` or `stop` raises it
            if self._started.done():
                self._failure = exc
            else:
                self._started.set_exception(exc)
        finally:
            self._has_begun.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._has_begun.set()
        async with AsyncExitStack() as stack:
            for worker in self._workers:
                await stack.enter_async_context(worker)
            # The block begins when the frontend has found the workers and accepts requests.
            await stack.enter_async_context(self._frontend)
            if self._planner is not None:
                await stack.enter_async_context(self._planner)
            self._started.set_result(None)
            await self._stopping.wait()
