"""The processes that serve the demo model."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.kit.cluster import Cluster, Process

AGGREGATED = "embedded"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCluster:
    cluster: Cluster
    prefill: Process
    decode: Process
    aggregated: Process
    # by role, once each had served a chat
    resident_bytes: dict[str, int] = field(default_factory=dict)
