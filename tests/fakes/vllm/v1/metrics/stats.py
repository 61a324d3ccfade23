from dataclasses import dataclass


@dataclass
class RequestStateStats:
    """The times of one request. All but the first are monotonic, of the engine's process."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
