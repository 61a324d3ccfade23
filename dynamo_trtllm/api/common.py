"""Define the response bodies that most endpoints share: errors, and the model list of `GET /v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from dynamo_trtllm.messages import ModelDeploymentCard
from dynamo_trtllm.sanitize import shorten

OWNER = "dynamo_trtllm"


class ModelObject(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int  # prompt and output tokens together; the name is vLLM's


class ModelList(TypedDict):
    object: str
    data: list[ModelObject]


def model_object(card: ModelDeploymentCard, created: int) -> ModelObject:
    """Return the `/v1/models` entry of a model. `created` is in seconds since the epoch."""
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "max_model_len": card.context_length,
    }


def model_list(models: Sequence[ModelObject]) -> ModelList:
    return {"object": "list", "data": list(models)}


LONGEST = 1000  # characters of an error message: it may quote a request of several megabytes


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": shorten(message, LONGEST), "type": type, "param": param, "code": code}}
