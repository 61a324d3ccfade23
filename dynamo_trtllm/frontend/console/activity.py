"""Count what the requests of this process do, for the console.

A request costs a few microseconds at its end, and a token nothing: a sample looks at the running
streams once a second, and only while a console is open.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from dynamo_trtllm.frontend.requests.choice import Choice
from dynamo_trtllm.frontend.requests.timeline import (
    RequestEnd,
    RequestTimeline,
    TimelineSubscribers,
)
from dynamo_trtllm.protocol.frontend_samples import RequestRow, WorkerProgress
from dynamo_trtllm.protocol.phases import PhaseSeconds

MAX_KEPT_REQUESTS: Final = 200
MAX_SENT_REQUESTS: Final = 50  # requests in one sample
MAX_SENT_WORKERS: Final = 1000  # workers in one sample


@dataclass(slots=True)
class _StreamSums:
    """What the streams on one worker did since the last sample."""

    streams: int = 0  # streams that run now
    tokens: int = 0
    gap_s: float = 0.0  # the sum of the times between two tokens
    num_gaps: int = 0
    silent_s: float = 0.0  # the longest time for which no token of a running stream came


@dataclass(eq=False, slots=True)
class ActivitySample:
    """What happened since the sample before."""

    codes: dict[str, int]  # ended requests by code
    workers: tuple[WorkerProgress, ...]
    requests: tuple[RequestRow, ...]  # the latest requests that have ended, the oldest first


@dataclass(eq=False)
class RequestActivity:
    """The running requests of this process, and the latest requests that have ended.

    Args:
        clock: returns seconds of the clock of timelines.
    """

    _clock: Callable[[], float] = time.monotonic
    _running: dict[RequestTimeline, None] = field(default_factory=dict, init=False)
    _ended: deque[RequestRow] = field(init=False)
    _is_sampling: bool = field(default=False, init=False)
    # What was counted since the last sample:
    _num_ended: int = field(default=0, init=False)
    _codes: Counter[str] = field(default_factory=Counter, init=False)
    _progress: dict[int, _StreamSums] = field(default_factory=dict, init=False)  # sums by worker
    # For each running stream, how many of its tokens were counted, and when the last of them came.
    _counted: dict[Choice, tuple[int, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._ended = deque(maxlen=MAX_KEPT_REQUESTS)

    def subscribe(self, subscribers: TimelineSubscribers) -> None:
        """Follow all requests."""
        subscribers.started.append(self._on_started)
        subscribers.ended.append(self._on_ended)

    def _on_started(self, timeline: RequestTimeline) -> None:
        self._running[timeline] = None

    def _on_ended(self, timeline: RequestTimeline, end: RequestEnd) -> None:
        self._running.pop(timeline, None)
        self._ended.append(_row(timeline, end))
        if not self._is_sampling:
            return
        self._num_ended += 1
        self._codes[end.code] += 1
        for choice in timeline.choices:
            self._count(choice)
            self._counted.pop(choice, None)

    def begin(self) -> None:
        """Count from now on, until `stop`."""
        self._is_sampling = True
        self._reset()
        for timeline in self._running:
            for choice in timeline.choices:
                self._counted[choice] = (choice.num_tokens, choice.timeline.last_s)

    def stop(self) -> None:
        """Count nothing any more."""
        self._is_sampling = False
        self._counted.clear()

    def latest(self) -> tuple[RequestRow, ...]:
        """Return the latest requests that have ended, the oldest first."""
        return tuple(self._ended)

    def take(self) -> ActivitySample:
        """Return what happened since the last call, or since `begin`."""
        now_s = self._clock()
        for timeline in self._running:
            for choice in timeline.choices:
                self._count(choice)
                self._note_stream(choice, now_s)
        workers = tuple(
            WorkerProgress(
                instance_id=instance_id,
                streams=progress.streams,
                tokens=progress.tokens,
                gap_s=progress.gap_s,
                num_gaps=progress.num_gaps,
                silent_s=progress.silent_s,
            )
            for instance_id, progress in islice(self._progress.items(), MAX_SENT_WORKERS)
        )
        num_rows = min(self._num_ended, MAX_SENT_REQUESTS, len(self._ended))
        rows = tuple(islice(self._ended, len(self._ended) - num_rows, None))
        sample = ActivitySample(dict(self._codes), workers, rows)
        self._reset()
        return sample

    def _reset(self) -> None:
        self._num_ended = 0
        self._codes.clear()
        self._progress.clear()

    def _count(self, choice: Choice) -> None:
        """Count the tokens of a stream that came since the last call."""
        timeline = choice.timeline
        worker = timeline.decode_instance
        if worker is None or timeline.first_s is None:
            return
        num_before, last_before_s = self._counted.get(choice, (0, 0.0))
        # After an early first token, the decode worker generates nothing until it has the KV. This
        # time is not one of its gaps.
        begun_s = max(timeline.first_s, timeline.decode_begun_s or 0.0)
        num_new = choice.num_tokens - num_before
        if num_new <= 0:
            return
        progress = self._progress_of(worker)
        progress.tokens += num_new
        if num_before:
            progress.num_gaps += num_new
            progress.gap_s += max(0.0, timeline.last_s - max(last_before_s, begun_s))
        else:
            # The first token has no gap before it.
            progress.num_gaps += num_new - 1
            progress.gap_s += max(0.0, timeline.last_s - begun_s)
        self._counted[choice] = (choice.num_tokens, timeline.last_s)

    def _note_stream(self, choice: Choice, now_s: float) -> None:
        """Note a running stream at its worker, and for how long no token of it came."""
        timeline = choice.timeline
        if timeline.decode_instance is None or not choice.is_running:
            return
        progress = self._progress_of(timeline.decode_instance)
        progress.streams += 1
        if timeline.decode_begun_s is not None:
            progress.silent_s = max(progress.silent_s, now_s - timeline.last_s)

    def _progress_of(self, instance_id: int) -> _StreamSums:
        """Return the sums of a worker. Create them if the worker has none."""
        progress = self._progress.get(instance_id)
        if progress is None:
            progress = _StreamSums()
            self._progress[instance_id] = progress
        return progress


def _as_rows(phases: PhaseSeconds) -> tuple[tuple[str, str, float], ...]:
    return tuple([(role, phase, seconds) for (role, phase), seconds in phases.items()])


def _row(timeline: RequestTimeline, end: RequestEnd) -> RequestRow:
    """Return what the console shows of a request that has ended."""
    answer = timeline.answer
    finish = ""
    prefill_ids = ""
    decode_ids = ""
    if answer is not None:
        finish = answer.finish_reasons()
        prefill_ids = answer.prefill_ids() or ""
        decode_ids = answer.decode_ids() or ""
    first_s = timeline.first_s
    kv_bytes = 0
    kv_transfer_s = 0.0
    retries = 0
    migrations = 0
    for choice in timeline.choices:
        retries += choice.timeline.retries
        migrations += choice.timeline.migrations
        stats = choice.timeline.decode_stats
        if stats is not None and stats.kv_transfer_s > 0:
            kv_bytes += stats.kv_bytes
            kv_transfer_s += stats.kv_transfer_s
    return RequestRow(
        id=timeline.facts.unique_id,
        model=timeline.model,
        endpoint=timeline.facts.endpoint,
        code=end.code,
        status=end.status,
        finish=finish,
        begun_at=timeline.facts.arrived_at,
        total_s=max(0.0, end.end_s - timeline.begun_s),
        first_token_s=None if first_s is None else max(0.0, first_s - timeline.begun_s),
        prefill=prefill_ids,
        decode=decode_ids,
        prompt_tokens=end.usage.prompt_tokens,
        cached_tokens=end.usage.cached_tokens,
        output_tokens=end.usage.completion_tokens,
        retries=retries,
        migrations=migrations,
        kv_bytes=kv_bytes,
        kv_transfer_s=kv_transfer_s,
        phases=_as_rows(end.phases),
        ttft_phases=_as_rows(end.ttft_phases),
    )
