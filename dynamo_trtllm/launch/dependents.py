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
    def is_asked(self) -> bool:
        """Whether the launcher has asked it to stop."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def ask(self) -> None:
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
    """Has readers end. `lives`: the last or present life of each process, kept by the supervisor."""

    def __init__(
        self, specs: Sequence[ProcessSpec], lives: Mapping[str, ProcessState], say: Callable[[str], None]
    ) -> None:
        self._specs = specs
        self._lives = lives
        self._say = say
        self._news = asyncio.Event()

    def tell(self) -> None:
        """A process serves, or has ended."""
        self._news.set()
        self._news = asyncio.Event()

    async def wanted_by(self, dead: ProcessSpec) -> None:
        """Return once no process that may keep memory of `dead` is left. The supervisor of each one starts it again.
        A process that is not ready yet can't have read anything, and is left alone."""
        readers = dependents_of(dead, self._specs)
        holding = {name: life for name, life in self._living(readers) if life.is_ready}
        if not holding:
            return
        names = ", ".join(holding)
        self._say(
            f"{names}: to be drained and started again, too: a worker that reads KV over CUDA IPC keeps GPU memory of "
            f"{dead.name} taken until it ends itself (restart.readers_too: false leaves it alone)"
        )
        siblings = replicas_of(dead, self._specs)
        while left := [name for name, life in holding.items() if not life.has_ended]:
            news = self._news  # before the look: what changes after it is not missed
            now = next_to_drain(left, is_work_done=self._serves(siblings, any), are_all_back=self._serves(readers, all))
            for name in now:
                holding[name].ask()  # at once: no other caller may count it as ready
            if now:
                await asyncio.gather(*(holding[name].stop() for name in now))
            else:
                await news.wait()
        self._say(f"{names} ended: GPU memory of {dead.name} is free")

    def _living(self, names: Sequence[str]) -> Iterator[tuple[str, ProcessState]]:
        for name in names:
            life = self._lives.get(name)
            if life is not None and not life.has_ended:
                yield name, life

    def _serves(self, names: Sequence[str], of_them: Callable[[Iterator[bool]], bool]) -> bool:
        serving = {name for name, life in self._living(names) if life.is_ready and not life.is_asked}
        return of_them(name in serving for name in names)
