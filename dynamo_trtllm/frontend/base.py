"""What the HTTP edge needs of the rest of a frontend, as protocols: a pipeline to run, models to choose from, and the
other processes on the port."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from dynamo_trtllm.messages import Chunk, GenerateRequest, Instance

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.model_registry import ServedModel
    from dynamo_trtllm.frontend.pipeline import RouteTrace
    from dynamo_trtllm.frontend.readiness import ReadinessReport
    from dynamo_trtllm.observability.metrics import FrontendMetrics
    from dynamo_trtllm.request_plane.base import Sink


class Generator(Protocol):
    def generate(
        self, request: GenerateRequest, trace: RouteTrace, sink: Sink | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Run the prefill and the decode call. Consume with `aclosing`; closing it cancels both.

        Fills `trace` as workers answer.
        `sink`: may be given chunks that are not yielded then, as in `Plane.generate`.
        """
        ...


class ModelCatalog(Protocol):
    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound."""
        ...

    def names(self) -> list[str]: ...

    def instances(self) -> Sequence[Instance]: ...

    def not_ready_reason(self, name: str) -> str | None:
        """Why the model can't be served now, for people; None: it can."""
        ...

    def readiness(self) -> ReadinessReport:
        """All pairs of all models, the instances that fit no other, and the records that were rejected."""
        ...


class PeerProcesses(Protocol):
    """The other frontend processes on the port, to the one that is being started."""

    def share(self, metrics: FrontendMetrics) -> None:
        """From now on one scrape, of whichever process, tells of all."""
        ...

    def announce_ready(self) -> None:
        """This process takes requests."""
        ...

    def not_ready_reason(self) -> str | None:
        """Return why not all processes of this frontend are ready, as text for `/ready`; None when they are."""
        ...

    def on_parent_exit(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the parent process has ended."""
        ...


class SingleProcess:
    """The one process of a frontend: there are no others."""

    def share(self, metrics: FrontendMetrics) -> None:
        """Do nothing: its own metrics are complete."""

    def announce_ready(self) -> None:
        """Do nothing: no other process waits for it."""

    def not_ready_reason(self) -> str | None:
        """Returns None: the process that asks takes requests, and there is no other."""
        return None

    def on_parent_exit(self, stop: Callable[[], None]) -> None:
        """Do nothing: there is no parent process."""
