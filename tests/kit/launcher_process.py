"""Starts the launcher like a user does, and finds its processes by a mark in their environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from tests.kit.cluster import PLAIN

WAIT_S = 100.0
LAUNCHER = (sys.executable, "-m", "dynamo_trtllm.launch")
MARK = "LAUNCH_TEST_MARK"


def ask_until_answered(port: int, model: str = "tiny-gpt-oss") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = httpx.post(
            f"http://localhost:{port}/v1/chat/completions", json=body, timeout=WAIT_S, **PLAIN
        )
        if answer.status_code == 200:
            return
        # The frontend discovers a worker shortly after the launcher. Until then its model is
        # unknown.
        assert answer.status_code in (404, 503), answer.text
        assert time.monotonic() < deadline
        time.sleep(0.1)


class LauncherProcess:
    """A launcher, or a script that runs it, whose children have a mark in their environment."""

    def __init__(
        self,
        folder: Path,
        *argv: str,
        command: Sequence[str] = LAUNCHER,
        env: Mapping[str, str] = {},
    ) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.process = subprocess.Popen(
            [*command, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env, MARK: self.mark, "TMPDIR": str(folder)},
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_line(self, pattern: str, after: int = 0) -> re.Match[str]:
        """Wait for a matching line from number `after` on."""

        def find() -> re.Match[str] | None:
            return next((m for line in self.lines[after:] if (m := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: find() is not None or self._ended, WAIT_S)
            found = find()
        assert found is not None, f"no line matches {pattern!r}:\n" + "\n".join(self.lines)
        return found

    def pids(self) -> dict[int, str]:
        """Return all running processes of this launch, itself included, with their command
        lines.
        """
        found = {}
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found[process.pid] = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def pid_of(self, word: str) -> int:
        (pid,) = [pid for pid, command in self.pids().items() if word in command]
        return pid

    def wait_process(self, word: str) -> None:
        """Wait until one of its processes has `word` in its command line.

        A process that was forked and runs no other program yet has the command line of the
        launcher, and does not count.
        """
        deadline = time.monotonic() + WAIT_S
        while not self._has_child(word):
            assert time.monotonic() < deadline, f"no process has {word!r} in its command line"
            time.sleep(0.05)

    def _has_child(self, word: str) -> bool:
        commands = self.pids()
        own = commands.pop(self.process.pid, "")
        return any(word in command and command != own for command in commands.values())

    def wait_gone(self, limit_s: float) -> None:
        """Wait until no process of this launch runs."""
        deadline = time.monotonic() + limit_s
        while alive := self.pids():
            assert time.monotonic() < deadline, f"still running: {alive}"
            for pid in alive:
                try:
                    psutil.Process(pid).wait(max(0.0, deadline - time.monotonic()))
                except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                    continue

    def end(self) -> tuple[int, str]:
        """Wait for the exit. Return the exit status and stderr."""
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        return status, self.process.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
