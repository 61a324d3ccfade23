"""What follows when a process has ended: start it again or give the deployment up. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_trtllm.config.deployment import RestartConfig

BAD_CONFIG = 2  # the status of a process whose configuration is refused; starting it again changes nothing
_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """`is_restart`, after `pause_s`, or else the exit status with which the deployment is given up; `text` says why."""

    is_restart: bool
    exit_status: int
    text: str
    pause_s: float = 0.0


def decide(
    config: RestartConfig, status: int, restarts: Sequence[float], now: float, *, is_ours: bool = True
) -> RestartDecision:
    """`restarts` are the times at which this process was started again, on the clock of `now`, in seconds. Only of our
    own programs is it known that BAD_CONFIG means a bad configuration."""
    ended = describe(status)
    if status == BAD_CONFIG and is_ours:
        return RestartDecision(is_restart=False, exit_status=BAD_CONFIG, text=ended)
    recent = len([time for time in restarts if now - time < config.window_s])
    if recent >= config.max_restarts:
        text = f"{ended}; it was restarted {recent} times in {config.window_s:g} s, which is the limit"
        return RestartDecision(is_restart=False, exit_status=_FAILED, text=text)
    pause_s = config.pause_s * 2 ** (recent - 1) if recent else 0.0
    when = f" in {pause_s:g} s" if pause_s else ""
    text = f"{ended}; starting it again{when} ({recent + 1} of {config.max_restarts} in {config.window_s:g} s)"
    return RestartDecision(is_restart=True, exit_status=0, text=text, pause_s=pause_s)


def describe(status: int) -> str:
    """An exit status of subprocess in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
