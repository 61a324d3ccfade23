"""Define the reports of frontends to each other: how much of the workers their clients use."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from dynamo_trtllm.protocol.number_types import Int64, Number

_Tokens: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
_Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class ModelUsage(msgspec.Struct, frozen=True, array_like=True):
    """How much of the workers of one model the clients of one process use."""

    # What the choices of the process take until their prompt is computed, until their first token,
    # and until their end. The three sums are parts of `worker_capacity.WINDOW`.
    taken: tuple[Number, Number, Number]
    waiting: dict[str, _Weight]  # the weights of the clients whose requests wait, by name
    # The tokens since the last report, divided by the weight of the client, by name of the client.
    # A negative number corrects an earlier report.
    tokens: dict[str, _Tokens]
    # True: a client below its share has begun requests. Then requests of other clients are computed
    # in shorter steps.
    has_below: bool = False
    # The requests that wait at the process until workers can begin them: the number of their
    # choices, and the number of tokens of their prompts that are probably in no prefix cache.
    queued_choices: Number = 0
    queued_tokens: Number = 0
    # True: these requests wait for a place at decode workers. Otherwise they wait for prefill
    # workers.
    waits_for_decode: bool = False
    # The process can use no pair of workers of the model: see `FleetHealth.lacks_pairs`.
    lacks_pairs: bool = False


class KeyTotals(msgspec.Struct, frozen=True, array_like=True):
    """The usage of one API key."""

    running: Number = 0  # number of generations that run or wait
    requests: Int64 = 0  # number of requests in the last minute
    tokens: Int64 = 0  # number of tokens in the last minute


class FrontendUsage(msgspec.Struct, frozen=True, array_like=True):
    """The usage of the clients of one frontend process."""

    # A random id of the process. With a file of API keys, the id stays the same after a crash.
    process: Number
    frontend: Number  # a random id, which all processes of the frontend share
    models: dict[str, ModelUsage]  # the usage of each model that is used
    # The usage of API keys by id of the key, see `KeyUsage`. Keys without limits, and keys whose
    # usage has not changed, are left out.
    keys: dict[Int64, KeyTotals]


def frontend_usage_subject(namespace: str) -> str:
    """Return the subject at which all frontends of a namespace publish `FrontendUsage`."""
    return f"{namespace}.frontend_usage"
