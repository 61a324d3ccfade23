"""The start of vLLM's engine process: who waits for whose compilation, and which phase the worker
shows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.engines.vllm import compile_lock, start_progress
from dynamo_trtllm.engines.vllm.compile_lock import CompileLock, lock_first_pass
from dynamo_trtllm.engines.vllm.start_progress import StartProgress
from tests.kit.waiting import SOON_S

PARALLEL = SimpleNamespace(data_parallel_size=1)


def worker_class(begins: threading.Event, goes_on: threading.Event, *, fails: bool = False) -> type:
    """Return a class of workers whose first pass of the model waits, and whose later parts do
    not.
    """

    class Worker:
        rank = 0
        vllm_config = SimpleNamespace(parallel_config=PARALLEL)

        def load_model(self) -> None: ...

        def determine_available_memory(self) -> int:
            begins.set()
            assert goes_on.wait(SOON_S)
            if fails:
                raise RuntimeError("killed")
            return 7

        def compile_or_warm_up_model(self) -> None: ...

    return Worker


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock's folder, which all workers of the test share."""
    monkeypatch.setattr(compile_lock, "_acquired", lambda _: acquired(tmp_path))
    return tmp_path


def acquired(folder: Path) -> CompileLock:
    lock = CompileLock(folder, "key")
    lock.acquire()
    return lock


def passed(*events: threading.Event) -> Any:
    for event in events:
        event.set()
    return events[0]


def test_first_pass_over_makes_no_engine_wait(folder: Path) -> None:
    """The first engine captures graphs and warms up for minutes, without the lock."""
    worker = worker_class(passed(threading.Event()), passed(threading.Event()))
    lock_first_pass(worker)
    assert worker().determine_available_memory() == 7
    other = CompileLock(folder, "key")
    assert not other.acquire(longest_s=0.0), "the code is there: the lock is not taken"
    assert not other._lock.is_locked


def test_first_pass_waits_for_a_compiling_engine(folder: Path) -> None:
    begins = threading.Event()
    goes_on = threading.Event()
    first = worker_class(begins, goes_on)
    second = worker_class(threading.Event(), passed(threading.Event()))
    done: list[int] = []

    def measure(worker: Any) -> None:
        done.append(worker().determine_available_memory())

    for worker in (first, second):
        lock_first_pass(worker)
    threads = [threading.Thread(target=partial(measure, worker)) for worker in (first, second)]
    threads[0].start()
    assert begins.wait(SOON_S)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    goes_on.set()
    for thread in threads:
        thread.join(SOON_S)
    assert done == [7, 7]


def test_first_pass_releases_others_once_code_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorators = ModuleType("vllm.compilation.decorators")
    decorators.monitor_torch_compile = contextlib.nullcontext  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, decorators.__name__, decorators)
    seen: list[bool] = []

    class Worker:
        rank = 0
        vllm_config = SimpleNamespace(parallel_config=PARALLEL)

        def determine_available_memory(self) -> int:
            seen.append(CompileLock(folder, "key")._compiled.exists())
            with decorators.monitor_torch_compile():  # type: ignore[attr-defined]
                pass
            seen.append(CompileLock(folder, "key")._compiled.exists())
            return 7

    lock_first_pass(Worker)
    assert Worker().determine_available_memory() == 7
    assert seen == [False, True]
    assert decorators.monitor_torch_compile is contextlib.nullcontext  # type: ignore[attr-defined]


def test_first_pass_after_failed_start_compiles(folder: Path) -> None:
    failing = worker_class(threading.Event(), passed(threading.Event()), fails=True)
    lock_first_pass(failing)
    with pytest.raises(RuntimeError, match="killed"):
        failing().determine_available_memory()
    after = CompileLock(folder, "key")
    assert after.acquire(longest_s=0.0), "nothing was compiled: the next engine does"
    after.release(is_compiled=True)
    assert not CompileLock(folder, "key").acquire(longest_s=0.0)


def test_phase_follows_the_process_of_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    progress = StartProgress()
    for name, value in progress.environment.items():
        monkeypatch.setenv(name, value)
    seen = [progress.phase()]
    worker = worker_class(passed(threading.Event()), passed(threading.Event()))
    start_progress.note_phases(worker)
    lock_first_pass(worker)
    for method in ("load_model", "determine_available_memory", "compile_or_warm_up_model"):
        getattr(worker(), method)()
        seen.append(progress.phase())
    assert seen == [
        "importing vLLM",
        "loading weights",
        start_progress.COMPILING,
        "capturing CUDA graphs",
    ]
    progress.close()
    worker().load_model()  # no worker reads it any more
    assert not Path(progress.environment[start_progress.FILE]).parent.exists()


@pytest.mark.parametrize(("value", "is_shown"), [("0", False), ("1", True), (None, True)])
def test_phase_shows_compilation_of_flashinfer_sampler(
    monkeypatch: pytest.MonkeyPatch, value: str | None, is_shown: bool
) -> None:
    runner = ModuleType("vllm.v1.worker.gpu_model_runner")
    seen: list[str] = []
    methods = {"_dummy_sampler_run": lambda _: seen.append(progress.phase())}
    runner.GPUModelRunner = type("GPUModelRunner", (), methods)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, runner.__name__, runner)
    if value is None:
        monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", value)
    progress = StartProgress()
    for name, path in progress.environment.items():
        monkeypatch.setenv(name, path)
    start_progress.note_phases(type("Worker", (), {}), start_progress.runner_of_flashinfer())
    runner.GPUModelRunner()._dummy_sampler_run()  # type: ignore[attr-defined]
    assert (seen == [start_progress.SAMPLING]) is is_shown
    assert progress.phase() == (start_progress.COMPILING if is_shown else start_progress.IMPORTING)
    progress.close()
