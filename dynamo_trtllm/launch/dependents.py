"""Stop the workers that hold GPU memory of a dead worker, so that its successor can allocate it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.plan import ProcessSpec
from dynamo_trtllm.messages import Role
from dynamo_trtllm.subprocesses import Child

# Engines whose decode workers map a prefill worker's whole KV pool (CUDA IPC) and unmap it only when they exit:
# https://github.com/openucx/ucx/issues/11753. The torch engine maps only a bounded staging region, which leaves enough
# memory for a successor. It is not known whether TensorRT-LLM keeps mappings, so its workers are not restarted.
KEEP_MAPPED: frozenset[str] = frozenset({"vllm"})


def dependents_of(dead: ProcessSpec, specs: Sequence[ProcessSpec]) -> list[str]:
    """Return the names of the processes that may keep GPU memory of `dead` mapped after its exit."""
    if dead.role is not Role.PREFILL or not _may_be_mapped(dead):
        return []
    return [
        spec.name
        for spec in specs
        if spec.role is Role.DECODE and (spec.engine, spec.model) == (dead.engine, dead.model) and _may_be_mapped(spec)
    ]


def _may_be_mapped(spec: ProcessSpec) -> bool:
    return spec.engine in KEEP_MAPPED and bool(spec.env.get(VISIBLE))


def next_to_drain(holding: Sequence[str], *, has_ready_replica: bool, are_dependents_ready: bool) -> Sequence[str]:
    """Return which dependents to drain now.

    If replicas of the dead worker are ready, dependents drain one after the other. Otherwise all drain at once, because
    no new request can run anyway.

    Args:
        holding: Dependents that still hold memory.
        has_ready_replica: A replica of the dead worker is ready.
        are_dependents_ready: All dependents are ready.
    """
    if not has_ready_replica:
        return holding
    return holding[:1] if are_dependents_ready else ()


class DependentRestart:
    """Restarts the dependents of dead workers.

    Args:
        specs: All processes of the deployment.
        processes: Current or last run of each process by name; the supervisor updates it.
        say: Writes a line to the launcher's output.
    """

    def __init__(
        self, specs: Sequence[ProcessSpec], processes: Mapping[str, Child], say: Callable[[str], None]
    ) -> None:
        self._specs = specs
        self._processes = processes
        self._say = say
        self._changed = asyncio.Event()

    def notify_changed(self) -> None:
        """Report that a process has become ready or has exited."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def restart_dependents(self, dead: ProcessSpec) -> None:
        """Stop the processes that may hold memory of `dead`, and return when they have exited.

        Their supervisors start them again. A process that is not ready yet has read no KV and keeps running.
        """
        dependents = dependents_of(dead, self._specs)
        holding = {name: self._processes[name] for name in dependents if name in self._living_and_ready()}
        if not holding:
            return
        names = ", ".join(holding)
        self._say(
            f"draining and restarting {names}, which holds GPU memory of {dead.name} over CUDA IPC "
            "(restart.decode_workers: false disables this)"
        )
        replicas = [
            spec.name
            for spec in self._specs
            if spec.name != dead.name and (spec.role, spec.model) == (dead.role, dead.model)
        ]
        while remaining := [name for name, process in holding.items() if not process.has_ended]:
            changed = self._changed  # taken before the check, so that no later change is missed
            ready = {name for name in self._living_and_ready() if not self._processes[name].is_terminating}
            now = next_to_drain(
                remaining,
                has_ready_replica=not ready.isdisjoint(replicas),
                are_dependents_ready=ready.issuperset(dependents),
            )
            for name in now:
                holding[name].terminate()  # before any await, so that no other caller counts it as ready
            if now:
                await asyncio.gather(*(holding[name].stop() for name in now))
            else:
                await changed.wait()
        self._say(f"{names} stopped; GPU memory of {dead.name} is free")

    def _living_and_ready(self) -> set[str]:
        return {name for name, process in self._processes.items() if process.is_ready and not process.has_ended}
