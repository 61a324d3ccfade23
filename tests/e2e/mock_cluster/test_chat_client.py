"""The terminal client against a real frontend.

Its answers from a pipe are tested with the demo model.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.kit.cluster import Cluster, command

pytestmark = pytest.mark.timeout(240)  # the first test also starts the cluster

MODULE = "dynamo_trtllm.chat"
TIMEOUT_S = 60.0


def _hear_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The chat client in a terminal, into which the test types."""

    def __init__(self, cluster: Cluster, *argv: str) -> None:
        self._mine, theirs = pty.openpty()
        words = [sys.executable, "-m", MODULE, "--url", cluster.frontend.url(), *argv]
        env = {name: value for name, value in cluster.env.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def until(self, *texts: str) -> str:
        """What was shown up to the last of these texts, in this order; shown text is used up."""
        deadline = time.monotonic() + TIMEOUT_S
        shown = ""
        for text in texts:
            while text not in self._seen:
                ready, _, _ = select.select(
                    [self._mine], [], [], max(0.0, deadline - time.monotonic())
                )
                assert ready, f"no {text!r} in {shown + self._seen!r}"
                self._seen += os.read(self._mine, 65536).decode(errors="replace")
            before, found, self._seen = self._seen.partition(text)
            shown += before + found
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._mine)


@pytest.fixture
def terminal(mock_cluster: Cluster) -> Iterator[Terminal]:
    # other tests leave models known
    made = Terminal(mock_cluster, "--model", "mock", "--max-tokens", "2000")
    yield made
    made.close()


def test_chat_without_frontend_exits_with_1(mock_cluster: Cluster) -> None:
    status, said = command([MODULE, "--url", "http://127.0.0.1:1"], mock_cluster.env)
    assert status == 1
    assert len(said) == 1
    assert "no frontend answers at http://127.0.0.1:1" in said[0]


def test_chat_with_unknown_model_prints_one_line(mock_cluster: Cluster) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            MODULE,
            "--url",
            mock_cluster.frontend.url(),
            "--model",
            "unknown-model",
        ],
        input="hi\n",
        env=mock_cluster.env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "'unknown-model'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_chat_interrupted_in_a_terminal_continues(terminal: Terminal) -> None:
    terminal.until("mock at http://", "> ")
    terminal.type("Tell me all.\n")
    terminal.until("Tell me all.\r\n", "\x1b[0m")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("stopped; ", "> ")
    terminal.type("/reset\n")
    terminal.until("Conversation cleared", "> ")
    terminal.type("\x04")
    assert terminal.process.wait(TIMEOUT_S) == 0
