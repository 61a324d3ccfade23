"""Placements of `--router-mode slo` whose workers report what a test says."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_trtllm.frontend.routing.cluster_view import ModelView
from dynamo_trtllm.frontend.routing.cost_placement import RankedSelection
from dynamo_trtllm.frontend.routing.pair_breakers import PairBreakers
from dynamo_trtllm.frontend.routing.path_selection import ChosenPath
from dynamo_trtllm.frontend.routing.prefix_index import PromptHashes
from dynamo_trtllm.frontend.routing.slo_placement import SloPlacement, SloSelection
from dynamo_trtllm.protocol.cost_model import (
    CostModel,
    linear_decode_fit,
    linear_prefill_fit,
    prior_fit,
)
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    Limits,
    LoadReport,
    Role,
    Sampling,
    token_ids,
)
from tests.kit.instances import make_instance, model_view

PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE, THIRD_DECODE, AGGREGATED = 1, 2, 11, 12, 13, 21
TTFT_S = 1.0
ITL_S = 0.1
STEP_TOKENS = 1000
MAX_STREAMS = 40
NONE_OPEN = PairBreakers()
# A step takes 10 ms, and 0.1 ms more per prompt token or 1 ms per stream. A decode call takes 5 ms
# until its first token, and 100 ms more per 1,024 tokens whose KV is fetched before.
COST = CostModel(
    decode=linear_decode_fit(0.01, 0.001),
    prefill=linear_prefill_fit(0.01, 1e-4, 0.001),
    step_tokens=STEP_TOKENS,
    kv_transfer=prior_fit((0.005, 0.0, 0.1)),
)


def instance(instance_id: int, role: Role, **fields: Any) -> Instance:
    limits = Limits(max_batch_size=MAX_STREAMS)
    return msgspec.structs.replace(
        make_instance(instance_id, role=role),
        **{"can_aggregate": True, "limits": limits, **fields},
    )


def view_of(*, num_aggregated: int = 0, **fields: Any) -> ModelView:
    """Return a view of two prefill and two decode workers."""
    return model_view(
        prefill=[instance(id_, Role.PREFILL, **fields) for id_ in (PREFILL, OTHER_PREFILL)],
        decode=[instance(id_, Role.DECODE, **fields) for id_ in (DECODE, OTHER_DECODE)],
        aggregated=[
            instance(AGGREGATED + number, Role.AGGREGATED) for number in range(num_aggregated)
        ],
    )


def request(prompt: int = 500, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="tiny",
        token_ids=token_ids(range(prompt)),
        sampling=Sampling(max_tokens=9),
        deadline=1e12,
        **fields,
    )


def placement_of(
    loads: dict[int, dict[str, Any]] | None = None,
    *,
    cost: CostModel | None = COST,
    rejects: bool = False,
    seed: int = 1,
) -> SloPlacement:
    """Return a placement that knows all workers.

    `loads`: by worker id, the fields in which its report differs from that of an idle worker.
    """
    placement = SloPlacement(TTFT_S, ITL_S, rejects=rejects, seed=seed)
    for id_ in (PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE, THIRD_DECODE, AGGREGATED):
        idle = LoadReport(id_, 1, 0, 0, 0, 0, 1000, 0, cost)
        placement.loads.on_report(msgspec.structs.replace(idle, **(loads or {}).get(id_, {})), 0.0)
    return placement


def select(
    placement: SloPlacement,
    view: ModelView | None = None,
    asked: GenerateRequest | None = None,
    **options: Any,
) -> RankedSelection | None:
    return placement.select(
        view or view_of(), PromptHashes(asked or request()), NONE_OPEN, 0.0, **options
    )


def chosen(
    loads: dict[int, dict[str, Any]] | None = None,
    view: ModelView | None = None,
    asked: GenerateRequest | None = None,
    **options: Any,
) -> ChosenPath:
    selection = select(placement_of(loads), view, asked, **options)
    assert isinstance(selection, SloSelection)
    return selection.chosen


PAIRS_ONLY = view_of(can_aggregate=False)
BUSY_PREFILLS = {id_: {"queued_prefill_tokens": 20_000} for id_ in (PREFILL, OTHER_PREFILL)}
FULL_DECODES = {id_: {"running": MAX_STREAMS} for id_ in (DECODE, OTHER_DECODE)}


def decoding(streams: int) -> dict[int, dict[str, Any]]:
    return {id_: {"running": streams} for id_ in (DECODE, OTHER_DECODE)}
