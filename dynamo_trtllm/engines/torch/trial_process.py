"""Compile output formats on trial, each in a process of its own that may crash: `python -m … TOKENIZER SIZE EOS_ID…`.

llguidance compiles within the process that uses the result, which can't be sent to another one. So a format is compiled
twice: first here, under limits of time, memory and stack, and only if that succeeds, in the worker.

This process loads the tokenizer once. It forks for each trial, so that a trial begins within milliseconds, and its end
costs nothing but itself. It receives one socket per trial on its standard input, and ends when that is closed. The
trial reads a `StructuredOutput` from its socket and writes a `TrialResult`. When the worker closes the socket, or dies,
the trial ends.
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
from dynamo_trtllm.errors import DynamoError, FormatTooComplex, RequestRejected
from dynamo_trtllm.messages import StructuredOutput, decode, encode

# CPU time, so that a busy machine rejects no format that an idle one accepts. Of the formats within the limits of the
# API, the slowest that real clients send (512 strict tools with 400 kB of schemas) takes 0.5 s.
CPU_S: Final = 3
MEMORY_BYTES: Final = 256 << 20  # beyond that of this process; real formats take up to 40 MiB
STEPS: Final = 8  # tokens that are generated on trial
# A step of a matcher delays the tokens of all requests, because it runs on the scheduler's thread. Real formats take
# 0.02 s at most. Later steps of the same format may take longer, until llguidance's own limits end the request: 2 s for
# the worst format that was found.
STEP_CPU_S: Final = 0.25
NICE: Final = 5  # trials yield to the engine and to the event loop
_FALLBACK_STACK: Final = 8 << 20
_LENGTH: Final = struct.Struct("!I")
STARTED: Final = b"s"  # the first byte from a trial; its result follows


class TrialResult(msgspec.Struct, frozen=True, array_like=True):
    """The end of a trial: the formats in Lark syntax, or an error."""

    formats: tuple[LarkFormat, ...] = ()
    memory_bytes: int = 0  # that the compiled formats take at most
    code: str = ""  # of the error
    message: str = ""


def encode_request(guided: StructuredOutput) -> bytes:
    """Return the bytes that begin a trial."""
    data = encode(guided)
    return _LENGTH.pack(len(data)) + data


def main(argv: list[str]) -> int:
    """Load the tokenizer, and fork a process for each trial until standard input is closed."""
    tokenizer, size, *eos_token_ids = argv
    compiler = FormatCompiler(Path(tokenizer), vocab_size=int(size), eos_token_ids=tuple(map(int, eos_token_ids)))
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
    try:
        return os.fork()
    except OSError:  # no memory or no process id: the worker sees that the trial's socket is closed
        return -1


def _run(trial: socket.socket, compiler: FormatCompiler) -> NoReturn:
    """Run one trial in a process of its own. A thread with a small stack compiles; this one waits for the worker."""
    trial.sendall(STARTED)
    _set_limits()
    signal.signal(signal.SIGXCPU, partial(_end_late, trial))
    (length,) = _LENGTH.unpack(_read(trial, _LENGTH.size))
    guided = decode(_read(trial, length), StructuredOutput)
    threading.stack_size(_stack_bytes())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})  # in the new thread: this one is to receive it
    threading.Thread(target=_compile, args=(trial, compiler, guided), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGXCPU})
    trial.recv(1)  # returns when the worker has closed the socket
    os._exit(1)


def _set_limits() -> None:
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, ((used_kib << 10) + MEMORY_BYTES,) * 2)
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())  # a crash of the library writes its text there


def _stack_bytes() -> int:
    """Return half of the stack that the worker's threads have. So what passes here does not overflow theirs."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return (_FALLBACK_STACK if stack == resource.RLIM_INFINITY else stack) // 2


def _read(trial: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = trial.recv(count - len(data))
        if not received:
            os._exit(1)
        data += received
    return data


def _compile(trial: socket.socket, compiler: FormatCompiler, guided: StructuredOutput) -> NoReturn:
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
        text = f"compiling the output format takes more than {MEMORY_BYTES >> 20} MiB of memory; simplify it"
        result = TrialResult(code=FormatTooComplex.code, message=text)
    trial.sendall(encode(result))
    os._exit(0)


def _generate(triggered: Triggered) -> None:
    """Generate some tokens, the first and the last allowed one in turn.

    Raises:
        FormatTooComplex: A step takes too long, or exceeds a limit of llguidance.
    """
    matcher = triggered.matcher
    for step in range(STEPS):
        if matcher.is_stopped():
            break
        began = time.thread_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if not allowed:
            break
        first, last = (allowed & -allowed).bit_length() - 1, allowed.bit_length() - 1
        matcher.consume_token(last if step % 2 else first)
        if time.thread_time() - began > STEP_CPU_S:
            raise FormatTooComplex(f"a token of the output format takes more than {STEP_CPU_S} s; simplify it")
    if matcher.is_error():
        reason = " ".join(matcher.get_error().partition("<state>")[0].split())
        raise FormatTooComplex(f"the output format is too complex: {reason}; simplify it")


def _end_late(trial: socket.socket, *_: object) -> NoReturn:
    text = f"compiling the output format takes more than {CPU_S} s; simplify it"
    trial.sendall(encode(TrialResult(code=FormatTooComplex.code, message=text)))
    os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RequestRejected as exc:
        sys.exit(exc.message)
