"""The scheduler's part in reads of KV: who has received it, and who is ended from outside a
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus


class Scheduler:
    """`free` gives back the blocks of a request."""

    def __init__(self, free: Callable[[Any], None]) -> None:
        self.requests: dict[str, Any] = {}
        self.finished_recving_kv_req_ids: set[str] = set()
        self._free = free

    def schedule(self) -> Any:
        """Is not called: the stand-in plans its steps itself."""

    def make_stats(self) -> Any:
        """Is not called either."""

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """As with several KV groups: no block is marked invalid, so a read that failed counts as
        received.

        From 0.30 on its request ends.
        """
        report = model_runner_output.kv_connector_output
        outputs: dict[int, EngineCoreOutputs] = {}
        for request_id in report.failed_recving:
            request = self.requests[request_id]
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
            ended = EngineCoreOutput(
                request_id=request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        report.finished_recving -= report.failed_recving
        self._update_from_kv_xfer_finished(report)
        return outputs

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        for request_id in kv_connector_output.finished_recving:
            if self.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.finished_recving_kv_req_ids.add(request_id)

    def finish_requests(self, request_id: str, finished_status: RequestStatus) -> None:
        request = self.requests.pop(request_id)
        self.finished_recving_kv_req_ids.discard(request_id)
        request.status = finished_status
        self._free(request)
