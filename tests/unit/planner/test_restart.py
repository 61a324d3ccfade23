"""A planner that restarts goes on with the decisions of the one before: it has no state of its own."""

from __future__ import annotations

from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.planner.observe import Observer
from dynamo_trtllm.planner.planner import Planner, changes_of
from dynamo_trtllm.planner.predict import TimeLimits
from dynamo_trtllm.protocol.messages import LoadReport
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.instances import elastic_instance

IDS = (1, 2, 3)
# A prompt of 1000 tokens takes 0.1 s, in which the streams of its worker wait.
COST = MockArgs(prefill_token_s=0.0001, decode_request_s=0.001).cost_prior
LIMITS = TimeLimits(ttft_s=2.0, itl_s=0.05)
SECONDS = 15
RESTART_AT_S = 7


def report(instance_id: int, second: int) -> LoadReport:
    return LoadReport(
        instance_id=instance_id,
        number=second + 1,
        running=2,
        waiting=0,
        queued_prefill_tokens=0,
        kv_blocks_used=0,
        kv_blocks_total=100,
        context_tokens=200,
        cost=COST,
        num_generating=2,
        generating_tokens=200,
        computed_prompts=second,
        computed_tokens=1000 * second,
    )


def shares_after_load(*, restarts: bool) -> tuple[dict[int, Shares], int]:
    """Return the shares after some seconds of the same load, and how often they changed."""
    view = ClusterView()
    for instance_id in IDS:
        view.add(elastic_instance(instance_id))
    observer = Observer(view, 0.0)
    planner = Planner(observer, LIMITS)
    shares: dict[int, Shares] = {}
    num_changes = 0
    for second in range(SECONDS):
        if restarts and second == RESTART_AT_S:
            # It has followed the reports while the one before led, as all planners do.
            planner = Planner(observer, LIMITS)
        for instance_id in IDS:
            observer.on_report(report(instance_id, second), float(second))
        changes = changes_of(planner.decisions(float(second)))
        if changes:
            num_changes += 1
            shares |= changes
            view.set_shares(dict(shares))
    return shares, num_changes


def test_restarted_planner_changes_nothing_that_was_decided() -> None:
    shares, num_changes = shares_after_load(restarts=False)
    assert num_changes >= 1
    assert shares_after_load(restarts=True) == (shares, num_changes)
