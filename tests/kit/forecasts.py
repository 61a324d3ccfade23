"""All times that are predicted for a request at one worker."""

from __future__ import annotations

from dynamo_trtllm.frontend.routing.worker_forecast import WorkerForecast
from dynamo_trtllm.frontend.routing.worker_load import InstanceLoad, cost_of_equals
from dynamo_trtllm.protocol.messages import Instance


def predicted_times(
    load: InstanceLoad, instance: Instance, prompt_tokens: int = 7, now: float = 0.0
) -> list[float]:
    """Return the predicted times in seconds; empty: they are not known."""
    known = cost_of_equals([load])
    if known is None or not load.is_fresh(now):
        return []
    forecast = WorkerForecast(instance, load, load.completed_cost(known), prompt_tokens, 0)
    return [
        forecast.first_token_s(),
        forecast.prompt_gap_s(),
        forecast.decode_gap_s(),
        forecast.transfer_s(0.0),
        float(forecast.has_space()),
    ]
