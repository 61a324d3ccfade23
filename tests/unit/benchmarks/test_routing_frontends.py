from __future__ import annotations

import pytest

from benchmarks.routing_frontends import SimulatedFrontends


def _ttfts(*, frontends: int, holds: bool) -> list[float]:
    """Return the times to first token of the prompts that frontends send to one worker within 5
    s.
    """
    return SimulatedFrontends(frontends, {1: 20_000.0}, by_load=True, holds=holds).ttfts(
        (200, 500, 1000, 6000), 5.0
    )


def test_frontend_holding_prompts_for_its_only_worker_adds_none() -> None:
    assert _ttfts(frontends=1, holds=True) == pytest.approx(_ttfts(frontends=1, holds=False))


def test_frontends_holding_prompts_at_the_end_compute_all() -> None:
    assert len(_ttfts(frontends=4, holds=True)) == len(_ttfts(frontends=4, holds=False))
