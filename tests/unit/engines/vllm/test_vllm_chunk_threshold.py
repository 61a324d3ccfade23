"""The limits of the steps of an elastic vLLM engine follow its streams, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from dynamo_trtllm.engines.vllm.chunk_threshold import IS_ELASTIC, follow_streams

MAX_TOKENS = 16384
FIRST_CHUNK = MAX_TOKENS // 16


class Limits(NamedTuple):
    """The limits of a step."""

    prompt_tokens: int  # of one prompt. 0: no limit
    step_tokens: int


NO_LIMITS = Limits(0, MAX_TOKENS)


def scheduler_of(extra: dict[str, Any] | None) -> Any:
    """Return a scheduler with the attributes of vLLM's that are used, and its limits of steps."""

    class Scheduler:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.running: list[Any] = []
            self.num_spec_tokens = 0
            self.max_num_scheduled_tokens = MAX_TOKENS
            self.dynamo_last_sample: list[float] | None = None
            self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
            transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
            self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)

        def schedule(self) -> Limits:
            threshold = self.scheduler_config.long_prefill_token_threshold
            return Limits(threshold, self.max_num_scheduled_tokens)

        def add(self, name: str, computed: int, prompt: int, **params: Any) -> None:
            self.requests[name] = SimpleNamespace(
                num_computed_tokens=computed,
                num_prompt_tokens=prompt,
                kv_transfer_params=params or None,
            )

        def run(self, name: str, computed: int, prompt: int, **params: Any) -> None:
            self.add(name, computed, prompt, **params)
            self.running.append(self.requests[name])

        def measured(self, seconds: float, prompt_tokens: int) -> None:
            self.dynamo_last_sample = [seconds, 1, 100, prompt_tokens, 0.0]

    follow_streams(Scheduler)
    follow_streams(Scheduler)
    return Scheduler()


def test_limits_follow_streams() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.run("prompt", 0, 9000)
    assert scheduler.schedule() == NO_LIMITS
    scheduler.run("stream", 101, 100)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 1)
    scheduler.requests.pop("stream")
    scheduler.running.pop()
    assert scheduler.schedule() == NO_LIMITS


def test_chunk_is_steered_by_the_times_of_steps() -> None:
    """Steps have more tokens until they take 45 ms, and fewer if they take longer."""
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.run("prompt", 0, 900_000)
    scheduler.run("stream", 101, 100)
    chunk = scheduler.schedule().prompt_tokens
    for _ in range(40):
        scheduler.measured(0.01 + chunk * 0.0001, chunk)
        chunk = scheduler.schedule().prompt_tokens
    assert abs(chunk - 350) < 35
    for _ in range(40):
        scheduler.measured(0.01 + chunk * 0.00001, chunk)
        chunk = scheduler.schedule().prompt_tokens
    assert abs(chunk - 3500) < 350
    # However long steps take, prompts go on.
    for _ in range(40):
        scheduler.measured(1.0, chunk)
        chunk = scheduler.schedule().prompt_tokens
    assert chunk == MAX_TOKENS // 64


def test_steps_without_both_kinds_of_tokens_do_not_steer() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.run("prompt", 0, 9000)
    scheduler.run("stream", 101, 100)
    for sample in ([1.0, 0, 0, 8192, 0.0], [1.0, 4, 400, 0, 0.0], [0.001, 1, 100, 7, 0.0]):
        scheduler.dynamo_last_sample = sample
        assert scheduler.schedule().prompt_tokens == FIRST_CHUNK
    # One sample counts once.
    scheduler.measured(0.1, FIRST_CHUNK)
    assert [scheduler.schedule().prompt_tokens for _ in range(3)] == [FIRST_CHUNK // 2] * 3


def test_prompts_that_run_share_the_chunk() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.run("stream", 101, 100)
    for name in "abc":
        scheduler.run(name, 0, 9000)
    scheduler.add("waiting", 0, 9000)
    share = FIRST_CHUNK // 3
    assert scheduler.schedule() == (share, 3 * share + 1)


def test_decode_call_that_waits_for_a_step_is_a_stream() -> None:
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.add("prompt", 0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == NO_LIMITS
    scheduler.add("fetching", 0, 500, do_remote_prefill=True)
    assert scheduler.schedule().prompt_tokens == FIRST_CHUNK
    # Its KV has arrived, and vLLM computes the last token again.
    scheduler.add("fetching", 499, 500, do_remote_prefill=False)
    assert scheduler.schedule().prompt_tokens == FIRST_CHUNK


def test_prompts_leave_tokens_for_a_decode_call_behind_them() -> None:
    """vLLM gives tokens to requests that wait in the order of their arrival."""
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.run("stream", 101, 100)
    scheduler.run("prompt", 0, 9000)
    for name in "abc":
        scheduler.add(name, 0, 9000)
    scheduler.add("fetching", 0, 500, do_remote_prefill=True)
    assert scheduler.schedule() == (FIRST_CHUNK // 4, MAX_TOKENS)


def test_prefill_call_whose_kv_awaits_its_transfer_is_no_stream() -> None:
    """vLLM keeps it among the requests until its KV is fetched."""
    scheduler = scheduler_of({IS_ELASTIC: True})
    scheduler.add("computed", 9000, 9000, do_remote_decode=True)
    scheduler.run("prompt", 0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == NO_LIMITS


def test_engines_of_other_roles_keep_their_limits() -> None:
    for extra in ({IS_ELASTIC: False}, {}, None):
        scheduler = scheduler_of(extra)
        scheduler.scheduler_config.long_prefill_token_threshold = 77
        scheduler.run("stream", 101, 100)
        assert scheduler.schedule() == (77, MAX_TOKENS)
