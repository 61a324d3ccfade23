"""In vLLM's engine process: it ends with its worker, and measures steps."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from dynamo_trtllm.engines.chunk_size import ChunkSize
from dynamo_trtllm.engines.vllm import steps
from dynamo_trtllm.protocol.cost_model import StepSample

# This process stands for the worker, its child for the engine process, its grandchild for a rank.
SCRIPT = """
import multiprocessing, os, sys, time
from dynamo_trtllm.engines.vllm.extension import WorkerExtension

def rank(worker, reports):
    assert WorkerExtension().dynamo_bind_lifetime(worker)
    reports.send(os.getpid())
    time.sleep(60)

def engine(worker, reports):
    child = multiprocessing.get_context("fork").Process(target=rank, args=(worker, reports))
    child.start()
    reports.send(os.getpid())
    child.join()

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=engine, args=(os.getpid(), theirs)).start()
    print(ours.recv(), ours.recv(), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_die_with_killed_worker_ends_engine_and_rank() -> None:
    # The pipe of stdout is open in all three: it ends when the last of them has.
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == -9
    assert len(run.stdout.split()) == 2


class PlannedScheduler:
    """Has the steps of vLLM's scheduler that are planned for it: tokens by request."""

    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}
        self.finished: set[str] = set()

    def schedule(self, **counts: int) -> SimpleNamespace:
        for name, count in counts.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[],
            finished_req_ids=self.finished,
            preempted_req_ids=None,
        )

    def update_from_output(self, output: object, results: object) -> SimpleNamespace:
        return self.make_stats()

    def make_stats(self) -> SimpleNamespace:
        return SimpleNamespace(kv_connector_stats={"nixl": 1})


def planned(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], **prompts: int
) -> PlannedScheduler:
    """Return a measured scheduler with requests of so many prompt tokens, and set what the clock
    shows.
    """
    steps.measure_steps(PlannedScheduler)
    scheduler = PlannedScheduler()
    times = iter(clock)
    monkeypatch.setattr(steps.time, "monotonic", lambda: next(times))
    for name, prompt in prompts.items():
        scheduler.requests[name] = SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=0)
    return scheduler


def test_steps_report_computed_work_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps.measure_steps(PlannedScheduler)
    scheduler = planned(
        monkeypatch, [1.0, 2.0, 2.5, 3.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], a=100, b=30
    )
    # the second while the first one runs
    first = scheduler.schedule(a=60)
    second = scheduler.schedule(a=40, b=30)
    seen = [steps.step_of(scheduler.update_from_output(output, None)) for output in (first, second)]
    seen += [
        steps.step_of(scheduler.update_from_output(scheduler.schedule(a=1, b=1), None))
        for _ in range(2)
    ]
    assert seen == [
        StepSample(1.5, 0, 0, 60, 1800.0),
        StepSample(0.5, 0, 0, 70, 40 * 80 + 450.0),
        StepSample(1.0, 2, 130, 0, 0.0),
        StepSample(1.0, 2, 132, 0, 0.0),
    ]
    assert scheduler.update_from_output(scheduler.schedule(), None).kv_connector_stats == {
        "nixl": 1
    }


