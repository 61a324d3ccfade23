"""Formats are compiled on trial in processes that may crash, and each end of such a process costs
one request.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch

from dynamo_trtllm.engines.torch.format_compiler import FormatCompiler
from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.engines.torch.grammar_compiler import (
    CACHED_BYTES,
    CRASHED,
    GrammarCompiler,
    TrialProcess,
)
from dynamo_trtllm.engines.torch.trial_process import TrialResult, encode_request
from dynamo_trtllm.protocol.errors import (
    EngineNotReady,
    FormatTooComplex,
    InternalError,
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput, decode
from tests.kit.small_tokenizer import CONTROL, write_tokenizer

SIZE = 304
END = CONTROL["<|end|>"]
# A trial process in which formats with these regular expressions behave as said. "hang" writes the
# trial's process id.
PLANTED = """
import os, sys, threading
from pathlib import Path
from dynamo_trtllm.engines.torch import trial_process

def to_lark(self, guided, _original=trial_process.FormatCompiler.to_lark):
    word = guided.alternatives[0].regex
    if word == "abort":
        os.abort()
    if word == "bug":
        raise ValueError("a bug")
    if word == "memory":
        held = bytearray(2 * trial_process.MEMORY_BYTES)
    if word == "spin":
        while True:
            pass
    if word == "hang":
        Path(sys.argv[-1]).write_text(str(os.getpid()))
        threading.Event().wait()
    return _original(self, guided)

