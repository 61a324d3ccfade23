"""A vLLM process whose worker was killed ends too, and takes the engine process with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# This process stands for the worker, its child for the engine process, its grandchild for a rank.
SCRIPT = """
import multiprocessing, os, sys, time
from dynamo_trtllm.engines.vllm.extension import WorkerExtension

def rank(worker, told):
    assert WorkerExtension().dynamo_bind_lifetime(worker)
    told.send(os.getpid())
    time.sleep(60)

def engine(worker, told):
    child = multiprocessing.get_context("fork").Process(target=rank, args=(worker, told))
    child.start()
    told.send(os.getpid())
    child.join()

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=engine, args=(os.getpid(), theirs)).start()
    print(ours.recv(), ours.recv(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_die_with_when_the_worker_is_killed_then_engine_process_and_rank_end() -> None:
    # The pipe of stdout is open in all three: it ends when the last of them has.
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=50, check=False
    )
    assert run.returncode == -9
    assert len(run.stdout.split()) == 2
