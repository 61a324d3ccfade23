"""Define what an engine may do besides the five methods of `Engine`.

An engine says what it can do by its base classes, and a worker asks with `isinstance`. Python can't
create an engine whose class lacks a method of one of its base classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from dynamo_trtllm.engines.engine_interface import Finding
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.kv_events import OnKvEvents
from dynamo_trtllm.protocol.messages import Instance, ReleaseOutcome

MAX_STEPS = 512  # measured steps that wait for the worker


class TransfersKv(ABC):
    """An engine that accepts prefill and decode calls. Prefill and decode workers need it.

    A prefill call ends with KV transfer parameters, for which the engine holds KV until it is
    released or expires.
    """

    @abstractmethod
    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """Free the KV blocks of a transfer. Unknown and released transfers are ignored."""

    @abstractmethod
    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer is neither released nor expired."""

    @property
    def elastic_obstacle(self) -> str:
        """Why the engine can't run prefill, decode and aggregated calls at the same time, as text
        that names the argument; "" if it can.
        """
        return ""


class GuardsKvTransfers(ABC):
    """An engine that checks the addresses from which it fetches KV, and the workers that fetch KV
    from it.

    The worker of any other engine still checks the signature of the KV transfer parameters of each
    call.
    """

    @abstractmethod
    def use_transfer_guard(self, guard: TransferGuard) -> None:
        """Use `guard` from now on, for each connection of a KV transfer.

        A decode engine awaits `guard.check_address` before it connects, and may present
        `guard.reader_proof`, which the prefill engine checks with `guard.is_reader_proof`. A
        worker calls this method once, before `start`. The worker itself checks the signatures of
        KV transfer parameters, before it calls `generate`.
        """


class ChecksHealth(ABC):
    """An engine that can fail while no request runs."""

    @abstractmethod
    async def check(self) -> None:
        """Raise EngineFailed if the engine can no longer serve requests.

        A worker calls this method every second.
        """


class ReportsProgress(ABC):
    """An engine whose start takes long."""

    @abstractmethod
    def progress(self) -> str:
        """Describe the current step of `start` in a few words; "" when it does not run.

        Thread-safe.
        """


class RunsPreflight(ABC):
    """An engine that checks its arguments before it loads."""

    @abstractmethod
    def preflight(self, peers: Sequence[Instance]) -> Sequence[Finding]:
        """Return the problems of the arguments. A worker calls it once, before `start`.

        Args:
            peers: live instances of the same model in the other role.
        """


class MeasuresSteps(ABC):
    """An engine that measures its steps, from which routing by cost predicts waiting times."""

    @property
    @abstractmethod
    def steps(self) -> deque[StepSample]:
        """The newest measured steps, at most 512, the oldest first.

        The worker is the only reader of the steps, and removes the steps that it has read.
        """


class PublishesKvEvents(ABC):
    """An engine with a prefix cache that reports its changes. `--publish-kv-events` needs it."""

    @abstractmethod
    def start_kv_events(self, on_events: OnKvEvents) -> None:
        """Call `on_events` on the event loop when KV blocks were stored in the prefix cache or
        removed, until `aclose`.

        A worker with `--publish-kv-events` calls it once, after `start`. The prefix cache is empty
        then, but for blocks of the warm-up.
        """


class Sleeps(ABC):
    """An engine that can release its GPU memory. `POST /sleep` needs it."""

    @property
    @abstractmethod
    def sleep_obstacle(self) -> str:
        """Why the engine can't release its GPU memory while no request runs, as text; "" if it
        can.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Release GPU memory. Raises EngineFailed.

        The worker calls this method while no request runs, and sends no request before `wake`.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Restore what `sleep` released. Raises EngineFailed."""


CAPABILITIES: tuple[type, ...] = (
    TransfersKv,
    GuardsKvTransfers,
    ChecksHealth,
    ReportsProgress,
    RunsPreflight,
    MeasuresSteps,
    PublishesKvEvents,
    Sleeps,
)
