"""Gives test files to the processes of pytest-xdist. Knows paths, no tests."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/e2e/demo_model/",)  # folders whose tests share processes that take long to start
# What lasts longest begins first, or all others would end up waiting for it.
FIRST = (
    "tests/e2e/test_failures.py",
    *TOGETHER,
    "tests/e2e/test_chaos.py",
    "tests/e2e/test_stand_in.py",
    "tests/e2e/",
    "tests/integration/",
    "tests/contract/",
)


def rank(nodeid: str) -> int:
    """Of a test among all: the lower, the sooner its file begins."""
    return next((place for place, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))


class Spreading(LoadFileScheduling):
    """As `--dist loadfile`, but that a folder of TOGETHER counts as one file."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))
