from __future__ import annotations

import pytest

from dynamo_trtllm.config.deployment import RestartConfig
from dynamo_trtllm.support.subprocesses import RunFailed, decide, describe

CONFIG = RestartConfig(max_restarts=2, window_s=10)


def test_decide_first_death_restarts():
    assert decide(CONFIG, -9, [], 100.0) == (
        "was killed by SIGKILL; starting it again (1 of 2 in 10 s)",
        0.0,
    )


def test_decide_at_bound_within_window_gives_up():
    with pytest.raises(
        RunFailed, match="exited with status 1; it was restarted 2 times in 10 s"
    ) as failed:
        decide(CONFIG, 1, [95.0, 99.0], 100.0)
    assert failed.value.exit_status == 1


def test_decide_ignores_restarts_outside_the_window():
    assert "starting it again" in decide(CONFIG, 1, [90.0, 99.0], 100.0)[0]


def test_decide_rejected_configuration_gives_up_with_2():
    with pytest.raises(RunFailed) as failed:
        decide(CONFIG, 2, [], 100.0)
    assert failed.value.exit_status == 2


def test_decide_without_restarts_gives_up_at_once():
    with pytest.raises(RunFailed):
        decide(RestartConfig(max_restarts=0), 0, [], 1.0)


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exited with status 0"), (-15, "was killed by SIGTERM"), (-99, "was killed by signal 99")],
)
def test_describe_when_status_then_words(status, text):
    assert describe(status) == text


def test_decide_foreign_exit_with_2_restarts() -> None:
    """A panic of etcd or nats-server has that status too."""
    assert "starting it again" in decide(RestartConfig(), 2, [], 0.0, is_status_2_final=False)[0]


@pytest.mark.parametrize(
    ("before", "pause_s"), [([], 0), ([50.0], 5), ([50.0, 60.0], 10), ([1.0, 50.0, 60.0], 10)]
)
def test_decide_doubles_each_wait(before, pause_s):
    text, pause = decide(RestartConfig(max_restarts=9, window_s=90, pause_s=5), 1, before, 100.0)
    assert pause == pause_s
    assert (f"starting it again in {pause_s} s (" if pause_s else "starting it again (") in text


def test_decide_paces_immediate_deaths_below_the_limit():
    """So the others go on serving, with the values of the launch scripts."""
    config = RestartConfig(max_restarts=10, window_s=600, pause_s=5)
    restarts = []
    now = 0.0
    for _ in range(100):
        _, pause_s = decide(config, 1, restarts, now)
        restarts.append(now)
        now += pause_s + 0.1
