"""The torch engine's ticket inside the vendor's opaque bytes, and what decode must be given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.messages import KvTransferParams, decode, encode, token_ids
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.standin import traps
from tensorrt_llm.standin.release import LINE, VERSION

_DRAFTS = [7, 8, 9]


class _State(msgspec.Struct, frozen=True):
    version: str
    kv_params: KvTransferParams
    expected: dict[str, Any]  # what decode must be given as it was answered


def context_answer(
    asked: Any, kv_params: KvTransferParams | None, request_id: int, first: Sequence[tuple[int, Any]]
) -> Any:
    """`outputs[0].disaggregated_params` of a context-only request. `request_type` is still that of the request."""
    assert kv_params is not None
    fields: dict[str, Any] = {
        "request_type": "context_only",
        "first_gen_tokens": [token for token, _ in first],
        "ctx_request_id": request_id,
    }
    if traps.is_on("draft_tokens"):
        fields["draft_tokens"] = list(_DRAFTS)
    if LINE >= (1, 3):
        fields |= {"ctx_dp_rank": 0, "ctx_info_endpoint": "tcp://127.0.0.1:1"}
        fields["disagg_request_id"] = asked.disagg_request_id
        fields["ctx_usage"] = {"prompt_tokens": kv_params.prompt_tokens}
    expected = {name: value for name, value in fields.items() if name not in ("request_type", "ctx_usage")}
    state = encode(_State(VERSION, kv_params, expected))
    if LINE >= (1, 3) and first[0][1] is not None:
        fields["first_gen_log_probs"] = [[entry] for _, entry in first]
    return DisaggregatedParams(**fields, opaque_state=state)


def transfer_params_of(params: Any) -> KvTransferParams:
    """Raises ValueError for parameters that are not what context-only answered."""
    if not isinstance(params.opaque_state, bytes):
        raise ValueError(f"opaque_state must be bytes, not {type(params.opaque_state)}")
    try:
        state = decode(params.opaque_state, _State)
    except BadFrame as exc:
        raise ValueError("opaque_state was not made by a context request") from exc
    if state.version != VERSION:
        raise ValueError(f"opaque_state of TensorRT-LLM {state.version} can't be read by {VERSION}")
    for name, value in state.expected.items():
        if getattr(params, name, None) != value:
            raise ValueError(f"{name} is {getattr(params, name, None)!r}; context answered {value!r}")
    return msgspec.structs.replace(state.kv_params, first_token_ids=token_ids(params.first_gen_tokens))
