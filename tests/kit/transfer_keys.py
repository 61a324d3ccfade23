"""Keys for KV transfers, in files of tests."""

from __future__ import annotations

from pathlib import Path

FIRST_KEY = "first-key" * 4
SECOND_KEY = "second-key" * 4


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_keys(path: Path, *keys: str) -> Path:
    """Write a key file that its user alone can read. Return its path."""
    path.touch(mode=0o600)
    path.write_text("\n".join(keys))
    return path
