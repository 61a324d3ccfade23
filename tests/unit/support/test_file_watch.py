"""Files that are read again when they change."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.file_watch import FileWatch


class Watched:
    """Two files. Their content is the text of both; "bad" in it is wrong."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "one", folder / "two"]
        for path in self.paths:
            path.write_text(path.name)
        self.used: list[str] = []
        self.outcomes: list[str] = []
        self.reads = 0
        self.watch = FileWatch(
            "words", self.paths, self._read, self.used.append, self.outcomes.append
        )

    def _read(self) -> str:
        self.reads += 1
        try:
            text = " ".join(path.read_text() for path in self.paths)
        except OSError as exc:
            raise ConfigError(f"missing: {exc.filename}") from exc
        if "bad" in text:
            raise ConfigError(f"bad words: {text}")
        return text


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


async def test_files_are_read_again_only_after_a_change(watched: Watched) -> None:
    for _ in range(3):
        await watched.watch.reload()
    assert watched.reads == 1
    watched.paths[1].write_text("new")
    await watched.watch.reload()
    assert watched.used == ["one two", "one new"]
    assert watched.outcomes == ["ok"]


async def test_wrong_content_keeps_the_former_one(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.paths[0].write_text("bad")
    for _ in range(3):
        await watched.watch.reload()
    watched.paths[0].unlink()
    await watched.watch.reload()
    watched.paths[0].write_text("one")
    await watched.watch.reload()
    assert watched.used == ["one two", "one two"]
    # Each problem is counted and logged once.
    assert watched.outcomes == ["failed", "failed", "ok"]
    assert caplog.text.count("still using the former words") == 2


async def test_file_that_returns_unchanged_is_read_again(watched: Watched) -> None:
    away = watched.paths[0].with_name("away")
    os.rename(watched.paths[0], away)
    await watched.watch.reload()
    os.rename(away, watched.paths[0])
    await watched.watch.reload()
    assert watched.outcomes == ["failed", "ok"]


@pytest.mark.parametrize(
    "problem", [ConfigError("no file descriptors"), OSError(errno.EMFILE, "Too many open files")]
)
async def test_problem_that_passes_without_a_change_ends(
    watched: Watched, problem: Exception
) -> None:
    watched.paths[0].write_text("other")
    read = watched.watch._read

    def fail() -> str:
        raise problem

    watched.watch._read = fail
    await watched.watch.reload()
    watched.watch._read = read
    await watched.watch.reload()
    assert watched.outcomes == ["failed", "ok"]


def test_wrong_content_at_the_start_is_an_error(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.paths[0].write_text("bad")
    with pytest.raises(ConfigError, match="bad words"):
        FileWatch("words", watched.paths, watched._read, watched.used.append, print)
