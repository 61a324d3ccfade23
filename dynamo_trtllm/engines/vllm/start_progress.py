"""Tell the worker how far the start of vLLM's engine process is, through a file that both know.

vLLM reports nothing until its engine is ready, which takes minutes. Its worker processes write the
current phase into the file, and the worker reads it for its status line.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.engines.external.engine import LOADING_WEIGHTS

FILE = "DYNAMO_VLLM_START_FILE"  # environment variable with the file's path, for vLLM's processes
IMPORTING = "importing vLLM"
COMPILING = "running the model once: compiling"
WAITING = "waiting for another engine, which compiles the same code"
SAMPLING = (
    "running the sampler once: FlashInfer compiles it for minutes on the first start with this type"
    " of GPU"
)
CAPTURING = "capturing CUDA graphs"


class StartProgress:
    """The file of one start, in a private folder. `environment` names it to vLLM's processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynamo-start-")
        self._file = Path(self._folder.name) / "phase"

    @property
    def environment(self) -> dict[str, str]:
        """The variables for vLLM's processes."""
        return {FILE: str(self._file)}

    def phase(self) -> str:
        """Return the phase that vLLM's process wrote last.

        Until the process has written a phase, it imports vLLM.
        """
        try:
            return self._file.read_text(encoding="utf-8")
        except OSError:
            return IMPORTING

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._folder.cleanup()


def note(phase: str) -> None:
    """Write the phase, in one of vLLM's processes. Does nothing if no worker reads it."""
    path = process_environment().get(FILE)
    if path is None:
        return
    try:
        new = Path(f"{path}.{os.getpid()}")
        new.write_text(phase, encoding="utf-8")
        new.replace(path)  # a reader sees the old phase or the new one
    except OSError:
        pass  # the folder is gone: the start was given up, or has ended


# Method of vLLM's worker or model runner -> the phase that begins with it.
_WORKER_METHODS = {"load_model": LOADING_WEIGHTS, "compile_or_warm_up_model": CAPTURING}


def note_phases(worker_class: Any, runner_class: Any = None) -> None:
    """Make a class of vLLM's workers note its phases.

    If a release lacks one of the methods, only the phase of this method is not noted.

    Args:
        worker_class: vLLM's class of workers.
        runner_class: class of its model runner, if FlashInfer's sampler is on.
    """
    for name, phase in _WORKER_METHODS.items():
        _note_during(worker_class, name, phase)
    if runner_class is not None:
        _note_during(runner_class, "_dummy_sampler_run", SAMPLING, after=COMPILING)


def _note_during(owner: Any, name: str, phase: str, after: str | None = None) -> None:
    """Make a method note `phase` when it begins, and `after`, unless it is None, when it has ended.

    Only the first rank notes phases.
    """
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **keywords: Any) -> Any:
        is_first = getattr(self, "rank", 0) == 0
        if is_first:
            note(phase)
        result = method(self, *args, **keywords)
        if is_first and after is not None:
            note(after)
        return result

    setattr(owner, name, noted)


def runner_of_flashinfer() -> Any:
    """Return the class of the loaded model runner, if FlashInfer's sampler is on; else None."""
    if process_environment().get("VLLM_USE_FLASHINFER_SAMPLER") == "0":
        return None
    for module in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"):
        if module in sys.modules:
            return getattr(sys.modules[module], "GPUModelRunner", None)
    return None