trial_process.FormatCompiler.to_lark = to_lark
trial_process.CPU_S = 1
trial_process.NICE = 0
trial_process.main(sys.argv[1:-1])
"""


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(alternatives=(OutputFormat(json_schema="", regex=text),))


def allowed(matcher: GrammarMatcher) -> set[str]:
    logits = torch.zeros(SIZE)
    matcher.apply_mask(logits)
    return {
        chr(token_id)
        for token_id in torch.isfinite(logits).nonzero().flatten().tolist()
        if token_id < 256
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def argv_of(program: str, tokenizer: Path) -> list[str]:
    return [
        sys.executable,
        "-c",
        program,
        str(tokenizer),
        str(SIZE),
        str(END),
        str(tokenizer.parent / "pid"),
    ]


@asynccontextmanager
async def running(
    tokenizer: Path, program: str = PLANTED
) -> AsyncIterator[tuple[GrammarCompiler, Path]]:
    pid_file = tokenizer.parent / "pid"
    pid_file.unlink(missing_ok=True)
    argv = argv_of(program, tokenizer)
    compiler = GrammarCompiler(tokenizer, vocab_size=SIZE, eos_token_ids=(END,), trial_argv=argv)
    try:
        yield compiler, pid_file
    finally:
        await compiler.aclose()


async def pid_in(file: Path) -> int:
    """Wait until a trial that hangs has written its process id."""
    return await asyncio.to_thread(_pid_in, file)


def _pid_in(file: Path) -> int:
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


async def wait_for_end(pid: int) -> None:
    async with asyncio.timeout(60):
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.01)


async def test_failed_trial_is_an_error_of_its_request_only(tokenizer: Path) -> None:
    async with running(tokenizer) as (compiler, _):
        await compiler.compile(regex("x"), (END,))
        process = compiler._trials._child
        for word, text in (
            ("abort", CRASHED),
            ("memory", "more than 256 MiB of memory"),
            ("spin", "more than 1 s"),
        ):
            with pytest.raises(FormatTooComplex, match=text) as caught:
                await compiler.compile(regex(word), (END,))
            assert caught.value.field == "guided"
        with pytest.raises(InternalError, match="ValueError: a bug"):
            await compiler.compile(regex("bug"), (END,))
        assert allowed(await compiler.compile(regex("x|y"), (END,))) == {"x", "y"}
        assert compiler._trials._child is process  # only the trials ended


async def test_format_that_no_output_follows_is_not_called_complex(tokenizer: Path) -> None:
    endless = OutputFormat(json_schema='{"$ref": "#"}')
    async with running(tokenizer) as (compiler, _):
        for wanted in (regex(r"[^\s\S]"), StructuredOutput(alternatives=(endless,))):
            with pytest.raises(RequestRejected, match="no complete output matches it"):
                await compiler.compile(wanted, (END,))


async def test_trial_is_not_delayed_by_a_hanging_one(tokenizer: Path) -> None:
    async with running(tokenizer) as (compiler, pid_file):
        clients = [asyncio.create_task(compiler.compile(regex("hang"), (END,))) for _ in range(2)]
        pid = await pid_in(pid_file)
        assert allowed(await compiler.compile(regex("x|y"), (END,))) == {"x", "y"}
        clients[0].cancel()
        await asyncio.wait(clients[:1])
        os.kill(pid, 0)  # the trial goes on, because another client waits for it
        clients[1].cancel()
        await wait_for_end(pid)


def test_trial_when_its_worker_dies_then_both_processes_end(tokenizer: Path) -> None:
    pid_file = tokenizer.parent / "pid"
    pid_file.unlink(missing_ok=True)
    control, theirs = socket.socketpair()  # the kernel closes them when a worker is killed
    trial, trial_end = socket.socketpair()
    with theirs, trial_end:
        process = subprocess.Popen(argv_of(PLANTED, tokenizer), stdin=theirs)
        socket.send_fds(control, [b"t"], [trial_end.fileno()])
    trial.sendall(encode_request(regex("hang")))
    pid = _pid_in(pid_file)
    control.close()
    trial.close()
    assert process.wait(60) == 0
    asyncio.run(wait_for_end(pid))


async def test_killed_trial_process_is_restarted(tokenizer: Path) -> None:
    async with running(tokenizer) as (compiler, _):
        await compiler.compile(regex("x"), (END,))
        child = compiler._trials._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.ended()
        assert allowed(await compiler.compile(regex("y"), (END,))) == {"y"}


async def test_trial_process_that_cannot_start_is_retryable(tokenizer: Path) -> None:
    async with running(tokenizer, program="raise SystemExit(1)") as (compiler, _):
        with pytest.raises(EngineNotReady, match="did not start"):
            await compiler.compile(regex("x"), (END,))


class InProcessTrials(TrialProcess):
    """Trials of regular expressions in this process. `texts` has those that were compiled."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(())
        self.texts: list[str] = []
        self._compiler = FormatCompiler(tokenizer, vocab_size=SIZE, eos_token_ids=(END,))

    async def run(self, request: bytes) -> TrialResult:
        guided = decode(request[4:], StructuredOutput)
        self.texts.append(guided.alternatives[0].regex)
        return TrialResult(formats=self._compiler.to_lark(guided), memory_bytes=CACHED_BYTES // 2)


@pytest.fixture
def cached(tokenizer: Path) -> tuple[GrammarCompiler, list[str]]:
    """A compiler whose cache has space for two formats, and what it compiled on trial."""
    compiler = GrammarCompiler(tokenizer, vocab_size=SIZE, eos_token_ids=(END,))
    compiler._trials = trials = InProcessTrials(tokenizer)
    return compiler, trials.texts


async def test_repeated_format_needs_no_trial(cached: tuple[GrammarCompiler, list[str]]) -> None:
    compiler, trials = cached
    first = await compiler.compile(regex("xy"), (END,))
    first.accept_token(ord("x"))
    assert allowed(await compiler.compile(regex("xy"), (END,))) == {"x"}
    assert allowed(first) == {"y"}
    for _ in range(2):
        with pytest.raises(RequestRejected, match="not supported"):
            await compiler.compile(regex("("), (END,))
    assert trials == ["xy", "("]


async def test_cache_over_its_memory_drops_least_recently_used(
    cached: tuple[GrammarCompiler, list[str]],
) -> None:
    compiler, trials = cached
    for text in ("a", "b", "a", "c", "a", "b"):
        await compiler.compile(regex(text), (END,))
    assert trials == ["a", "b", "c", "b"]


async def test_format_with_failed_matcher_is_compiled_again(
    cached: tuple[GrammarCompiler, list[str]],
) -> None:
    compiler, trials = cached
    matcher = await compiler.compile(regex("x"), (END,))
    matcher.accept_token(ord("y"))
    assert matcher.failure
    assert allowed(await compiler.compile(regex("x"), (END,))) == {"x"}
    assert trials == ["x", "x"]


async def test_simultaneous_requests_of_one_format_share_a_trial(
    cached: tuple[GrammarCompiler, list[str]],
) -> None:
    compiler, trials = cached
    await asyncio.gather(*(compiler.compile(regex("x"), (END,)) for _ in range(8)))
    assert trials == ["x"]


async def test_no_stop_token_then_rejected(tokenizer: Path) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=SIZE, eos_token_ids=(END,))
    with pytest.raises(RequestRejected, match="needs a stop token"):
        await compiler.compile(regex("x"), ())
