"""Define the interfaces that the HTTP layer needs: the pipeline, the models, and the other processes on the port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from dynamo_trtllm.messages import GenerateRequest, Instance

if TYPE_CHECKING:
    from dynamo_trtllm.frontend.fleet.model_registry import ReadinessReport
    from dynamo_trtllm.frontend.generation.flow_events import RouteTrace
    from dynamo_trtllm.observability.metrics import FrontendMetrics
    from dynamo_trtllm.streams import OnEvent, StreamHandle
    from dynamo_trtllm.tokenization.base import ServedModel


class RequestGenerator(Protocol):
    """A pipeline that runs requests on workers."""

    def generate(self, request: GenerateRequest, trace: RouteTrace, on_event: OnEvent) -> StreamHandle:
        """Start the prefill and the decode call, as `streams.Generator.generate` does. `trace`: filled meanwhile."""
        ...


class ModelCatalog(Protocol):
    """The models that a frontend serves."""

    def get(self, name: str) -> ServedModel:
        """Return a model.

        Raises:
            ModelNotFound: no worker serves it.
            EngineNotReady: this frontend is still loading its files.
        """
        ...

    def names(self) -> list[str]: ...

    def instances(self) -> Sequence[Instance]: ...

    def not_ready_reason(self, name: str) -> str | None:
        """Return why the model cannot be served now, as text for people; None if it can."""
        ...

    def readiness(self) -> ReadinessReport:
        """Return the pairs of all models, the instances that match no other, and the rejected etcd records."""
        ...


class PeerProcesses(Protocol):
    """The other frontend processes on the same port, as seen by one of them."""

    def share(self, metrics: FrontendMetrics) -> None:
        """Include this process's metrics in every scrape, so that each process returns the totals of all."""
        ...

    def announce_ready(self) -> None:
        """Announce that this process accepts requests."""
        ...

    def not_ready_reason(self) -> str | None:
        """Return why not all processes of this frontend are ready, as text for `/ready`; None when they are."""
        ...

    def on_parent_exit(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the parent process has ended."""
        ...


class SingleProcess:
    """The peers of a frontend that runs as a single process: none."""

    def share(self, metrics: FrontendMetrics) -> None:
        """Do nothing: the metrics of the only process are complete."""

    def announce_ready(self) -> None:
        """Do nothing: no other process waits."""

    def not_ready_reason(self) -> str | None:
        """Return None: there is no other process that could be unready."""
        return None

    def on_parent_exit(self, stop: Callable[[], None]) -> None:
        """Do nothing: there is no parent process."""
