"""Share started engines between the tests of a class."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo
from dynamo_trtllm.protocol.messages import GenerateRequest, Role
from dynamo_trtllm.testing.engine_requests import ask, check_nothing_left, prompt_of


class EnginePool:
    """Engines of one class for many tests.

    An engine with default settings is used by another test if it is idle after one.
    """

    def __init__(self, create: Callable[..., Engine], *, leaks: bool = False) -> None:
        """Create an empty pool.

        Args:
            create: called as `create(role, **settings)`, returns an engine that is not started.
            leaks: engines may never free some KV, which they count in `leaked_kv_blocks`.
        """
        self.leaks = leaks
        self._create = create
        self._roles: dict[Engine, Role] = {}  # roles of engines with default settings
        self._infos: dict[Engine, EngineInfo] = {}  # infos of engines that run
        self._free: list[Engine] = []

    def open(self, role: Role = Role.AGGREGATED, **settings: Any) -> Engine:
        """Return an engine for `started`, not always a new one.

        Args:
            role: the role of its worker.
            settings: settings of a new engine. Without them, it may have run in another test.
        """
        if not settings:
            for engine in self._free:
                if self._roles[engine] is role:
                    self._free.remove(engine)
                    return engine
        engine = self._create(role, **settings)
        if not settings:
            self._roles[engine] = role
        return engine

    def engine_class(self) -> type:
        """Return the class of the engines."""
        engine = self.open()
        self._free.append(engine)
        return type(engine)

    @asynccontextmanager
    async def started(self, *engines: Engine) -> AsyncIterator[None]:
        """Start the engines that do not run yet.

        At the end of the context, close those that no other test can use.
        """
        async with AsyncExitStack() as stack:
            for engine in engines:
                stack.push_async_callback(self._put_back, engine)
                if engine not in self._infos:
                    self._infos[engine] = await engine.start()
            yield

    def info(self, engine: Engine) -> EngineInfo:
        """Return the properties that a running engine has returned from `start`."""
        return self._infos[engine]

    def prompt(self, engine: Engine, length: int, seed: int = 1) -> array[int]:
        """Return a prompt in the vocabulary of a running engine.

        It takes at most half of the engine's context.
        """
        info = self.info(engine)
        return prompt_of(min(length, info.context_length // 2), seed, info.vocab_size)

    def ask(self, engine: Engine, length: int, *, seed: int = 1, **fields: Any) -> GenerateRequest:
        """Return a greedy request for exactly 8 tokens, if the engine supports that.

        Args:
            engine: a running engine.
            length: tokens of the prompt.
            seed: chooses the prompt.
            fields: more arguments of `ask`.
        """
        ignores_eos = "ignore_eos" not in self.info(engine).unsupported_features
        return ask(self.prompt(engine, length, seed), **{"ignore_eos": ignores_eos, **fields})

    async def check_nothing_left(self, engine: Engine) -> None:
        """Wait until the engine is idle. Fail after a timeout."""
        await check_nothing_left(engine, leaks=self.leaks)

    async def aclose(self) -> None:
        """Close all engines."""
        for engine in {*self._infos, *self._free}:
            await engine.aclose()

    async def _put_back(self, engine: Engine) -> None:
        """Keep an idle engine with default settings for the next test. Close any other one."""
        stats = engine.stats()
        # Some engines update kv_blocks_used later than leaked_kv_blocks: both must be 0.
        holds_kv = (
            stats.pending_kv_transfers > 0 or stats.kv_blocks_used > 0 or stats.leaked_kv_blocks > 0
        )
        is_idle = stats.running == 0 and stats.waiting == 0 and not holds_kv
        if engine in self._roles and engine in self._infos and is_idle:
            self._free.append(engine)
            return
        self._infos.pop(engine, None)
        await engine.aclose()
