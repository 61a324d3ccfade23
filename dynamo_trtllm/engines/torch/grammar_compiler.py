"""Compile the output formats of requests: first on trial in a process that may crash, then in the
worker.

The results are cached. `trial_process.py` has the limits of a trial.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dynamo_trtllm.engines.torch.format_compiler import FormatCompiler, Triggered
from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.engines.torch.trial_process import STARTED, TrialResult, encode_request
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    EngineNotReady,
    FormatTooComplex,
    Overloaded,
    RequestRejected,
    from_code,
)
from dynamo_trtllm.protocol.messages import StructuredOutput, decode
from dynamo_trtllm.support.subprocesses import Child, module_command, spawn

log = logging.getLogger(__name__)

# The most trials that run at once. Trials share the CPU, so formats that take seconds hardly delay
# a format that takes 50 ms.
MAX_TRIALS: Final = 16
# The trial itself limits its CPU time. This limits the wait for a trial that gets no CPU time.
TRIAL_TIMEOUT_S: Final = 60.0
CACHED_FORMATS: Final = 256
# The most memory of the compiled formats in the cache, as measured in their trials.
CACHED_BYTES: Final = 256 << 20
_STOP_TIMEOUT_S: Final = 1.0  # the trial process normally ends at once
CRASHED: Final = (
    "compiling the output format ended the process that compiles it: it takes too much time, memory"
    " or stack; simplify it"
)


class CompiledFormat:
    """The compiled format of a request. Each request gets a copy, which takes microseconds.

    The copies share the states that their matchers compute, and also the limit of the number of
    states. Once this limit is exceeded, all copies fail. So after one copy has failed, `is_usable`
    is False, and the next request compiles the format again.
    """

    def __init__(self, parts: tuple[Triggered, ...], memory_bytes: int) -> None:
        self.parts = parts
        self.memory_bytes = memory_bytes
        self.is_usable = True

    def copy(self) -> list[Triggered]:
        """Return a copy with the state before the first token."""
        return [part._replace(matcher=part.matcher.deep_copy()) for part in self.parts]

    def on_failure(self) -> None:
        """Note that a copy has failed. Safe on any thread."""
        self.is_usable = False


class TrialProcess:
    """The process in which formats are compiled on trial.

    The process starts with the first trial. If it has ended, it starts again with the next trial.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._child: Child | None = None
        self._control: socket.socket | None = None
        self._slots = asyncio.Semaphore(MAX_TRIALS)

    async def run(self, request: bytes) -> TrialResult:
        """Compile a format on trial. If this coroutine is cancelled, the trial ends.

        Raises:
            FormatTooComplex: the trial crashed.
            EngineNotReady: the process can't start.
            Overloaded: the trial did not get enough CPU time.
        """
        loop = asyncio.get_running_loop()
        async with self._slots:
            ours, theirs = socket.socketpair()
            with ours:
                ours.setblocking(False)
                try:
                    with theirs:
                        self._begin(theirs)
                    async with asyncio.timeout(TRIAL_TIMEOUT_S):
                        await loop.sock_sendall(ours, request)
                        data = await _read_all(loop, ours)
                except TimeoutError:
                    text = (
                        f"the output format was not compiled within {TRIAL_TIMEOUT_S:g} s, because"
                        " the CPU is busy"
                    )
                    raise Overloaded(f"{text}; try again later", field="guided") from None
                except ConnectionError:  # the process has ended
                    data = b""
        if not data.startswith(STARTED):
            raise EngineNotReady(
                "the process that compiles output formats did not start; see the worker's log"
            )
        try:
            return decode(data.removeprefix(STARTED), TrialResult)
        except BadFrame:
            raise FormatTooComplex(CRASHED, field="guided") from None

    def _begin(self, trial: socket.socket) -> None:
        """Pass the socket of a trial to the process."""
        if self._control is not None:
            try:
                socket.send_fds(self._control, [b"t"], [trial.fileno()])
            except ConnectionError:
                log.warning("the process that compiles output formats has ended; starting it again")
                self._control.close()
            else:
                return
        self._control, theirs = socket.socketpair()
        with theirs:
            # The thread of the event loop lives as long as the worker, as `spawn` demands.
            self._child = Child(spawn(self._argv, stdin=theirs.fileno()), _STOP_TIMEOUT_S)
        socket.send_fds(self._control, [b"t"], [trial.fileno()])

    async def aclose(self) -> None:
        """End the process, and with it all trials."""
        if self._control is not None:
            self._control.close()
        if self._child is not None:
            self._child.kill()
            await self._child.ended()


async def _read_all(loop: asyncio.AbstractEventLoop, source: socket.socket) -> bytes:
    parts = []
    while part := await loop.sock_recv(source, 1 << 16):
        parts.append(part)
    return b"".join(parts)


class _Compilation:
    """The compilation of one format, for all requests that wait for it.

    The compilation is cancelled when the last of these requests is cancelled.
    """

    def __init__(self, task: asyncio.Task[CompiledFormat]) -> None:
        self.task = task
        self.num_waiting = 0

    async def result(self) -> CompiledFormat:
        self.num_waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.num_waiting -= 1
            if not self.num_waiting:
                self.task.cancel()


