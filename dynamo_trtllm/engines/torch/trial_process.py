"""Compile output formats on trial, each in a forked process: `python -m … TOKENIZER SIZE EOS_ID…`.

llguidance compiles in the process that uses the result, because the result can't be sent to another
process. So each format is compiled twice: first here, with limits of time, memory and stack, and in
the worker only if that succeeds.

1. This process loads the tokenizer once. Its standard input is a socket on which the worker passes
   it one socket for each trial.
2. For each trial, it forks. So a trial begins within milliseconds, and a crash ends only this
   trial.
3. The trial reads a `StructuredOutput` from its socket, compiles it, and writes a `TrialResult`. It
   also ends when the worker closes the socket or dies.

This process ends when its standard input is closed.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from dynamo_trtllm.engines.torch.format_compiler import FormatCompiler, LarkFormat, Triggered
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    FormatTooComplex,
    InternalError,
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import StructuredOutput, decode, encode

# This is CPU time, so that a busy machine accepts the same formats as an idle one. The slowest
# format that real clients send within the limits of the API (512 strict tools with 400 kB of
# schemas) takes 0.5 s.
CPU_S: Final = 3
MEMORY_BYTES: Final = 256 << 20  # more than this process has; real formats take up to 40 MiB
STEPS: Final = 8  # tokens that are generated on trial
# The most CPU time that one of these tokens may take. In the worker, this time delays the tokens of
# all requests, because it is spent on the scheduler's thread. Real formats take at most 0.02 s.
# Tokens after these may take longer, until llguidance's own limits end the request: up to 2 s with
# the worst format that was found.
STEP_CPU_S: Final = 0.25
NICE: Final = 5  # so that trials yield to the engine and to the event loop
_FALLBACK_STACK: Final = 8 << 20  # bytes, if the system has no limit
_LENGTH: Final = struct.Struct("!I")  # the length of a request, before the request
STARTED: Final = b"s"  # the first byte from a trial; its result follows


class TrialResult(msgspec.Struct, frozen=True, array_like=True):
    """The end of a trial: the formats in Lark syntax, or an error."""

    formats: tuple[LarkFormat, ...] = ()
    memory_bytes: int = 0  # upper bound of the memory that the compiled formats take
    code: str = ""  # code of the error; "" without an error
    message: str = ""  # message of the error


def encode_request(guided: StructuredOutput) -> bytes:
    """Return the bytes that begin a trial."""
    data = encode(guided)
    return _LENGTH.pack(len(data)) + data


def main(argv: list[str]) -> int:
    """Load the tokenizer, and fork a process for each trial until standard input is closed."""
    tokenizer, size, *eos_token_ids = argv
    compiler = FormatCompiler(
        Path(tokenizer), vocab_size=int(size), eos_token_ids=tuple(map(int, eos_token_ids))
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the trials
    gc.collect()
    gc.freeze()  # collections in a trial would copy the pages that it shares with this process
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return 0
            with socket.socket(fileno=descriptors[0]) as trial:
                if _fork() == 0:
                    control.close()
                    _run(trial, compiler)


def _fork() -> int:
    """Fork this process. Return 0 in the new process, and its id in this process.

    Return -1 if the system lacks memory or process ids for a new process.
    """
    try:
        return os.fork()
    except OSError:  # the worker sees that the socket of the trial is closed
        return -1


def _run(trial: socket.socket, compiler: FormatCompiler) -> NoReturn:
    """Run one trial in the forked process.

    Another thread, with a small stack, compiles. This thread watches the worker.
    """
    trial.sendall(STARTED)
    _set_limits()
    signal.signal(signal.SIGXCPU, partial(_end_late, trial))
    (length,) = _LENGTH.unpack(_read(trial, _LENGTH.size))
    guided = decode(_read(trial, length), StructuredOutput)
    threading.stack_size(_stack_bytes())
    # The new thread inherits the blocked signal, so that this thread receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})
    threading.Thread(target=_compile, args=(trial, compiler, guided), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})
    trial.recv(1)  # returns when the worker has closed the socket
    os._exit(1)


def _set_limits() -> None:
    """Limit CPU time and memory of this process.

    When the system runs out of memory, it ends this process first.
    """
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        data_line = next(line for line in status.splitlines() if line.startswith("VmData:"))
        used_kib = int(data_line.split()[1])
        limit = (used_kib << 10) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # A crash of the library writes to stderr, which would go to the worker's log.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())


def _stack_bytes() -> int:
    """Return half of the stack size of the worker's threads, in bytes.

    A format that compiles with this stack does not overflow the larger stack in the worker.
    """
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _FALLBACK_STACK
    return stack_bytes // 2


def _read(trial: socket.socket, count: int) -> bytes:
    """Return `count` bytes from the worker.

    End this process if the worker has closed the socket.
    """
    data = b""
    while len(data) < count:
        received = trial.recv(count - len(data))
        if not received:
            os._exit(1)
        data += received
    return data


def _compile(trial: socket.socket, compiler: FormatCompiler, guided: StructuredOutput) -> NoReturn:
    """Compile the formats of a request, send the result, and end this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        formats = compiler.to_lark(guided)
        for triggered in compiler.compile(formats):
            _generate(triggered)
        memory_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        result = TrialResult(formats=formats, memory_bytes=memory_bytes)
    except DynamoError as exc:
        result = TrialResult(code=exc.code, message=exc.message)
    except MemoryError:
        text = (
            f"compiling the output format takes more than {MEMORY_BYTES >> 20} MiB of memory;"
            " simplify it"
        )
        result = TrialResult(code=FormatTooComplex.code, message=text)
    except Exception as exc:  # noqa: BLE001 - a bug; without a result, the request would wait for its time limit
        text = f"compiling the output format failed: {type(exc).__name__}: {exc}"
        result = TrialResult(code=InternalError.code, message=text)
    trial.sendall(encode(result))
    os._exit(0)


def _generate(triggered: Triggered) -> None:
    """Generate some tokens in a format: alternately the first and the last of the allowed tokens.

    Raises:
        FormatTooComplex: a token takes too long, or exceeds a limit of llguidance.
        RequestRejected: no complete output matches the format.
    """
    matcher = triggered.matcher
    for step in range(STEPS):
        if matcher.is_stopped():
            break
        began = time.thread_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")  # one bit per token id
        if allowed == 0:
            break
        if step % 2 == 1:
            token_id = allowed.bit_length() - 1  # the highest bit
        else:
            token_id = (allowed & -allowed).bit_length() - 1  # the lowest bit
        matcher.consume_token(token_id)
        if time.thread_time() - began > STEP_CPU_S:
            raise FormatTooComplex(
                f"a token of the output format takes more than {STEP_CPU_S} s; simplify it"
            )
    if matcher.is_error():
        message, _, _ = matcher.get_error().partition("<state>")
        reason = " ".join(message.split())
        # llguidance's names for "no token can follow"
        if reason in ("NoExtension", "NoExtensionBias"):
            raise RequestRejected(
                "the output format is not supported: no complete output matches it; check it for"
                " endless recursion, and which characters it allows",
                field="guided",
            )
        raise FormatTooComplex(f"the output format is too complex: {reason}; simplify it")


def _end_late(trial: socket.socket, *_: object) -> NoReturn:
    """Report that the CPU time is used up, and end this process. Handles SIGXCPU."""
    text = f"compiling the output format takes more than {CPU_S} s; simplify it"
    trial.sendall(encode(TrialResult(code=FormatTooComplex.code, message=text)))
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RequestRejected as exc:
        sys.exit(exc.message)
