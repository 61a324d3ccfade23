"""What workers report to the scheduler."""

from dataclasses import dataclass
from typing import Any


@dataclass
class KVConnectorOutput:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_worker_meta: Any = None
