"""Hold the workers and timings of one choice of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_trtllm.cost_model import Prediction
from dynamo_trtllm.frontend.generation.suspects import Suspicion
from dynamo_trtllm.messages import PhaseTimings, TokenLogprob
from dynamo_trtllm.phases import Span


@dataclass(slots=True)
class ChoiceTimeline:
    """The workers and timings of a request, filled while the request runs.

    Instances and stats: of its last attempt.

    The pipeline fills the spans. Its caller sets the times of tokens when it gets them.
    """

    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefill_stats: PhaseTimings | None = None
    decode_stats: PhaseTimings | None = None
    retries: int = 0
    migrations: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list, compare=False)
    first_s: float | None = None  # when the first tokens arrived, of `time.monotonic()`
    last_s: float = 0.0  # when the newest ones arrived
    suspicion: Suspicion = field(default_factory=Suspicion, compare=False)
    # When the last attempt began, and the expected time to its first tokens.
    expected: tuple[float, Prediction] | None = None
