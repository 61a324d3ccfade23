"""The bodies of `GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from dynamo_trtllm.messages import ModelDeploymentCard

OWNER = "dynamo_trtllm"


class ModelObject(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int  # prompt and output tokens together, as other servers spell it


class ModelList(TypedDict):
    object: str
    data: list[ModelObject]


def model_object(card: ModelDeploymentCard, created: int) -> ModelObject:
    """`created`: seconds since the epoch."""
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": card.context_length,
    }


def model_list(models: Sequence[ModelObject]) -> ModelList:
    return {"object": "list", "data": list(models)}
