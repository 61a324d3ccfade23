from __future__ import annotations

from typing import Any

from vllm.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """Merges the outputs that were not taken yet, as vLLM does for deltas."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        assert output_kind is RequestOutputKind.DELTA
        self.request_id = request_id
        self.output: Any = None

    def put(self, output: Any) -> None:
        if self.output is None or isinstance(output, Exception):
            self.output = output
            return
        (have,) = self.output.outputs
        (new,) = output.outputs
        have.token_ids = [*have.token_ids, *new.token_ids]
        have.logprobs = None if have.logprobs is None else [*have.logprobs, *(new.logprobs or ())]
        have.finish_reason = new.finish_reason
        self.output.finished = output.finished
        self.output.kv_transfer_params = output.kv_transfer_params
