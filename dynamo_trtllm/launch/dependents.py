"""Which workers keep a dead worker's GPU memory taken, and having them end so that it is free. Starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.plan import ProcessSpec
from dynamo_trtllm.messages import Role

# Engines whose decode workers map a prefill worker's whole KV pool (CUDA IPC) and let go of it only when they end:
# https://github.com/openucx/ucx/issues/11753. The torch engine lends one bounded staging region, which leaves enough
# memory for its successor. Whether TensorRT-LLM keeps mappings is not known, so its workers are left alone.
KEEP_MAPPED: frozenset[str] = frozenset({"vllm"})


class ProcessState(Protocol):
    """One run of one process, as far as it counts here."""

    is_ready: bool  # has answered /ready with 200

    @property
    def is_terminating(self) -> bool:
        """Whether the launcher has asked it to stop."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def terminate(self) -> None:
        """Tells it to stop. Idempotent."""
        ...

    async def stop(self) -> None:
        """Tells it to stop and returns when it is gone. Idempotent."""
        ...


def dependents_of(dead: ProcessSpec, specs: Sequence[ProcessSpec]) -> list[str]:
    """Names of the processes that may keep GPU memory of `dead` mapped after its end."""
    if dead.role is not Role.PREFILL or not _may_be_mapped(dead):
        return []
    return [
        spec.name
        for spec in specs
        if spec.role is Role.DECODE and (spec.engine, spec.model) == (dead.engine, dead.model) and _may_be_mapped(spec)
    ]


def _may_be_mapped(spec: ProcessSpec) -> bool:
    return spec.engine in KEEP_MAPPED and bool(spec.env.get(VISIBLE))


def replicas_of(dead: ProcessSpec, specs: Sequence[ProcessSpec]) -> list[str]:
    """Names of the processes that go on with the work of `dead`."""
    return [
        spec.name
        for spec in specs
        if spec.name != dead.name and (spec.role, spec.model) == (dead.role, dead.model) and spec.role is not None
    ]


def next_to_drain(holding: Sequence[str], *, is_work_done: bool, are_all_back: bool) -> Sequence[str]:
    """Of the readers that hold on: while others do the work of the dead one (`is_work_done`) one after the other, each
    when all before it serve again; else all, for nothing new is served anyway."""
    if not is_work_done:
        return holding
    return holding[:1] if are_all_back else ()


class DependentRestart:
    """Has readers end. `processes`: the last or present life of each process, kept by the supervisor."""

    def __init__(
        self, specs: Sequence[ProcessSpec], processes: Mapping[str, ProcessState], say: Callable[[str], None]
    ) -> None:
        self._specs = specs
        self._processes = processes
        self._say = say
        self._changed = asyncio.Event()

    def notify_changed(self) -> None:
        """A process serves, or has ended."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def restart_dependents(self, dead: ProcessSpec) -> None:
        """Return once no process that may keep memory of `dead` is left. The supervisor of each one starts it again.
        A process that is not ready yet can't have read anything, and is left alone."""
        dependents = dependents_of(dead, self._specs)
        holding = {name: process for name, process in self._living(dependents) if process.is_ready}
        if not holding:
            return
        names = ", ".join(holding)
        self._say(
            f"{names}: to be drained and started again, too: a worker that reads KV over CUDA IPC keeps GPU memory of "
            f"{dead.name} taken until it ends itself (restart.readers_too: false leaves it alone)"
        )
        replicas = replicas_of(dead, self._specs)
        while remaining := [name for name, process in holding.items() if not process.has_ended]:
            changed = self._changed  # before the look: what changes after it is not missed
            now = next_to_drain(
                remaining, is_work_done=self._are_ready(replicas, any), are_all_back=self._are_ready(dependents, all)
            )
            for name in now:
                holding[name].terminate()  # at once: no other caller may count it as ready
            if now:
                await asyncio.gather(*(holding[name].stop() for name in now))
            else:
                await changed.wait()
        self._say(f"{names} ended: GPU memory of {dead.name} is free")

    def _living(self, names: Sequence[str]) -> Iterator[tuple[str, ProcessState]]:
        for name in names:
            process = self._processes.get(name)
            if process is not None and not process.has_ended:
                yield name, process

    def _are_ready(self, names: Sequence[str], of_them: Callable[[Iterator[bool]], bool]) -> bool:
        ready_names = {name for name, process in self._living(names) if process.is_ready and not process.is_terminating}
        return of_them(name in ready_names for name in names)
