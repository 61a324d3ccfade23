"""Run a planner as a process: observe the workers, and write their shares while it leads."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Final

from dynamo_trtllm.access.access_control import AccessControl
from dynamo_trtllm.cluster.connect import connect_plane, open_discovery
from dynamo_trtllm.cluster.discovery.discovery_interface import (
    Added,
    Discovery,
    Leadership,
    RejectionChanged,
    Removed,
    SharesChanged,
    Synced,
)
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.observability.metrics import PlannerMetrics
from dynamo_trtllm.planner.decide import NO_ELASTIC_WORKERS, Decision
from dynamo_trtllm.planner.decision_log import DecisionLog
from dynamo_trtllm.planner.observe import Observer, PoolKey
from dynamo_trtllm.planner.planner import PLAN_EVERY_S, Planner, changes_of, reason_of
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.errors import BadFrame, DynamoError, Unreachable
from dynamo_trtllm.protocol.frontend_usage import FrontendUsage, frontend_usage_subject
from dynamo_trtllm.protocol.messages import LoadReport, decode
from dynamo_trtllm.support.background import BackgroundTasks, wait_for_first
from dynamo_trtllm.support.lifecycle import Lifecycle
from dynamo_trtllm.support.network.addresses import http_url
from dynamo_trtllm.support.tls import server_certificate
from dynamo_trtllm.worker.health import Health, health_app, health_server

log = logging.getLogger(__name__)

# Longest wait for the answer to a call of etcd. A decision that is not written by then is out of
# date.
_CALL_TIMEOUT_S: Final = 3.0
_MAX_NAMED: Final = 4  # most workers of a pool that a log line names
# If the leading planner does not renew its lease, another planner can lead after this time.
LEASE_S: Final = 5.0


class PlannerProcess(Lifecycle):
    """A planner, with its connections and its system port.

    Args:
        config: the settings of the planner.
    """

    def __init__(self, config: PlannerConfig) -> None:
        super().__init__()
        self._config = config
        self._limits = TimeLimits(config.slo_ttft_ms / 1000, config.slo_itl_ms / 1000)
        self._metrics = PlannerMetrics()
        self._health = Health(is_leader=False)
        self._tasks = BackgroundTasks(self._background_failed)
        self._view = ClusterView()
        self._leadership: Leadership | None = None
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._logs: dict[PoolKey, DecisionLog] = {}
        self._failure_to_change = ""  # why the last change was not made
        # Whether there were elastic workers at the last decisions. True before the first decisions.
        self._had_elastic = True
        self._does_etcd_answer = True  # whether etcd has answered the last call
        self._is_waiting = False  # whether another planner was leading at the last call
        self._system_port: int | None = None

    @property
    def url(self) -> str | None:
        """The URL of health and metrics. None without a system port, or before it listens."""
        if self._system_port is None:
            return None
        config = self._config
        uses_tls = config.tls_files is not None
        return http_url(config.system_host, self._system_port, "", uses_tls=uses_tls)

    @property
    def is_leader(self) -> bool:
        """Return whether this planner sets the shares."""
        return self._leadership is not None

    async def serve_with_signals(self) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or `stop()`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._stop_on_hangup()
        await self.serve()

    def _background_failed(self, reason: str) -> None:
        self._health.failure = reason

    async def _serve(self) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            await self._serve_health(stack)
            plane = await connect_plane(
                config, PlaneLimits(), self._tasks, self._metrics.message_unreadable
            )
            stack.push_async_callback(plane.aclose)
            self._health.why_unreachable = plane.rejection  # called for each request of `/health`
            discovery = open_discovery(config, self._tasks, lease_ttl_s=LEASE_S)
            stack.push_async_callback(discovery.aclose)
            stack.push_async_callback(self._resign)
            observer = Observer(self._view, loop.time())
            await self._follow(discovery, plane, observer, stack)
            self._health.phase = "serving"
            self._note_ready()
            log.info("planning the shares of namespace %s", config.namespace)
            planning = self._tasks.start(self._plan(discovery, observer), "planner")
            stack.push_async_callback(self._tasks.cancel, planning)
            await wait_for_first(self._stop_event.wait(), self._tasks.until_failed())

    async def _serve_health(self, stack: AsyncExitStack) -> None:
        """Serve health and metrics until `stack` is closed."""
        config = self._config
        access = AccessControl(config)
        if config.api_keys_file is not None:
            following = self._tasks.start(access.follow_file(), "api-keys")
            stack.push_async_callback(self._tasks.cancel, following)
        certificate = server_certificate(config.tls_files)
        if certificate is not None:
            following = self._tasks.start(certificate.follow_files(), "tls-certificate")
            stack.push_async_callback(self._tasks.cancel, following)
        app = health_app(self._health, self._metrics.render, None, access.check_status)
        server = health_server(
            config.system_host, config.system_port, app, self._tasks, certificate
        )
        self._system_port = await stack.enter_async_context(server)

    async def _follow(
        self,
        discovery: Discovery,
        plane: RequestPlane,
        observer: Observer,
        stack: AsyncExitStack,
    ) -> None:
        """Follow the workers and their loads until `stack` is closed.

        Return when all workers are known, or when this planner must stop.
        """
        loop = asyncio.get_running_loop()

        def take(report: LoadReport) -> None:
            observer.on_report(report, loop.time())

        def take_usage(data: bytes, _: str) -> None:
            try:
                usage = decode(data, FrontendUsage)
            except BadFrame as exc:
                self._metrics.message_unreadable()
                log.debug("unreadable report of a frontend: %s", exc.message)
                return
            observer.on_usage(usage, loop.time())

        namespace = self._config.namespace
        stack.push_async_callback(await plane.client.watch_loads(namespace, take))
        unsubscribe = await plane.subscribe(frontend_usage_subject(namespace), take_usage)
        stack.push_async_callback(unsubscribe)
        synced = asyncio.Event()
        watching = self._tasks.start(self._watch(discovery, observer, synced), "watch")
        stack.push_async_callback(self._tasks.cancel, watching)
        await wait_for_first(synced.wait(), self._stop_event.wait(), self._tasks.until_failed())

    async def _watch(self, discovery: Discovery, observer: Observer, synced: asyncio.Event) -> None:
        """Follow the workers and their shares. Set `synced` when all are known."""
        async with aclosing(discovery.watch(self._config.namespace)) as events:
            async for event in events:
                match event:
                    case Added(instance):
                        self._view.add(instance)
                    case Removed(instance_id):
                        self._view.remove(instance_id)
                        observer.remove(instance_id)
                    case SharesChanged(table):
                        self._view.set_shares({} if table is None else table.workers)
                    # An event without a reason needs no log line: the record is gone or valid now.
                    case RejectionChanged(key, str(reason)):
                        log.warning("record %s is rejected: %s", key, reason)
                    case Synced():
                        synced.set()

    async def _plan(self, discovery: Discovery, observer: Observer) -> None:
        """Decide once a second while this planner leads, until cancelled."""
        planner = Planner(observer, self._limits)
        while True:
            await asyncio.sleep(PLAN_EVERY_S)
            if not self._config.advise and not await self._leads(discovery):
                # Another planner decides now, so what this planner remembers is out of date. An
                # autoscaler follows the metrics of the planner that leads.
                planner = Planner(observer, self._limits)
                self._metrics.clear_plan()
                continue
            decisions = planner.decisions(asyncio.get_running_loop().time())
            self._report(decisions)
            if self._config.advise or not changes_of(decisions):
                continue
            if not await self._change(discovery, decisions):
                # This planner remembers changes that were not made, so begin with a new one.
                planner = Planner(observer, self._limits)

    async def _leads(self, discovery: Discovery) -> bool:
        """Renew the leadership, or try to get it. Return whether this planner leads."""
        before = self._leadership
        failure = await self._renew_or_take_lead(discovery)
        self._log_etcd(failure)
        self._log_leadership(before, is_waiting=self._leadership is None and not failure)
        leads = self._leadership is not None and not failure
        self._metrics.set_leader(is_leader=leads)
        self._health.is_leader = leads
        return leads

    async def _renew_or_take_lead(self, discovery: Discovery) -> str:
        """Renew the leadership, or try to get it. Return why etcd failed; "" if it did not."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                if self._leadership is not None and not await self._leadership.renew():
                    log.warning("another planner may lead by now: this one waits")
                    await self._resign()
                if self._leadership is None:
                    self._leadership = await discovery.try_to_lead(
                        self._config.namespace, self._name
                    )
        except (Unreachable, TimeoutError) as exc:
            return str(exc) or "no answer"
        return ""

    def _log_leadership(self, before: Leadership | None, *, is_waiting: bool) -> None:
        """Log once that this planner leads now, or that it waits while another one leads.

        Args:
            before: the leadership of this planner before the last call.
            is_waiting: another planner leads.
        """
        namespace = self._config.namespace
        leadership = self._leadership
        if leadership is not None and leadership is not before:
            log.info("this planner leads namespace %s, epoch %d", namespace, leadership.epoch)
        if is_waiting and not self._is_waiting:
            log.info("another planner leads namespace %s, and this one waits", namespace)
        self._is_waiting = is_waiting

    def _log_etcd(self, failure: str) -> None:
        """Log once that etcd has stopped answering, and once that it answers again."""
        did_answer = self._does_etcd_answer
        self._does_etcd_answer = not failure
        if failure and did_answer:
            log.warning("etcd does not answer, and the shares stay until it does: %s", failure)
        elif not failure and not did_answer:
            log.info("etcd answers again")

    async def _resign(self) -> None:
        """Let another planner lead."""
        leadership = self._leadership
        self._leadership = None
        if leadership is not None:
            await leadership.aclose()

    async def _change(self, discovery: Discovery, decisions: Mapping[PoolKey, Decision]) -> bool:
        """Write the changed shares. Return False if that was not possible."""
        leadership = self._leadership
        assert leadership is not None
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                table = await change_shares(
                    discovery,
                    self._config.namespace,
                    changes_of(decisions),
                    registered={
                        instance.id: instance.shares for instance in self._view.instances()
                    },
                    epoch=leadership.epoch,
                    reason=reason_of(decisions),
                    writer=f"planner {self._name}",
                )
        except (DynamoError, TimeoutError) as exc:
            reason = str(exc) or "etcd does not answer"
            # The planner tries again after seconds. Only a new reason is logged as a warning.
            level = logging.DEBUG if reason == self._failure_to_change else logging.WARNING
            log.log(level, "the shares could not be changed: %s", reason)
            self._failure_to_change = reason
            return False
        self._failure_to_change = ""
        if table is None:
            log.warning("a planner of a higher epoch has changed the shares: this one waits")
            await self._resign()
            return False
        return True

    def _report(self, decisions: Mapping[PoolKey, Decision]) -> None:
        """Log decisions that differ from the last ones, and set the metrics."""
        self._metrics.clear_plan()
        if self._had_elastic is not bool(decisions):
            self._had_elastic = bool(decisions)
            if not decisions:
                # Not a warning: workers may still be loading.
                log.info("namespace %s: %s", self._config.namespace, NO_ELASTIC_WORKERS)
        logs: dict[PoolKey, DecisionLog] = {}
        for key, decision in decisions.items():
            logs[key] = self._logs.get(key) or DecisionLog(is_advice=self._config.advise)
            logs[key].add(decision, self._name_of_pool(key))
            self._add_metrics(key.model, decision)
        self._logs = logs  # without the logs of pools that are gone

    def _name_of_pool(self, key: PoolKey) -> str:
        """Return the model of a pool, and its workers if the model has several pools."""
        groups = self._view.model(key.model).groups
        group = groups.get(key.pairing_key)
        if group is None or len(groups) == 1:
            return key.model
        ids = sorted({instance.id for instance in (*group.prefill, *group.decode)})
        shown = ", ".join(f"{id_:x}" for id_ in ids[:_MAX_NAMED])
        if len(ids) > _MAX_NAMED:
            shown += f" and {len(ids) - _MAX_NAMED} more"
        return f"{key.model} ({shown})"

    def _add_metrics(self, model: str, decision: Decision) -> None:
        metrics = self._metrics
        metrics.decided(model, decision.outcome)
        wanted = {}
        if decision.wanted is not None:
            wanted = {"prefill": decision.wanted.prefill, "decode": decision.wanted.decode}
        metrics.add_workers(model, decision.present._asdict(), wanted)
        if decision.before is not None:
            metrics.add_predicted(model, decision.before.ttft_s, decision.before.gap_s)
