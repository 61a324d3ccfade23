"""Define what a response has beside the fields of its API, if the client asks for it: statistics,
and Dynamo's `nvext`.

The names of `nvext` are those of NVIDIA Dynamo (lib/llm/src/protocols/openai/nvext.rs,
protocols/common/timing.rs).
"""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Milliseconds = Annotated[float, Field(ge=0)]
Seconds = dict[str, Annotated[float, Field(ge=0)]]
Count = Annotated[int, Field(ge=0)]


class Stats(TypedDict):
    """The workers and timings of a request.

    Present if the request has the header x-dynamo-stats: 1.
    """

    prefill_instance: str | None  # hexadecimal, as in subjects; several are joined by commas
    decode_instance: str | None
    kv_bytes: Count
    transport: str
    queued_s: float  # in the frontend's queue; included in `ttft_s`
    ttft_s: float
    tokens_per_s: float | None
    total_s: float  # from the request until now
    phase_s: Seconds  # by phase; they add up to `total_s`
    # Phases before the first token; they add up to `ttft_s`. Empty: there was no first token.
    ttft_phase_s: Seconds
    part_s: Seconds  # what a phase consists of or waits for, such as `queue.kv_blocks`
    # Statistics of each choice, if there are several. The fields above are about all of them.
    choices: NotRequired[list[Stats]]


class WorkerIds(TypedDict, total=False):
    """The workers of the first choice. An aggregated worker has both roles."""

    prefill_worker_id: Count
    decode_worker_id: Count


class NvTiming(TypedDict):
    """The times of a request, as Dynamo reports them."""

    request_received_ms: Count  # when the request came, since the epoch
    # from then to the first call to a worker
    prefill_wait_time_ms: NotRequired[Milliseconds]
    prefill_time_ms: NotRequired[Milliseconds]  # from that call to the first token
    ttft_ms: NotRequired[Milliseconds]
    total_time_ms: Milliseconds
    kv_hit_rate: float  # cached tokens as a share of the prompt


class NvExtAnswer(TypedDict, total=False):
    """The fields that the request names in `nvext.extra_fields`."""

    worker_id: WorkerIds
    timing: NvTiming


class Extras(TypedDict, total=False):
    """What the client asked for beside the fields of the API."""

    dynamo_trtllm: Stats
    nvext: NvExtAnswer