class GrammarCompiler:
    """The compiler of one model's output formats. Use it on one event loop.

    Args:
        tokenizer: the model's tokenizer.json. It is read by `load`, or at the first request.
        vocab_size: number of token ids.
        eos_token_ids: tokens that end the model's output, the main one first.
        trial_argv: program and arguments of the trial process; by default, `trial_process.py` is
            run.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        trial_argv: Sequence[str] | None = None,
    ) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        if trial_argv is None:
            program = module_command("dynamo_trtllm.engines.torch.trial_process")
            numbers = [str(number) for number in (vocab_size, *eos_token_ids)]
            trial_argv = [*program, str(tokenizer), *numbers]
        self._trials = TrialProcess(trial_argv)
        self._loading = asyncio.Lock()
        self._compiler: FormatCompiler | None = None
        self._running: dict[bytes, _Compilation] = {}
        # The results by format. The most recently used result is the last. The result of a format
        # that can't be compiled is its error.
        self._cache: OrderedDict[bytes, CompiledFormat | RequestRejected] = OrderedDict()

    async def compile(self, guided: StructuredOutput, stop_ids: tuple[int, ...]) -> GrammarMatcher:
        """Return the matcher of a request.

        If this coroutine is cancelled, the compilation ends, unless another request waits for it.

        Raises:
            RequestRejected: the format can't be compiled, or the request has no stop token.
            Overloaded: the CPU is too busy.
        """
        if not stop_ids:
            raise RequestRejected(
                "guided decoding needs a stop token, and this request has none; set ignore_eos to"
                " false",
                field="ignore_eos",
            )
        key = encode_request(guided)
        compiled = self._cached(key)
        if compiled is None:
            compiled = await self._compilation(key, guided).result()
        # This runs on a thread, because it waits while another copy computes a step with the
        # states that the copies share.
        parts = await asyncio.to_thread(compiled.copy)
        return GrammarMatcher(
            parts, stop_ids, guided.unfinished_ids, self._vocab_size, on_failure=compiled.on_failure
        )

    def _cached(self, key: bytes) -> CompiledFormat | None:
        found = self._cache.get(key)
        if isinstance(found, RequestRejected):
            self._cache.move_to_end(key)
            raise type(found)(found.message, field=found.field)
        if found is None:
            return None
        if not found.is_usable:
            del self._cache[key]
            return None
        self._cache.move_to_end(key)
        return found

    def _compilation(self, key: bytes, guided: StructuredOutput) -> _Compilation:
        running = self._running.get(key)
        if running is None or running.task.cancelling():
            task = asyncio.get_running_loop().create_task(self._compile(key), name="compile-format")
            running = _Compilation(task)
            self._running[key] = running
            task.add_done_callback(lambda _: self._forget(key, running))
        return running

    def _forget(self, key: bytes, ended: _Compilation) -> None:
        if self._running.get(key) is ended:
            del self._running[key]

    async def _compile(self, key: bytes) -> CompiledFormat:
        compiler = await self.load()
        result = await self._trials.run(key)
        try:
            if result.code:
                raise from_code(result.code, result.message, field="guided")
            parts = await asyncio.to_thread(compiler.compile, result.formats)
        except RequestRejected as exc:
            self._store(key, exc)
            raise
        compiled = CompiledFormat(parts, result.memory_bytes)
        self._store(key, compiled)
        return compiled

    async def load(self) -> FormatCompiler:
        """Read the tokenizer at the first call, and return the compiler of this process.

        While llguidance reads the tokenizer, it holds Python's lock: for 1.5 s of CPU time with
        200,000 tokens. All running requests wait meanwhile.

        Raises:
            RequestRejected: the tokenizer can't be read.
        """
        async with self._loading:
            if self._compiler is None:
                began = time.monotonic()
                self._compiler = await asyncio.to_thread(
                    FormatCompiler,
                    self._path,
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                )
                log.info(
                    "loaded the tokenizer for guided decoding in %.1f s", time.monotonic() - began
                )
            return self._compiler

    def _store(self, key: bytes, result: CompiledFormat | RequestRejected) -> None:
        """Add a result to the cache.

        If the cache is full, the least recently used results are removed.
        """
        if isinstance(result, RequestRejected):
            # Store it without the traceback, which holds memory.
            result = type(result)(result.message, field=result.field)
        self._cache[key] = result
        self._cache.move_to_end(key)
        used_bytes = sum(_memory_bytes(cached) for cached in self._cache.values())
        while len(self._cache) > CACHED_FORMATS or used_bytes > CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            used_bytes -= _memory_bytes(oldest)

    async def aclose(self) -> None:
        """End the trial process, and with it all trials."""
        await self._trials.aclose()


def _memory_bytes(result: CompiledFormat | RequestRejected) -> int:
    return result.memory_bytes if isinstance(result, CompiledFormat) else 0
