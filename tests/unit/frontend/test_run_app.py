"""What keeps a frontend's books true while it serves."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.frontend.process.run_app import prune_breakers
from dynamo_trtllm.messages import Role
from dynamo_trtllm.router.policy import BreakerLimits, PairBreakers
from dynamo_trtllm.router.view import ClusterView
from tests.instances import make_instance


async def test_book_when_an_instance_is_gone_then_its_pairs_are_forgotten_with_no_canary() -> None:
    view, breakers = ClusterView(), PairBreakers(BreakerLimits(failures=1))
    for instance in (make_instance(1, role=Role.PREFILL), make_instance(2), make_instance(3)):
        view.add(instance)
    forgetting = asyncio.create_task(prune_breakers(view, breakers))
    await asyncio.sleep(0)
    for pair in ((1, 2), (1, 3)):
        breakers.record_failure(pair, "x", 0.0)
    view.remove(2)
    await asyncio.sleep(0)
    assert not breakers.pairs_with(2)
    assert breakers.is_open((1, 3))
    forgetting.cancel()
    await asyncio.gather(forgetting, return_exceptions=True)
