"""Find the requests that are stuck, and the process that holds each, in recordings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from dynamo_trtllm.observability.event_text import describe, quarantined
from dynamo_trtllm.observability.recorder import PROGRESS_PER_TICK, RecordedEvent, boot_id
from dynamo_trtllm.observability.recordings import (
    Entry,
    Holder,
    ProcessRecording,
    ProcessState,
    Recordings,
    RequestRecording,
    Step,
)
from dynamo_trtllm.protocol.counted import counted

_RECENT_S: Final = 600.0  # a killed process is reported for this time
_WRONG_DATE_S: Final = 1.0  # a date that is off by more is reported
_SLOW_S: Final = 1.0  # an answer of etcd that takes longer is reported
# Why a request is silent after its last event: before a call is sent, and in a worker.
_NO_CALL: Final[dict[int, str]] = {
    RecordedEvent.RECEIVED: "the request's body has not arrived, or waits to be parsed",
    RecordedEvent.TOKENIZED: "it waits in the frontend's queue (--max-inflight)",
    RecordedEvent.PLACED: "its first call has not been sent",
    RecordedEvent.CALL_FAILED: "a call failed, and the next one has not been sent",
}
_IN_WORKER: Final[dict[int, str]] = {
    RecordedEvent.WAITING_FOR_KV_BLOCKS: "the call waits for KV blocks, which other requests hold",
    RecordedEvent.WAITING_FOR_BUFFER: "the call waits for space in the transfer buffer",
    RecordedEvent.STARTED_IN_ENGINE: (
        "the engine runs the call, and has not computed its prompt or fetched its KV"
    ),
    RecordedEvent.PREFILL_DONE: "the prompt is computed and waits for space in the transfer buffer",
    RecordedEvent.KV_PUBLISHED: "the KV is published, and the call has not ended",
    RecordedEvent.KV_FETCHED: "the KV has arrived, and the engine has not generated from it",
}
_WHY_SILENT: Final = {
    ProcessState.RUNNING: "",
    ProcessState.FROZEN: "it is frozen for {:.0f} s (stopped by a signal); resume it or kill it",
    ProcessState.BLOCKED: "its event loop is blocked for {:.0f} s; see its stack, or restart it",
    ProcessState.KILLED: "it was killed or crashed",
    ProcessState.ENDED: "it has ended",
}
_KV_EVENTS: Final = (
    RecordedEvent.KV_PUBLISHED,
    RecordedEvent.KV_RELEASED,
    RecordedEvent.KV_EXPIRED,
)


class ProcessProblem(NamedTuple):
    """A process that does not work or answer, or has a wrong date."""

    title: str
    pid: int | None  # None: the process has not answered
    reason: str
    is_over: bool  # it has ended or was killed


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event of a request in one process."""

    process: str
    event: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckRequest:
    """A request or call that has not ended and records nothing."""

    request: str
    silent_s: float
    held_by: str
    reason: str
    last_events: list[LastEvent]