def test_gap_of_streams_counts_the_launch_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of two chunks beside a stream, each step launched before the last output is taken.

    Its first chunk takes long to launch, so the stream waits for it before the chunk is computed.
    """
    clock = [0.0]
    scheduler = planned(monkeypatch, [], a=1, b=700)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])

    def schedule(at_s: float, planned_tokens: int, **counts: int) -> SimpleNamespace:
        clock[0] = at_s
        scheduler.dynamo_planned_tokens = planned_tokens
        return scheduler.schedule(**counts)

    def gap(at_s: float, output: SimpleNamespace) -> steps.OutputGap | None:
        clock[0] = at_s
        scheduler.dynamo_output_gap = None
        scheduler.update_from_output(output, None)
        return scheduler.dynamo_output_gap

    alone = schedule(10.0, 0, a=1)
    decode = schedule(10.1, 0, a=1)
    assert gap(11.0, alone) is None  # no prompt
    first = schedule(11.1, 500, a=1, b=500)
    assert gap(15.0, decode) == steps.OutputGap(4.0, 500)
    second = schedule(15.1, 500, a=1, b=199)
    # Streams waited for its launch.
    assert gap(15.5, first) == steps.OutputGap(0.5, 500, full_tokens=500, full_s=4.0)
    after = schedule(15.6, 0, a=1, b=1)
    assert gap(16.5, second) == steps.OutputGap(1.0, 500)
    assert gap(17.0, after) is None


def test_gap_of_full_steps_says_that_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    scheduler = planned(monkeypatch, [], a=1, b=10_000)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    scheduler.schedule(a=1)
    scheduler.dynamo_planned_tokens = 500
    clock[0] = 100.0  # after a pause, for which no stream waited
    full = [scheduler.schedule(a=1, b=500) for _ in range(2)]
    clock[0] = 101.0
    scheduler.update_from_output(full[0], None)
    assert scheduler.dynamo_output_gap == steps.OutputGap(1.0, 500, 500, 1.0)
    # Each step ends before the next one is planned.
    scheduler.update_from_output(full[1], None)
    alone = scheduler.schedule(a=1, b=500)
    clock[0] = 103.0
    scheduler.update_from_output(alone, None)
    assert scheduler.dynamo_output_gap == steps.OutputGap(2.0, 500, 500, 2.0)


def test_larger_step_is_not_taken_for_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was just lowered: the time in which the smaller step is launched says nothing about
    the larger one, which has ended.
    """
    clock = [10.0]
    scheduler = planned(monkeypatch, [], a=1, b=10_000)
    monkeypatch.setattr(steps.time, "monotonic", lambda: clock[0])
    found = []
    chunk = ChunkSize(8192)
    launched = [(scheduler.schedule(a=1), 0)]
    for launch_s in (0.1, 0.03, 0.03, 0.03):
        planned_tokens = chunk.tokens
        scheduler.dynamo_planned_tokens = planned_tokens
        launched.append((scheduler.schedule(a=1, b=planned_tokens), planned_tokens))
        clock[0] += launch_s
        ended, _ = launched.pop(0)
        scheduler.update_from_output(ended, None)
        gap = scheduler.dynamo_output_gap
        chunk.measured(gap.seconds, gap.planned_tokens, is_full=False)
        if gap.full_tokens:
            chunk.measured(gap.full_s, gap.full_tokens, is_full=True)
        found.append(planned_tokens)
    assert found == [512, 256, 256, 282]


def test_gap_without_streams_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = planned(monkeypatch, [1.0, 5.0], b=10_000)
    scheduler.dynamo_planned_tokens = 500
    scheduler.update_from_output(scheduler.schedule(b=500), None)
    assert scheduler.dynamo_output_gap is None


class ResultsOfStep:
    """Has the results of a step, which are there at once or after a wait."""

    def __init__(self, *, is_there: bool) -> None:
        self.async_output = SimpleNamespace(
            async_copy_ready_event=SimpleNamespace(query=lambda: is_there)
        )

    def result(self, timeout: float | None = None) -> SimpleNamespace:
        return SimpleNamespace()


def test_steps_measure_time_of_long_prompt_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps take 1 s.

    The launch of the prompts takes 4 s, and the end of the step before is seen after it.
    """
    steps.note_late_results(ResultsOfStep)
    scheduler = planned(monkeypatch, [0.0, 1.0, 1.0, 1.1, 5.1, 5.2, 6.5, 7.5], a=1, b=50)

    def seen(output: SimpleNamespace, *, is_there: bool) -> StepSample | None:
        return steps.step_of(
            scheduler.update_from_output(output, ResultsOfStep(is_there=is_there).result())
        )

    assert seen(scheduler.schedule(a=1), is_there=False) == StepSample(1.0, 1, 0, 0, 0.0)
    decode = scheduler.schedule(a=1)
    prompt = scheduler.schedule(a=1, b=50)
    assert seen(decode, is_there=True) is None
    after = scheduler.schedule(a=1, b=1)
    assert seen(prompt, is_there=True) == StepSample(4.5, 1, 2, 50, 1250.0)  # from 2.0
    assert seen(after, is_there=False) == StepSample(1.0, 2, 53, 0, 0.0)
