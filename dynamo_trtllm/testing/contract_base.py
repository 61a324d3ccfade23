"""Define what the tests of the contract of engines share: how they get engines, and when they skip.

All waits have limits, so an engine that hangs fails a test.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.testing.engine_pool import EnginePool

# All names that `ContractBase.settings` may have.
_SETTINGS = frozenset(
    {
        "enable_prefix_caching",
        "kv_block_size",
        "kv_cache_blocks",
        "max_batch_size",
        "max_seq_len",
        "ttl_s",
    }
)


class ContractBase:
    """Base of the tests of the contract."""

    # The settings of the tests that `create_engine` accepts, see docs/own-engine.md.
    settings: ClassVar[frozenset[str]] = frozenset()

    pytestmark = pytest.mark.asyncio(loop_scope="class")

    def __init_subclass__(cls) -> None:
        """Check the settings of a test class.

        Raises:
            TypeError: no test uses a setting. Without this, a misspelled one would skip tests.
        """
        super().__init_subclass__()
        unknown = sorted(cls.settings - _SETTINGS)
        if unknown:
            raise TypeError(
                f"{cls.__name__}.settings has {', '.join(unknown)}, which no test uses; use some of"
                f" {', '.join(sorted(_SETTINGS))}"
            )

    @classmethod
    def leaks_unfetched_kv(cls) -> bool:
        """Return whether the engine may never free KV that no decode worker has fetched.

        It counts such KV in `leaked_kv_blocks`.
        """
        return False

    @classmethod
    def detects_released_kv(cls) -> bool:
        """Return whether a decode call fails if the KV of its transfer was released."""
        return True

    @classmethod
    def create_engine(cls, role: Role, **settings: Any) -> Engine:
        """Return a new engine, not started.

        Args:
            role: role of its worker. AGGREGATED, if engines do not inherit from
                `TransfersKv`.
            settings: names are among those of `settings`.
        """
        raise NotImplementedError(f"{cls.__name__} must define create_engine")

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def pool(cls) -> AsyncIterator[EnginePool]:
        """Engines that the tests of this class share."""
        pool = EnginePool(cls.create_engine, leaks=cls.leaks_unfetched_kv())
        yield pool
        await pool.aclose()

    def skip_without_settings(self, *names: str) -> None:
        """Skip the test unless `create_engine` accepts these settings."""
        missing = [name for name in names if name not in self.settings]
        if missing:
            pytest.skip(f"{type(self).__name__}.settings lacks {', '.join(missing)}")

    def accepted(self, **settings: Any) -> dict[str, Any]:
        """Return the settings among these that `create_engine` accepts."""
        return {name: value for name, value in settings.items() if name in self.settings}

    def skip_without_capability(self, pool: EnginePool, capability: type) -> None:
        """Skip the test unless engines inherit from the capability."""
        engine_class = pool.engine_class()
        if not issubclass(engine_class, capability):
            pytest.skip(f"{engine_class.__name__} does not inherit from {capability.__name__}")
