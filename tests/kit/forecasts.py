"""All times that are predicted for a request at one worker."""

from __future__ import annotations

from dynamo_trtllm.frontend.routing.worker_forecast import (
    WorkerForecast,
    complete,
    is_fresh,
    known_cost,
)
from dynamo_trtllm.frontend.routing.worker_load import InstanceLoad
from dynamo_trtllm.protocol.messages import Instance


def predicted_times(
    load: InstanceLoad, instance: Instance, prompt_tokens: int = 7, now: float = 0.0
) -> list[float]:
    """Return the predicted times in seconds; empty: they are not known."""
    known = known_cost([load])
    if known is None or not is_fresh(load, now):
        return []
    forecast = WorkerForecast(instance, load, complete(load, known), prompt_tokens, 0)
    return [
        forecast.first_token_s(),
        forecast.prompt_gap_s(),
        forecast.decode_gap_s(),
        forecast.transfer_s(0.0),
        float(forecast.has_space()),
    ]
