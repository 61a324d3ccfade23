"""The faults by name. Each is done to a deployment under load, lasts as long as the scene says, and is mended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.chaos import intruders
from benchmarks.chaos.deployment import FRONTEND, WORKERS, Options
from benchmarks.chaos.network import Losses, is_first, is_last
from benchmarks.chaos.scene import Scene
from dynamo_trtllm.request_plane.frames import Frame

_REPLACED_S = 60.0
_FLAP_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`apply` does it and mends it."""

    name: str
    what: str
    apply: Callable[[Scene], Awaitable[None]]
    victims: tuple[str, ...] = ()  # workers that may end of it; no other one may
    kills_frontend: bool = False
    spares_requests: bool = False  # none may be answered with an error before its first token
    migrates: bool = False  # if no stream was continued on another worker, the fault had no effect
    is_launcher: bool = False  # only what is left afterwards is judged
    engine: Literal["torch"] | None = None  # makes sense with this one only; None: with each
    has_network: bool = False  # acts on the network between frontend and workers
    # stall timeout of the other side; if set, answers outlast the fault
    watch_s: Callable[[Options], float] | None = None


async def _signal(name: str, number: signal.Signals, scene: Scene) -> None:
    """The launcher mends it; what follows is served by its successor too."""
    scene.deployment.send(name, number)
    await asyncio.sleep(scene.outage_s)
    await asyncio.to_thread(scene.deployment.wait_whole, _REPLACED_S)


async def _freeze(name: str, scene: Scene) -> None:
    scene.deployment.send(name, signal.SIGSTOP)
    try:
        await asyncio.sleep(scene.outage_s)
    finally:
        scene.deployment.resume_all()


async def _end_server(kind: str, number: signal.Signals, loses_data: bool, scene: Scene) -> None:
    server = scene.deployment.servers[kind]
    server.send(number)
    if loses_data:
        server.lose_data()
    await asyncio.sleep(scene.outage_s)
    server.start()


async def _freeze_server(kind: str, scene: Scene) -> None:
    server = scene.deployment.servers[kind]
    server.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(scene.outage_s)
    finally:
        server.send(signal.SIGCONT)


async def _roll(scene: Scene) -> None:
    """Each worker leaves with SIGTERM when the one before has its successor."""
    deployment = scene.deployment
    for name in WORKERS:
        before = deployment.instance(name)
        deployment.send(name, signal.SIGTERM)
        async with asyncio.timeout(_REPLACED_S):
            while deployment.instance(name) in (None, before):  # noqa: ASYNC110  # another process, seen in its log
                await asyncio.sleep(0.05)
        await asyncio.to_thread(deployment.wait_whole, _REPLACED_S)


async def _launcher(number: signal.Signals, scene: Scene) -> None:
    deployment = scene.deployment
    deployment.note_processes()
    deployment.send("launcher", number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(scene.outage_s)
        deployment.send("launcher", signal.SIGKILL)
    await asyncio.to_thread(deployment.wait_launcher, _REPLACED_S)


async def _lose(wanted: Callable[[Frame], bool], scene: Scene) -> None:
    """Drop every third message with such a frame, and at least one."""
    losses = Losses(wanted, nth=3)
    scene.network.change(losses)
    try:
        until_s = time.monotonic() + scene.outage_s
        while time.monotonic() < until_s or not losses.count:  # noqa: ASYNC110  # counted in another thread
            await asyncio.sleep(0.01)
    finally:
        scene.network.change(None)


async def _repeat(scene: Scene) -> None:
    scene.network.change(lambda body: 2)
    try:
        await asyncio.sleep(scene.outage_s)
    finally:
        scene.network.change(None)


async def _flap(scene: Scene) -> None:
    await scene.network.cut_route(_FLAP_S)
    await asyncio.sleep(scene.outage_s)


def _of_network() -> list[Fault]:
    def fault(name: str, what: str, apply: Callable[[Scene], Awaitable[None]]) -> Fault:
        return Fault(name=name, what=what, apply=apply, has_network=True)

    return [
        fault("lost-first", "first frames of streams are lost on their way to the frontend", partial(_lose, is_first)),
        fault("lost-last", "last frames of streams are lost on their way to the frontend", partial(_lose, is_last)),
        fault("repeated-message", "all messages from and to the frontend arrive twice", _repeat),
        fault("route-flap", "the route between two NATS servers breaks for 0.2 s", _flap),
    ]


def _of_worker(role: str) -> list[Fault]:
    name = f"{role}-1"
    spared = partial(Fault, spares_requests=True, victims=(name,))
    return [
        spared(
            name=f"kill-{role}",
            what=f"kill -9 of a {role} worker",
            apply=partial(_signal, name, signal.SIGKILL),
            migrates=role == "decode",
        ),
        spared(
            name=f"freeze-{role}",
            what=f"SIGSTOP of a {role} worker, then SIGCONT",
            apply=partial(_freeze, name),
            victims=(),
        ),
        spared(name=f"term-{role}", what=f"SIGTERM of a {role} worker", apply=partial(_signal, name, signal.SIGTERM)),
    ]


def _of_server(kind: str, *, spares: bool) -> list[Fault]:
    def fault(name: str, what: str, apply: Callable[[Scene], Awaitable[None]]) -> Fault:
        return Fault(name=f"{name}-{kind}", what=what, apply=apply, spares_requests=spares)

    end = partial(_end_server, kind)
    return [
        fault("kill", f"kill -9 of {kind}, then its start", partial(end, signal.SIGKILL, False)),
        fault("freeze", f"SIGSTOP of {kind}, then SIGCONT", partial(_freeze_server, kind)),
        fault("restart", f"SIGTERM of {kind}, then its start", partial(end, signal.SIGTERM, False)),
        fault("empty", f"kill -9 of {kind}, then its start with no data", partial(end, signal.SIGKILL, True)),
    ]


def _of_frontend() -> list[Fault]:
    return [
        Fault(
            name="kill-frontend",
            what="kill -9 of the frontend",
            apply=partial(_signal, FRONTEND, signal.SIGKILL),
            kills_frontend=True,
        ),
        Fault(name="freeze-frontend", what="SIGSTOP of the frontend, then SIGCONT", apply=partial(_freeze, FRONTEND)),
        Fault(
            name="freeze-frontend-long",
            what="SIGSTOP of the frontend for longer than its workers' stall timeout, during long answers",
            apply=partial(_freeze, FRONTEND),
            watch_s=lambda options: options.worker_stall_timeout_s,
        ),
        Fault(
            name="term-frontend",
            what="SIGTERM of the frontend",
            apply=partial(_signal, FRONTEND, signal.SIGTERM),
            kills_frontend=True,
        ),
    ]


def _of_launcher() -> list[Fault]:
    numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}
    tells = {"kill": "kill -9", "freeze": "SIGSTOP, then kill -9,", "term": "SIGTERM"}
    return [
        Fault(
            name=f"{word}-launcher",
            what=f"{tells[word]} of the launcher: only what is left is judged",
            apply=partial(_launcher, number),
            kills_frontend=True,
            is_launcher=True,
        )
        for word, number in numbers.items()
    ]


