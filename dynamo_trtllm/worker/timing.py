"""How long the parts of a worker wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTiming:
    """Waits of a worker in seconds. Users can't change them; tests pass shorter ones."""

    loading_poll_s: float = 0.5  # time between two queries of the progress of a start
    loading_log_s: float = 30.0  # time between two log lines within one stage of loading
    # Time between two checks of the engine, which detect a failure without a request.
    engine_check_s: float = 2.0
    # Longest wait for a change of the engine's memory. TensorRT-LLM's ranks may never answer.
    memory_change_s: float = 300.0

    # If the KV to transfer exceeds its share for this time, decode workers do not fetch it.
    unfetched_kv_s: float = 1.0

    # Time for which the load of the engine is not read again.
    load_age_s: float = 0.01
    # Time between two broadcasts of a changed load. In simulations with 16 frontends and 1 s, the
    # frontends sent their requests to the same workers: the time to first token at p99 was up to
    # 1.6 times as long.
    load_broadcast_s: float = 0.25
    unchanged_load_s: float = 10.0  # time between two broadcasts of a load that does not change
    # Time between a call and the broadcast that it causes. This broadcast covers further calls.
    collect_calls_s: float = 0.05


TIMING = WorkerTiming()
