"""The faults by name.

Each is applied to a deployment under load and ends after the outage of its context.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dynamo_trtllm.cluster.request_plane.frames import Frame

from . import attackers, elastic, query_of_death
from .context import FaultContext
from .deployment import FRONTEND, WORKERS, Options
from .network import MessageDropper, is_first, is_last

_REPLACED_S = 60.0
_FLAP_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `apply` starts it and ends it."""

    name: str
    description: str
    apply: Callable[[FaultContext], Awaitable[None]]
    victims: tuple[str, ...] = ()  # workers that may end; no other worker may
    kills_frontend: bool = False
    spares_requests: bool = False  # no request may fail before its first token
    migrates: bool = False  # if no stream was continued on another worker, the fault had no effect
    is_launcher: bool = False  # only leftovers are checked
    engine: Literal["torch"] | None = None  # needs this engine; None: any
    has_network: bool = False  # acts on the network between frontend and workers
    is_elastic: bool = False  # needs elastic workers
    # how long requests wait for a role without workers; None: as configured
    hold_s: float | None = None
    # stall timeout of the other side; if set, answers outlast the fault
    watch_s: Callable[[Options], float] | None = None


async def _signal(name: str, number: signal.Signals, context: FaultContext) -> None:
    """Signal a process and wait until the launcher has replaced it."""
    context.deployment.send(name, number)
    await asyncio.sleep(context.outage_s)
    await asyncio.to_thread(context.deployment.wait_ready, _REPLACED_S)


async def _freeze(name: str, context: FaultContext) -> None:
    context.deployment.send(name, signal.SIGSTOP)
    try:
        await asyncio.sleep(context.outage_s)
    finally:
        context.deployment.resume_all()


async def _end_server(
    kind: str, number: signal.Signals, loses_data: bool, context: FaultContext
) -> None:
    server = context.deployment.servers[kind]
    server.send(number)
    if loses_data:
        server.lose_data()
    await asyncio.sleep(context.outage_s)
    server.start()


async def _freeze_server(kind: str, context: FaultContext) -> None:
    server = context.deployment.servers[kind]
    server.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(context.outage_s)
    finally:
        server.send(signal.SIGCONT)


async def _roll(context: FaultContext) -> None:
    """Send SIGTERM to each worker, after the previous worker was replaced."""
    deployment = context.deployment
    for name in WORKERS:
        before = deployment.instance(name)
        deployment.send(name, signal.SIGTERM)
        async with asyncio.timeout(_REPLACED_S):
            # The state of another process has no event to wait for.
            while deployment.instance(name) in (None, before):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.to_thread(deployment.wait_ready, _REPLACED_S)


