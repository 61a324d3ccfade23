"""Run a module, and record which functions of the package it executes between two SIGUSR2, each
time anew, in the order of their first calls.

Usage: `recorded_process.py OUT MODULE ARGUMENTS`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import dynamo_trtllm

PACKAGE = str(Path(dynamo_trtllm.__file__).parent) + os.sep
# As file, name and line of the definition.
_functions: dict[tuple[str, str, int], None] = {}


def _profile(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(PACKAGE):
        _functions[
            code.co_filename.removeprefix(PACKAGE), code.co_qualname, code.co_firstlineno
        ] = None


def _toggle(*_: Any) -> None:
    if sys.getprofile() is None:
        _functions.clear()
        sys.setprofile(_profile)
        return
    sys.setprofile(None)
    # `runpy` sets argv[0] to the module, which several processes share
    partial = Path(f"{_out}.partial")
    partial.write_text(json.dumps(list(_functions)))
    partial.rename(_out)


if __name__ == "__main__":
    _out, module = sys.argv[1:3]
    sys.argv = [_out, *sys.argv[3:]]
    signal.signal(signal.SIGUSR2, _toggle)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
