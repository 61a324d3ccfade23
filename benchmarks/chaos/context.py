"""What a fault gets when it is applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..stream import RequestRecord
from .deployment import Deployment
from .network import Network


@dataclass(slots=True, kw_only=True)
class FaultContext:
    """The deployment under load and the limits of one fault."""

    deployment: Deployment
    outage_s: float  # how long the fault lasts
    osl: int  # tokens per answer
    hung_s: float  # longest silence of a request
    # the fault's own requests, added to the verdict
    records: list[RequestRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what it measured, for the verdict

    @property
    def network(self) -> Network:
        """Return the deployment's network, for faults with `has_network`."""
        assert self.deployment.network is not None
        return self.deployment.network
