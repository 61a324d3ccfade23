"""How many workers a deadly request of `scripts/chaos` has ended."""

from __future__ import annotations

from benchmarks.chaos.query_of_death import deaths


def test_deaths_exclude_a_worker_that_ends_while_starting() -> None:
    killed = "launch    | decode-1 was killed by SIGKILL; starting it again (1 of 1000 in 1 s)"
    exited = "launch    | decode-1 exited with status 1; starting it again (1 of 1000 in 1 s)"
    ready = "launch    | decode-1 is ready after 9.05 s as instance 1f"
    other = "decode-2  | decode-1 exited with status 1"
    assert deaths([exited, ready, killed, exited, exited, ready, other, exited]) == [killed, exited]