def _of_intruders() -> list[Fault]:
    return [
        Fault(name="slow-consumer", what="clients that stop reading, then read on", apply=intruders.slow_consumers),
        Fault(name="full-kv", what="long requests for more KV than there is, then gone", apply=intruders.full_kv),
        Fault(name="dead-transfer", what="a prefill worker whose KV never arrives", apply=intruders.dead_transfer),
        Fault(
            name="corrupt-kv",
            what="a prefill worker whose KV arrives with flipped bits",
            apply=intruders.corrupt_kv,
        ),
        Fault(
            name="failed-read",
            what="a prefill worker whose KV can't be read: a dead port, or an offer that was withdrawn",
            apply=intruders.failed_read,
            spares_requests=True,
        ),
        Fault(name="garbage", what="random bytes and invalid frames, on all subjects", apply=intruders.garbage),
        Fault(
            name="version-skew",
            what="a worker of the next wire version and one of a version far ahead",
            apply=intruders.version_skew,
            spares_requests=True,
        ),
        Fault(
            name="bad-record",
            what="records in etcd that no worker wrote, some with the id of a live worker",
            apply=intruders.bad_record,
            spares_requests=True,
        ),
        Fault(
            name="file-descriptors",
            what="idle connections fill the health and KV ports of prefill-1, which may open few files",
            apply=intruders.file_descriptors,
            spares_requests=True,
        ),
        Fault(
            name="big-body",
            what="clients that send large bodies which are expensive to parse or to tokenize",
            apply=intruders.big_bodies,
            spares_requests=True,
        ),
        Fault(
            name="slow-words",
            what="clients that send tools whose descriptions are words of 16,000 letters",
            apply=intruders.slow_words,
            spares_requests=True,
        ),
        Fault(
            name="memory-bound",
            what="a frontend that may take 576 MiB more memory gets 80 bodies of 8 MiB at once",
            apply=intruders.memory_bound,
            spares_requests=True,
        ),
        Fault(name="late-ticket", what="a prefill worker whose clock is an hour behind", apply=intruders.late_ticket),
    ]


FAULTS = {
    fault.name: fault
    for fault in (
        *_of_worker("prefill"),
        *_of_worker("decode"),
        *_of_frontend(),
        *_of_server("etcd", spares=True),
        *_of_server("nats", spares=False),
        Fault(
            name="freeze-worker-long",
            what="SIGSTOP of decode-1 for longer than the frontend's stall timeout, during long answers",
            apply=partial(_freeze, "decode-1"),
            spares_requests=True,
            migrates=True,
            watch_s=lambda options: options.stall_timeout_s,
        ),
        *_of_intruders(),
        Fault(
            name="rolling",
            what="SIGTERM of each worker, one by one",
            apply=_roll,
            spares_requests=True,
            victims=WORKERS,
        ),
        Fault(
            name="non-finite-kv",
            what="a prefill worker whose KV has a NaN (torch engine)",
            apply=intruders.non_finite_kv,
            engine="torch",
            spares_requests=True,
        ),
        *_of_network(),  # a deployment of their own; so have those of the launcher
        *_of_launcher(),
    )
}
