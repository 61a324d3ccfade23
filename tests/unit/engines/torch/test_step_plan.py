"""Which prompt tokens a step of the torch engine computes."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("torch")

from dynamo_trtllm.engines.torch.scheduler import Scheduler
from dynamo_trtllm.protocol.messages import ClientShare
from tests.kit.request_planes import make_request

STEP_TOKENS = 8192
SCORED_TOKENS = 256  # at most, because of the memory of their logits


def prompt(tokens: int, share: ClientShare, *, is_scored: bool) -> SimpleNamespace:
    request = msgspec.structs.replace(make_request(), client_share=share)
    return SimpleNamespace(
        request=request, prompt_tokens=tokens, num_computed_tokens=0, scores_prompt=is_scored
    )


def test_plan_never_scores_more_tokens_than_the_limit() -> None:
    # The second prompt may fill the step to its half only, which the first one has exceeded.
    prompts = [
        prompt(5000, ClientShare.EVEN, is_scored=False),
        prompt(5000, ClientShare.ABOVE, is_scored=True),
        prompt(5000, ClientShare.EVEN, is_scored=True),
    ]
    args = SimpleNamespace(max_step_tokens=STEP_TOKENS, prefill_chunk_tokens=STEP_TOKENS)
    scheduler = SimpleNamespace(is_elastic=False, _decoding=[], _prefilling=prompts, args=args)
    chunks = Scheduler._plan_chunks(scheduler, STEP_TOKENS)
    assert [chunk.num_tokens for chunk in chunks] == [5000, SCORED_TOKENS]
