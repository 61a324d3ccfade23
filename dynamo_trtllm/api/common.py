"""Define what the responses of several endpoints share: errors, models, the fields of generations, and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseMeta:
    """The fields with which every object of a response begins. `created`: seconds since the epoch."""

    id: str
    model: str
    created: int
    client: str = ""  # the client's network address; "" if unknown


class Phases(TypedDict):
    """The time a request spent in each phase, in seconds."""

    queue: float
    prefill: float
    handoff: float
    decode_wait: float


class Stats(TypedDict):
    """The workers and timings of a request, for clients that send `x-dynamo-stats: 1`."""

    prefill_instance: str | None  # hexadecimal, as in subjects; several are joined by commas
    decode_instance: str | None
    kv_bytes: int
    transport: str
    queued_s: float  # in the frontend's queue; included in `ttft_s`
    ttft_s: float
    tokens_per_s: float | None
    phase_s: Phases
    choices: NotRequired[list[Stats]]  # per choice if there are several; the fields above cover all of them
