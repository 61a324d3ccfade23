"""The limits of the steps of an elastic vLLM engine follow its streams, step by step."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

from dynamo_trtllm.engines.vllm.chunk_threshold import IS_ELASTIC, ITL_LIMIT_S, follow_streams
from dynamo_trtllm.engines.vllm.steps import OutputGap

MAX_TOKENS = 16384
FIRST_CHUNK = MAX_TOKENS // 16


class Limits(NamedTuple):
    """The limits of a step."""

    prompt_tokens: int  # of one prompt. 0: no limit
    step_tokens: int


NO_LIMITS = Limits(0, MAX_TOKENS)


class Scheduler:
    """A scheduler with the attributes of vLLM's that are used."""

    def __init__(self, extra: dict[str, Any] | None) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self.finished_recving_kv_req_ids: set[str] = set()
        self.max_num_scheduled_tokens = MAX_TOKENS
        self.dynamo_output_gap: OutputGap | None = None
        self.dynamo_planned_tokens = 0
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
        transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)

    def schedule(self) -> Limits:
        threshold = self.scheduler_config.long_prefill_token_threshold
        return Limits(threshold, self.max_num_scheduled_tokens)

    def add(
        self,
        name: str,
        computed: int,
        tokens: int,
        status: str = "WAITING",
        itl_s: float | None = None,
        **params: Any,
    ) -> None:
        """Add a request that waits.

        Args:
            name: its id.
            computed: the tokens that are computed.
            tokens: of its prompt, and of its output so far.
            status: of the request.
            itl_s: its limit of the time between two tokens.
            params: its KV transfer parameters.
        """
        extra = None if itl_s is None else {ITL_LIMIT_S: itl_s}
        request = SimpleNamespace(
            request_id=name,
            status=SimpleNamespace(name=status),
            num_computed_tokens=computed,
            num_tokens=tokens,
            num_tokens_with_spec=tokens,
            num_output_placeholders=0,
            kv_transfer_params=params or None,
            sampling_params=SimpleNamespace(extra_args=extra),
        )
        self.requests[name] = request
        if status == "WAITING":
            self.waiting.append(request)

    def run(self, name: str, computed: int, tokens: int, **params: Any) -> None:
        """Add a request that runs."""
        self.add(name, computed, tokens, status="RUNNING", **params)
        self.running.append(self.requests[name])

    def measured(self, seconds: float, planned_tokens: int) -> None:
        self.dynamo_output_gap = OutputGap(seconds, planned_tokens, planned_tokens, seconds)


follow_streams(Scheduler)
follow_streams(Scheduler)


def elastic() -> Scheduler:
    return Scheduler({IS_ELASTIC: True})


def test_limits_follow_streams() -> None:
    scheduler = elastic()
    scheduler.run("prompt", 0, 9000)
    assert scheduler.schedule() == NO_LIMITS
    scheduler.run("stream", 100, 101)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 1)
    # It takes its token before the prompt takes what is left.
    assert [request.request_id for request in scheduler.running] == ["stream", "prompt"]
    scheduler.requests.pop("stream")
    scheduler.running.pop(0)
    assert scheduler.schedule() == NO_LIMITS


def test_streams_alone_have_no_limit() -> None:
    scheduler = elastic()
    for name in "abc":
        scheduler.run(name, 100, 101)
    assert scheduler.schedule() == NO_LIMITS


def test_chunk_is_steered_by_the_times_of_steps() -> None:
    """Steps have more tokens until they take 45 ms, and fewer if they take longer."""
    for num_prompts in (1, 3):
        scheduler = elastic()
        scheduler.run("stream", 100, 101)
        for number in range(num_prompts):
            scheduler.run(f"prompt-{number}", 0, 900_000)
        scheduler.schedule()
        for base_s, token_s, wanted in ((0.01, 1e-4, 350), (0.01, 1e-5, 3500), (1.0, 0.0, 256)):
            for _ in range(60):
                tokens = scheduler.dynamo_planned_tokens
                scheduler.measured(base_s + token_s * tokens, tokens)
                scheduler.schedule()
            assert abs(scheduler.dynamo_planned_tokens - wanted) <= 0.1 * wanted


def test_chunk_follows_the_shortest_limit_of_the_streams() -> None:
    """Of streams that run and of decode calls that wait; prompts have no say."""
    scheduler = elastic()
    scheduler.run("prompt", 0, 900_000, itl_s=0.001)
    scheduler.run("stream", 100, 101, itl_s=0.2)

    def chunk_after(num_steps: int) -> int:
        for _ in range(num_steps):
            scheduler.schedule()
            tokens = scheduler.dynamo_planned_tokens
            scheduler.measured(0.01 + 1e-5 * tokens, tokens)
        return scheduler.dynamo_planned_tokens

    assert abs(chunk_after(60) - 11_000) <= 1100
    scheduler.add("call", 100, 101, itl_s=0.1, do_remote_prefill=True)
    # The next step is smaller already.
    assert chunk_after(1) <= 0.6 * 11_000
    assert abs(chunk_after(60) - 5000) <= 500
    # A stream without a limit has the usual target.
    scheduler.run("other", 100, 101)
    assert abs(chunk_after(60) - 3500) <= 350


