from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from vllm.standin.release import REPORTS_FAILED_READS


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata": ...


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1:
    if REPORTS_FAILED_READS:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any: ...