@dataclass(frozen=True, slots=True)
class StuckReport:
    """What is stuck, most silent first, and the processes that do not work or answer."""

    processes: list[ProcessProblem]
    requests: list[StuckRequest]
    num_running: int
    older_than_s: float

    @classmethod
    def of(cls, recordings: Recordings, older_than_s: float) -> StuckReport:
        """Look for what is stuck."""
        requests = stuck_requests(recordings, older_than_s)
        requests.sort(key=lambda stuck: -stuck.silent_s)
        running = [process for process in recordings.processes if not process.is_over]
        return cls(process_problems(recordings), requests, len(running), older_than_s)

    @property
    def exit_status(self) -> int:
        """1 if a request is stuck, or a process does not work or answer.

        A process that was killed does not count.
        """
        living = [process for process in self.processes if not process.is_over]
        return 1 if self.requests or living else 0

    def text(self) -> str:
        """Return the report as text."""
        lines = []
        for process in self.processes:
            name = process.title if process.pid is None else f"{process.pid}, {process.title}"
            lines.append(f"process {name}: {process.reason}")
        for stuck in self.requests:
            lines.append(
                f"request {stuck.request}: silent for {stuck.silent_s:.1f} s, held by"
                f" {stuck.held_by}: {stuck.reason}"
            )
            lines += [
                f"  {last.process}: {last.event}, {last.age_s:.1f} s ago"
                for last in stuck.last_events
            ]
        if not self.exit_status:
            lines.append(
                f"nothing is stuck: no request of {self.num_running} running processes is silent"
                f" for {self.older_than_s:g} s"
            )
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Return the report as JSON."""
        processes = [
            {"process": process.title, "pid": process.pid, "reason": process.reason}
            for process in self.processes
        ]
        requests = [asdict(stuck) for stuck in self.requests]
        return json.dumps({"processes": processes, "requests": requests}, indent=2) + "\n"


def process_problems(recordings: Recordings) -> list[ProcessProblem]:
    """Return the processes that do not work or answer, or have a wrong date.

    A process that was killed is among them for a short time.
    """
    problems = []
    for process in recordings.processes:
        if process.is_over and not _was_just_killed(process):
            continue
        why_silent = _why_silent(process) or _why_unconnected(process)
        reasons = [why for why in (why_silent, _why_misdated(process)) if why]
        if reasons:
            reason = "; ".join(reasons)
            pid = process.header.pid
            problems.append(ProcessProblem(process.title, pid, reason, process.is_over))
    for title, reason in recordings.unanswered.values():
        problems.append(ProcessProblem(title, None, reason, is_over=False))
    return problems


def _was_just_killed(process: ProcessRecording) -> bool:
    if process.state is not ProcessState.KILLED:
        return False
    return time.time() - process.header.alive_at_s < _RECENT_S


def _why_unconnected(process: ProcessRecording) -> str:
    """Return for how long etcd has not answered a running process; "" if etcd answers."""
    waits_s = process.waits_for_etcd_s
    if waits_s < _SLOW_S:
        return ""
    return f"etcd has not answered it for {waits_s:.0f} s"


def _why_misdated(process: ProcessRecording) -> str:
    """Return how the date of a running process is wrong; "" if it is right."""
    if process.is_over or abs(process.ahead_s) <= _WRONG_DATE_S:
        return ""
    side = "ahead of" if process.ahead_s > 0 else "behind"
    return (
        f"its date is {abs(process.ahead_s):.0f} s {side} that of this command, and KV transfers"
        " expire at a date; synchronize the clocks"
    )


def _why_silent(process: ProcessRecording) -> str:
    """Return why a process does not work; "" if it works."""
    return _WHY_SILENT[process.state].format(process.silent_s)


def stuck_requests(recordings: Recordings, older_than_s: float) -> list[StuckRequest]:
    """Return the requests that have not ended and record nothing for `older_than_s` seconds."""
    now_ns = time.monotonic_ns()
    boot = boot_id()
    found: list[StuckRequest] = []
    for request in recordings.requests.values():
        # Times of an earlier boot can't be compared with the time of this one.
        steps = [step for step in request.steps if step.process.header.boot_id == boot]
        is_alive = any(not step.process.is_over for step in steps)
        if is_alive:
            found.extend(_stuck_choices(recordings, request, steps, older_than_s, now_ns))
    return found


def _stuck_choices(
    recordings: Recordings,
    request: RequestRecording,
    steps: list[Step],
    older_than_s: float,
    now_ns: int,
) -> Iterator[StuckRequest]:
    """Yield the choices of a request that are silent for too long and have not ended."""
    for choice in sorted({step.entry.choice for step in steps}):
        own = [step for step in steps if step.entry.choice == choice]
        silent_s = (now_ns - own[-1].entry.ns) / 1e9
        # A process records the progress of at most PROGRESS_PER_TICK requests in a second. With
        # more requests, each is silent until its turn comes again.
        num_running = max(step.process.header.num_running for step in own)
        if silent_s < older_than_s + num_running / PROGRESS_PER_TICK:
            continue
        holder = _holder(recordings, request, own)
        if holder is None:
            continue
        reason = holder.reason
        last_events = []
        # Of each process, the last step replaces the earlier ones.
        last_steps = {id(step.process): step for step in own}
        for step in last_steps.values():
            title = step.process.title
            why_misdated = _why_misdated(step.process)
            if why_misdated:
                reason += f"; {title}: {why_misdated}"
            age_s = (now_ns - step.entry.ns) / 1e9
            last_events.append(LastEvent(title, describe(step.entry, request), age_s))
        yield StuckRequest(
            request=request.id,
            silent_s=silent_s,
            held_by=holder.title,
            reason=reason,
            last_events=last_events,
        )


def _holder(recordings: Recordings, request: RequestRecording, steps: list[Step]) -> Holder | None:
    """Return who holds the choice with these steps; None if it has ended everywhere."""
    in_frontend = [step for step in steps if step.process.is_frontend]
    if request.finished is not None:
        return _holder_without_frontend(steps, has_finished=True)
    if not in_frontend:
        return _holder_without_frontend(steps, has_finished=False)
    frontend = in_frontend[-1].process
    if frontend.is_over:
        return _holder_without_frontend(steps, has_finished=False)
    why_silent = _why_silent(frontend)
    if why_silent:
        return Holder(frontend.title, why_silent)
    last = in_frontend[-1].entry
    if last.event == RecordedEvent.WAITING_FOR_WORKERS:
        return _holder_before_placement(recordings, frontend, last)
    if last.event == RecordedEvent.RESERVING_SLOT:
        return _holder_in_worker(
            recordings,
            frontend,
            last.instance_id,
            steps=[],
            reason_without_steps="it has not answered the reservation of a slot",
        )
    if last.event == RecordedEvent.LAST_TOKEN:
        return Holder(
            f"the client of {frontend.title}", "it does not read the rest of the response"
        )
    calls = [step.entry for step in in_frontend if step.entry.event == RecordedEvent.CALL_SENT]
    if not calls or last.event in _NO_CALL:
        return Holder(frontend.title, _NO_CALL.get(last.event, "it has not sent a call"))
    call = calls[-1]
    worker = recordings.instance(call.instance_id)
    in_worker = [step for step in steps if step.process is worker and step.entry.ns >= call.ns]
    return _holder_in_worker(
        recordings, frontend, call.instance_id, steps=in_worker, reason_without_steps=None
    )


def _holder_before_placement(
    recordings: Recordings, frontend: ProcessRecording, waiting: Entry
) -> Holder:
    """Return who holds a request that waits for workers."""
    if waiting.is_quarantined:
        return Holder(
            frontend.title, f"no worker can take it: {quarantined(waiting)} (`pairs` in /health)"
        )
    for process in recordings.processes:
        if process.namespace != frontend.namespace:
            continue
        reason = _why_unconnected(process)
        if reason:
            return Holder(
                "etcd",
                f"no worker can take it: a role has no worker, and {process.title}: {reason}",
            )
    return Holder(frontend.title, "no worker can take it: a role has no worker")


def _holder_in_worker(
    recordings: Recordings,
    frontend: ProcessRecording,
    instance_id: int,
    *,
    steps: list[Step],
    reason_without_steps: str | None,
) -> Holder:
    """Return who holds a call to a worker.

    Args:
        recordings: all recordings.
        frontend: the frontend that has sent the call.
        instance_id: the worker.
        steps: the steps of the call in the worker.
        reason_without_steps: why the worker holds the request if there are no steps. None: the
            worker does not hold the request then, because the call has not arrived.
    """
    worker = recordings.instance(instance_id)
    if worker is None:
        return recordings.without_recording(instance_id)
    why_silent = _why_silent(worker)
    if why_silent:
        return Holder(worker.title, why_silent)
    if not steps:
        if reason_without_steps is None:
            return Holder("NATS", f"the call has not arrived at {worker.title}, which works")
        return Holder(worker.title, reason_without_steps)
    if any(step.entry.event == RecordedEvent.CALL_ENDED for step in steps):
        return Holder(
            "NATS",
            f"{worker.title} has ended the call, and {frontend.title} has not received the end",
        )
    last = steps[-1].entry
    if last.event == RecordedEvent.KV_FETCH_STARTED:
        return _holder_of_fetch(recordings, worker, last.instance_id)
    if last.event == RecordedEvent.CALL_RECEIVED:
        queue_ahead = _queue_ahead(worker, last)
        return Holder(worker.title, f"the call waits in the engine's queue{queue_ahead}")
    if last.event in (RecordedEvent.FIRST_TOKEN, RecordedEvent.PROGRESS):
        # The event of the first token has no number.
        num_tokens = max(1, last.num_tokens)
        return Holder(
            worker.title,
            f"the engine has generated {counted(num_tokens, 'token')} of the call, and no more",
        )
    return Holder(worker.title, _IN_WORKER.get(last.event, "the call has not ended"))


def _holder_of_fetch(recordings: Recordings, worker: ProcessRecording, source_id: int) -> Holder:
    """Return who holds a worker that fetches KV from the instance `source_id`."""
    source = recordings.instance(source_id)
    if source is None:
        unknown = recordings.without_recording(source_id)
        # If other machines were not asked, the source may work. So name the worker that waits.
        title = unknown.title if recordings.has_asked else worker.title
        return Holder(title, f"{worker.title} fetches KV from {unknown.title}: {unknown.reason}")
    why_silent = _why_silent(source)
    if why_silent:
        return Holder(source.title, f"{worker.title} fetches KV from it, and {why_silent}")
    return Holder(
        worker.title,
        f"it fetches KV from {source.title}, which works: check the network between them",
    )


def _queue_ahead(worker: ProcessRecording, queued: Entry) -> str:
    """Return, as text, how many calls are before a queued call, and the longest of them.

    These calls came earlier and have no first token yet. The engine may run them already: the
    queued call waits for them all the same. "": there are no such calls.
    """
    prompts: dict[tuple[int, int], int] = {}  # tokens by call: (request, choice)
    own_call = (queued.key, queued.choice)
    is_after_queued = False
    for entry in worker.entries:
        call = (entry.key, entry.choice)
        if entry.event == RecordedEvent.CALL_RECEIVED:
            # The time distinguishes the queued call from an earlier call of the same choice, which
            # an elastic worker may have run.
            if call == own_call and entry.ns == queued.ns:
                is_after_queued = True
            if not is_after_queued:
                prompts[call] = entry.num_tokens
        elif entry.event in (RecordedEvent.FIRST_TOKEN, RecordedEvent.CALL_ENDED):
            prompts.pop(call, None)
    prompts.pop(own_call, None)
    if not prompts:
        return ""
    longest = max(prompts, key=lambda call: prompts[call])
    key, _ = longest
    return (
        f", behind {counted(len(prompts), 'call')}; the longest is request {key:016x} with"
        f" {prompts[longest]} prompt tokens"
    )


def _holder_without_frontend(steps: list[Step], *, has_finished: bool) -> Holder | None:
    """Return who holds a call or KV whose frontend has finished the request or is gone."""
    by_worker: dict[int, list[Step]] = {}
    for step in steps:
        if not step.process.is_frontend and not step.process.is_over:
            by_worker.setdefault(id(step.process), []).append(step)
    if has_finished:
        why = "its request has finished"
    else:
        why = "its frontend is gone, or was not asked or did not answer"
    for own in by_worker.values():
        process = own[-1].process
        why_silent = _why_silent(process)
        if why_silent:
            why_silent = f"; {why_silent}"
        events = [step.entry.event for step in own]
        if events.count(RecordedEvent.CALL_RECEIVED) > events.count(RecordedEvent.CALL_ENDED):
            return Holder(process.title, f"it runs a call, and {why}{why_silent}")
        kv_events = [event for event in events if event in _KV_EVENTS]
        # After any other last event, the KV was released or has expired, or there was none.
        if kv_events and kv_events[-1] == RecordedEvent.KV_PUBLISHED:
            return Holder(
                process.title, f"it holds the KV of a call until a time-out, and {why}{why_silent}"
            )
    return None