def test_one_gap_counts_once() -> None:
    scheduler = elastic()
    scheduler.run("prompt", 0, 9000)
    scheduler.run("stream", 100, 101)
    scheduler.measured(0.09, FIRST_CHUNK)
    assert [scheduler.schedule().prompt_tokens for _ in range(3)] == [FIRST_CHUNK // 2] * 3


def test_prompts_go_on_one_after_the_other() -> None:
    scheduler = elastic()
    scheduler.run("stream", 100, 101)
    for name in "abc":
        scheduler.run(name, 0, 9000)
    scheduler.add("waiting", 0, 9000)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 1)


def test_prompts_leave_tokens_for_decode_calls_that_may_begin() -> None:
    scheduler = elastic()
    scheduler.run("stream", 100, 101)
    for name in "abc":
        scheduler.run(name, 0, 9000)
    scheduler.add("reading", 0, 500, "WAITING_FOR_REMOTE_KVS", do_remote_prefill=True)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 1)
    scheduler.finished_recving_kv_req_ids.add("reading")
    share = FIRST_CHUNK // 3
    assert scheduler.schedule() == (share, 3 * share + 2)


def test_decode_calls_come_before_prompts_that_wait() -> None:
    """vLLM begins the read of KV in the order in which requests wait."""
    scheduler = elastic()
    scheduler.run("stream", 100, 101)
    for name in "ab":
        scheduler.add(name, 0, 9000)
    scheduler.add("call", 0, 500, do_remote_prefill=True)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 2)
    assert [request.request_id for request in scheduler.waiting] == ["call", "a", "b"]


def test_decode_call_that_waits_for_a_step_is_a_stream() -> None:
    scheduler = elastic()
    scheduler.add("prompt", 0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == NO_LIMITS
    scheduler.add("reading", 0, 500, "WAITING_FOR_REMOTE_KVS", do_remote_prefill=True)
    assert scheduler.schedule().prompt_tokens == FIRST_CHUNK
    # Its KV has arrived, and vLLM computes the last token again.
    scheduler.add("reading", 499, 500, do_remote_prefill=False)
    assert scheduler.schedule().prompt_tokens == FIRST_CHUNK


def test_prefill_call_whose_kv_awaits_its_transfer_is_no_stream() -> None:
    """vLLM keeps it among the requests until its KV is fetched."""
    scheduler = elastic()
    scheduler.add("computed", 9000, 9000, "FINISHED", do_remote_decode=True)
    scheduler.run("prompt", 0, 9000, do_remote_decode=True)
    assert scheduler.schedule() == NO_LIMITS


def test_prompt_that_is_computed_takes_no_share() -> None:
    """With asynchronous scheduling, a prefill call runs for one more step."""
    scheduler = elastic()
    scheduler.run("stream", 100, 101)
    scheduler.run("computed", 9000, 9000, do_remote_decode=True)
    scheduler.run("prompt", 0, 9000, do_remote_decode=True)
    scheduler.add("call", 0, 500, do_remote_prefill=True)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 2)


def test_preempted_stream_is_a_prompt_until_it_is_computed_again() -> None:
    scheduler = elastic()
    scheduler.run("resumed", 500, 3500)
    scheduler.run("stream", 100, 101)
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 1)
    assert scheduler.running[0].request_id == "stream"


def test_tokens_of_speculation_count() -> None:
    scheduler = elastic()
    scheduler.run("prompt", 0, 9000)
    scheduler.run("stream", 100, 101)
    scheduler.requests["stream"].num_tokens_with_spec = 104
    assert scheduler.schedule() == (FIRST_CHUNK, FIRST_CHUNK + 4)


def test_engines_of_other_roles_keep_their_limits() -> None:
    for extra in ({IS_ELASTIC: False}, {}, None):
        scheduler = Scheduler(extra)
        scheduler.scheduler_config.long_prefill_token_threshold = 77
        scheduler.run("prompt", 0, 9000)
        scheduler.run("stream", 100, 101)
        assert scheduler.schedule() == (77, MAX_TOKENS)


def test_models_with_whole_blocks_keep_their_limits() -> None:
    """A chunk of less than a block would be none."""
    scheduler = elastic()
    scheduler.need_mamba_block_aligned_split = True  # type: ignore[attr-defined]
    scheduler.run("prompt", 0, 9000)
    scheduler.run("stream", 100, 101)
    assert scheduler.schedule() == NO_LIMITS
