"""Where a fault happens: what those who cause it are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.chaos.deployment import Deployment
from benchmarks.chaos.network import Network
from benchmarks.stream import Record


@dataclass(slots=True, kw_only=True)
class Scene:
    """A deployment under load. Seconds and tokens."""

    deployment: Deployment
    outage_s: float  # how long the fault lasts
    osl: int
    hung_s: float  # longest silence
    records: list[Record] = field(default_factory=list)  # of further requests that are to be judged

    @property
    def network(self) -> Network:
        """Return the deployment's network, for faults with `has_network`."""
        assert self.deployment.network is not None
        return self.deployment.network
