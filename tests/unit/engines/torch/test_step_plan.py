"""Which prompt tokens a step of the torch engine computes."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("torch")

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.torch.scheduler import Scheduler
from dynamo_trtllm.protocol.messages import ClientShare, RequestSlo
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


@pytest.mark.parametrize(("itl_s", "tokens"), [(None, 512), (0.01, 512), (0.15, 1024)])
def test_plan_of_elastic_engine_follows_the_limit_of_streams(
    itl_s: float | None, tokens: int
) -> None:
    """The first steps have a sixteenth of a full one, for a target of 45 ms."""
    args = SimpleNamespace(max_step_tokens=STEP_TOKENS, prefill_chunk_tokens=STEP_TOKENS)
    slo = None if itl_s is None else RequestSlo(itl_s=itl_s)
    stream = SimpleNamespace(request=msgspec.structs.replace(make_request(), slo=slo))
    scheduler = SimpleNamespace(
        is_elastic=True,
        _decoding=[stream],
        _prefilling=[prompt(5000, ClientShare.EVEN, is_scored=False)],
        _chunk_size=ChunkSize(STEP_TOKENS),
        args=args,
    )
    (chunk,) = Scheduler._plan_chunks(scheduler, STEP_TOKENS)
    assert chunk.num_tokens == tokens
