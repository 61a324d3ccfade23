"""The chunk limit of an elastic vLLM engine follows its streams, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.vllm.chunk_threshold import IS_ELASTIC, follow_streams


def scheduler_of(extra: dict[str, Any] | None) -> Any:
    """Return a scheduler with the attributes of vLLM's that are used, and its limits of steps."""

    class Scheduler:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.scheduler_config = SimpleNamespace(
                max_num_batched_tokens=16384, long_prefill_token_threshold=0
            )
            transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
            self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)

        def schedule(self) -> int:
            return int(self.scheduler_config.long_prefill_token_threshold)

    follow_streams(Scheduler)
    follow_streams(Scheduler)
    return Scheduler()


def request(computed: int, prompt: int, **params: Any) -> Any:
    return SimpleNamespace(
        num_computed_tokens=computed, num_prompt_tokens=prompt, kv_transfer_params=params or None
    )


def test_threshold_follows_streams() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    prompt = request(0, 9000)
    scheduler.requests["prompt"] = prompt
    assert scheduler.schedule() == 0
    scheduler.requests["stream"] = request(101, 100)
    assert scheduler.schedule() == 2048
    del scheduler.requests["stream"]
    assert scheduler.schedule() == 0


def test_decode_call_that_waits_for_a_step_is_a_stream() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.requests["prompt"] = request(0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == 0
    scheduler.requests["fetching"] = request(0, 500, do_remote_prefill=True)
    assert scheduler.schedule() == 2048
    # Its KV has arrived, and vLLM computes the last token again.
    scheduler.requests["fetching"] = request(499, 500, do_remote_prefill=False)
    assert scheduler.schedule() == 2048


def test_prefill_call_whose_kv_awaits_its_transfer_is_no_stream() -> None:
    """vLLM keeps it among the requests until its KV is fetched."""
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.requests["computed"] = request(9000, 9000, do_remote_decode=True)
    scheduler.requests["prompt"] = request(0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == 0


def test_engines_of_other_roles_keep_their_threshold() -> None:
    for extra in ({IS_ELASTIC: False}, {}, None):
        scheduler = scheduler_of(extra)
        scheduler.scheduler_config.long_prefill_token_threshold = 77
        scheduler.requests["stream"] = request(101, 100)
        assert scheduler.schedule() == 77