async def _launcher(number: signal.Signals, context: FaultContext) -> None:
    deployment = context.deployment
    deployment.note_processes()
    deployment.send("launcher", number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(context.outage_s)
        deployment.send("launcher", signal.SIGKILL)
    await asyncio.to_thread(deployment.wait_launcher, _REPLACED_S)


async def _lose(wanted: Callable[[Frame], bool], context: FaultContext) -> None:
    """Drop every third message with a wanted frame, and at least one."""
    dropper = MessageDropper(wanted, nth=3)
    context.network.change(dropper)
    try:
        until_s = time.monotonic() + context.outage_s
        while time.monotonic() < until_s or not dropper.count:  # noqa: ASYNC110  # counted in another thread
            await asyncio.sleep(0.01)
    finally:
        context.network.change(None)


async def _repeat(context: FaultContext) -> None:
    context.network.change(lambda body: 2)
    try:
        await asyncio.sleep(context.outage_s)
    finally:
        context.network.change(None)


async def _flap(context: FaultContext) -> None:
    await context.network.cut_route(_FLAP_S)
    await asyncio.sleep(context.outage_s)


def _network_faults() -> list[Fault]:
    def fault(
        name: str, description: str, apply: Callable[[FaultContext], Awaitable[None]]
    ) -> Fault:
        return Fault(name=name, description=description, apply=apply, has_network=True)

    return [
        fault(
            "lost-first",
            "first frames of streams are lost on their way to the frontend",
            partial(_lose, is_first),
        ),
        fault(
            "lost-last",
            "last frames of streams are lost on their way to the frontend",
            partial(_lose, is_last),
        ),
        fault("repeated-message", "all messages from and to the frontend arrive twice", _repeat),
        fault("route-flap", "the route between two NATS servers breaks for 0.2 s", _flap),
    ]


def _worker_faults(role: str) -> list[Fault]:
    name = f"{role}-1"
    fault = partial(Fault, spares_requests=True, victims=(name,))
    return [
        fault(
            name=f"kill-{role}",
            description=f"kill -9 of a {role} worker",
            apply=partial(_signal, name, signal.SIGKILL),
            migrates=role == "decode",
        ),
        fault(
            name=f"freeze-{role}",
            description=f"SIGSTOP of a {role} worker, then SIGCONT",
            apply=partial(_freeze, name),
            victims=(),
        ),
        fault(
            name=f"term-{role}",
            description=f"SIGTERM of a {role} worker",
            apply=partial(_signal, name, signal.SIGTERM),
        ),
    ]


def _server_faults(kind: str, *, spares_requests: bool) -> list[Fault]:
    def fault(
        name: str, description: str, apply: Callable[[FaultContext], Awaitable[None]]
    ) -> Fault:
        return Fault(
            name=f"{name}-{kind}",
            description=description,
            apply=apply,
            spares_requests=spares_requests,
        )

    end = partial(_end_server, kind)
    return [
        fault("kill", f"kill -9 of {kind}, then a restart", partial(end, signal.SIGKILL, False)),
        fault("freeze", f"SIGSTOP of {kind}, then SIGCONT", partial(_freeze_server, kind)),
        fault("restart", f"SIGTERM of {kind}, then a restart", partial(end, signal.SIGTERM, False)),
        fault(
            "empty",
            f"kill -9 of {kind}, then a restart without its data",
            partial(end, signal.SIGKILL, True),
        ),
    ]


def _frontend_faults() -> list[Fault]:
    return [
        Fault(
            name="kill-frontend",
            description="kill -9 of the frontend",
            apply=partial(_signal, FRONTEND, signal.SIGKILL),
            kills_frontend=True,
        ),
        Fault(
            name="freeze-frontend",
            description="SIGSTOP of the frontend, then SIGCONT",
            apply=partial(_freeze, FRONTEND),
        ),
        Fault(
            name="freeze-frontend-long",
            description=(
                "SIGSTOP of the frontend for longer than its workers' stall timeout, during long"
                " answers"
            ),
            apply=partial(_freeze, FRONTEND),
            watch_s=lambda options: options.worker_stall_timeout_s,
        ),
        Fault(
            name="term-frontend",
            description="SIGTERM of the frontend",
            apply=partial(_signal, FRONTEND, signal.SIGTERM),
            kills_frontend=True,
        ),
    ]


def _launcher_faults() -> list[Fault]:
    signals = {
        "kill": (signal.SIGKILL, "kill -9"),
        "freeze": (signal.SIGSTOP, "SIGSTOP, then kill -9,"),
        "term": (signal.SIGTERM, "SIGTERM"),
    }
    return [
        Fault(
            name=f"{word}-launcher",
            description=(
                f"{description} of the launcher; checks only for processes and files that remain"
            ),
            apply=partial(_launcher, number),
            kills_frontend=True,
            is_launcher=True,
        )
        for word, (number, description) in signals.items()
    ]


def _client_attacks() -> list[Fault]:
    spared = partial(Fault, spares_requests=True)
    return [
        Fault(
            name="slow-consumer",
            description="clients that stop reading for a while",
            apply=attackers.slow_consumers,
        ),
        Fault(
            name="full-kv",
            description="long requests for more KV blocks than the workers have, then disconnects",
            apply=attackers.full_kv,
        ),
        spared(
            name="big-body",
            description="clients that send large bodies which are slow to parse",
            apply=attackers.big_bodies,
        ),
        spared(
            name="slow-words",
            description="clients that send tools with words of 16,000 letters",
            apply=attackers.slow_words,
        ),
        spared(
            name="memory-bound",
            description="80 bodies of 8 MiB at once for a frontend that may allocate 576 MiB",
            apply=attackers.memory_bound,
        ),
    ]


def _worker_attacks() -> list[Fault]:
    spared = partial(Fault, spares_requests=True)
    return [
        Fault(
            name="dead-transfer",
            description="a prefill worker whose KV never arrives",
            apply=attackers.dead_transfer,
        ),
        Fault(
            name="corrupt-kv",
            description="a prefill worker whose KV has flipped bits",
            apply=attackers.corrupt_kv,
        ),
        spared(
            name="failed-read",
            description=(
                "a prefill worker whose KV can't be read: a closed port, or a withdrawn offer"
            ),
            apply=attackers.failed_read,
        ),
        Fault(
            name="garbage",
            description="random bytes and invalid frames on all subjects",
            apply=attackers.garbage,
        ),
        spared(
            name="version-skew",
            description="a worker with the next wire version and one with a much later version",
            apply=attackers.version_skew,
        ),
        spared(
            name="bad-record",
            description="invalid records in etcd, some with the id of a live worker",
            apply=attackers.bad_record,
        ),
        Fault(
            name="late-transfer",
            description="a prefill worker whose clock is an hour behind",
            apply=attackers.expired_params,
        ),
    ]


def _connection_attacks() -> list[Fault]:
    fault = partial(Fault, spares_requests=True)
    return [
        fault(
            name="file-descriptors",
            description=(
                "idle connections to the health and KV ports of prefill-1, which may open few files"
            ),
            apply=partial(attackers.file_descriptors, "prefill-1"),
        ),
        fault(
            name="idle-connections",
            description="idle connections of one client to the frontend, which may open few files",
            apply=partial(attackers.file_descriptors, FRONTEND),
        ),
    ]


def _elastic_faults() -> list[Fault]:
    fault = partial(Fault, is_elastic=True, spares_requests=True)
    return [
        fault(
            name="kill-planner",
            description="kill -9 of the planner that leads, with elastic workers: shares stay",
            apply=elastic.kill_planner,
        ),
        fault(
            name="change-roles",
            description=(
                "shares of elastic workers with 12 KV blocks that change four times a second"
            ),
            apply=elastic.change_roles,
        ),
    ]


FAULTS = {
    fault.name: fault
    for fault in (
        *_worker_faults("prefill"),
        *_worker_faults("decode"),
        *_frontend_faults(),
        *_server_faults("etcd", spares_requests=True),
        *_server_faults("nats", spares_requests=False),
        Fault(
            name="freeze-worker-long",
            description=(
                "SIGSTOP of decode-1 for longer than the frontend's stall timeout, during long"
                " answers"
            ),
            apply=partial(_freeze, "decode-1"),
            spares_requests=True,
            migrates=True,
            watch_s=lambda options: options.stall_timeout_s,
        ),
        *_client_attacks(),
        *_worker_attacks(),
        *_connection_attacks(),
        Fault(
            name="rolling",
            description="SIGTERM of each worker, one after the other",
            apply=_roll,
            spares_requests=True,
            victims=WORKERS,
        ),
        Fault(
            name="non-finite-kv",
            description="a prefill worker whose KV has a NaN (torch engine)",
            apply=attackers.non_finite_kv,
            engine="torch",
            spares_requests=True,
        ),
        Fault(
            name="query-of-death",
            description=(
                "requests that end their workers: segmentation fault, abort, out of memory, exit,"
                " engine"
            ),
            apply=partial(query_of_death.apply, query_of_death.CASES),
            victims=WORKERS,
            spares_requests=True,
            hold_s=query_of_death.RESTARTED_S,  # both workers of a role end
        ),
        Fault(
            name="late-query-of-death",
            description="requests that end their workers after 20 tokens, and in their last step",
            apply=partial(query_of_death.apply, query_of_death.LATE_CASES),
            victims=WORKERS,
            hold_s=query_of_death.RESTARTED_S,
        ),
        *_elastic_faults(),
        *_network_faults(),  # these and the faults of the launcher need their own deployments
        *_launcher_faults(),
    )
}
