"""Starts child processes that can't outlive this one, even when it is killed with SIGKILL. Knows no services."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from dynamo_trtllm.errors import ConfigError

# Run by a short-lived interpreter that then becomes the child: no Python code runs between fork and exec, so spawning
# is safe in a process with threads. The parent may die before prctl is reached: hence the look at getppid.
_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

Output = int | IO[bytes] | None


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: Output = None,
    stderr: Output = None,
) -> subprocess.Popen[bytes]:
    """Starts `argv` in a process group of its own (a Ctrl-C reaches this process only, which stops it in order).

    On Linux the child gets SIGKILL when the *thread* that called spawn ends (that is how PR_SET_PDEATHSIG counts), so
    call it from the main thread, or from one that lives as long as the process. On other systems a child may outlive
    its parent. Grandchildren always may. Raises ConfigError when the program is not there.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"program {argv[0]!r} is not installed or not executable")
    command = [os.path.abspath(program), *argv[1:]]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
    )
