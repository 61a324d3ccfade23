"""Define what the frontends of a namespace tell each other: what their clients take."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from dynamo_trtllm.protocol.number_types import Int64, Number

_Tokens: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class ModelUsage(msgspec.Struct, frozen=True, array_like=True):
    """What the clients of one process take of the workers of one model."""

    # What its choices take until their prompt is computed, until their first token, and until their
    # end, as parts of `worker_capacity.WINDOW`.
    taken: tuple[Number, Number, Number]
    waiting: dict[str, _Weight]  # weights of the clients whose requests wait, by name
    # Tokens since the last report, divided by the weights, by name of the client. Negative: fewer
    # than were reported before.
    tokens: dict[str, _Tokens]
    # A client below its share has begun requests. Those of other clients are computed in shorter
    # steps.
    has_below: bool = False
    # Choices of requests that wait at the process until workers can begin them, and those tokens of
    # their prompts that are probably in no prefix cache.
    queued_choices: Number = 0
    queued_tokens: Number = 0
    # They wait for a place at decode workers. Otherwise they wait for prefill workers.
    waits_for_decode: bool = False
    # The process sends no requests to any pair of workers of the model: all are quarantined.
    lacks_pairs: bool = False


class KeyTotals(msgspec.Struct, frozen=True, array_like=True):
    """What one API key uses."""

    running: Number = 0  # generations that run or wait
    requests: Int64 = 0  # in the last minute
    tokens: Int64 = 0  # in the last minute


class FrontendUsage(msgspec.Struct, frozen=True, array_like=True):
    """What the clients of one process of a frontend take."""

    process: Number  # random; with a file of API keys, the same after a crash of the process
    frontend: Number  # random, the same for all processes of a frontend
    models: dict[str, ModelUsage]  # models that are used
    # The totals by id of the key, see `KeyUsage`. Keys without limits, and keys whose usage has not
    # changed, are left out.
    keys: dict[Int64, KeyTotals]


def frontend_usage_subject(namespace: str) -> str:
    """Return the subject at which all frontends of a namespace publish `FrontendUsage`."""
    return f"{namespace}.frontend_usage"
