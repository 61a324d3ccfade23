"""Find the requests that are stuck and the process that holds each, from the recordings of all
processes.

The module also formats events as text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from dynamo_trtllm.cost_model import Prediction
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
from dynamo_trtllm.router.placement import Costs

_OF_ALL_CHOICES = (RecordedEvent.RECEIVED, RecordedEvent.FINISHED)
_RECENT_S: Final = 600.0  # for which a killed process is reported
_WRONG_DATE_S: Final = 1.0
_SLOW_S: Final = 1.0  # without an answer of etcd
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
    RecordedEvent.CALL_CANCELLED: "the call was cancelled, and has not ended",
}
_WHY_SILENT: Final = {
    ProcessState.RUNNING: "",
    ProcessState.FROZEN: "it is frozen for {:.0f} s (stopped by a signal); resume it or kill it",
    ProcessState.BLOCKED: "its event loop is blocked for {:.0f} s; see its stack, or restart it",
    ProcessState.KILLED: "it was killed or crashed",
    ProcessState.ENDED: "it has ended",
}
_HOLDS_KV: Final = (RecordedEvent.KV_PUBLISHED, RecordedEvent.KV_RELEASED, RecordedEvent.KV_EXPIRED)


class SilentProcess(NamedTuple):
    """A process that does not work or answer."""

    title: str
    pid: int | None  # None: it has not answered
    reason: str
    is_over: bool


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

    processes: list[SilentProcess]
    requests: list[StuckRequest]
    num_running: int
    older_than_s: float

    @classmethod
    def of(cls, recordings: Recordings, older_than_s: float) -> StuckReport:
        """Look for what is stuck."""
        requests = sorted(stuck_requests(recordings, older_than_s), key=lambda each: -each.silent_s)
        num_running = sum(not process.is_over for process in recordings.processes)
        return cls(silent_processes(recordings), requests, num_running, older_than_s)

    @property
    def exit_status(self) -> int:
        """1 if a request is stuck, or a process does not work or answer.

        A process that was killed does not count.
        """
        return 1 if self.requests or any(not process.is_over for process in self.processes) else 0

    def text(self) -> str:
        """Return the report as text."""
        lines = []
        for process in self.processes:
            name = process.title if process.pid is None else f"{process.pid}, {process.title}"
            lines.append(f"process {name}: {process.reason}")
        for stuck in self.requests:
            silent = f"silent for {stuck.silent_s:.1f} s, held by {stuck.held_by}"
            lines.append(f"request {stuck.request}: {silent}: {stuck.reason}")
            lines += [
                f"  {last.process}: {last.event}, {last.age_s:.1f} s ago"
                for last in stuck.last_events
            ]
        if not self.exit_status:
            silent = (
                f"no request of {self.num_running} running processes is silent for"
                f" {self.older_than_s:g} s"
            )
            lines.append(f"nothing is stuck: {silent}")
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Return the report as JSON."""
        processes = [
            {"process": each.title, "pid": each.pid, "reason": each.reason}
            for each in self.processes
        ]
        requests = [asdict(each) for each in self.requests]
        return json.dumps({"processes": processes, "requests": requests}, indent=2) + "\n"


def silent_processes(recordings: Recordings) -> list[SilentProcess]:
    """Return the processes that do not work or answer, have a wrong date, or were killed a short
    time ago.
    """
    silent = []
    for process in recordings.processes:
        is_recent = (
            process.state is ProcessState.KILLED
            and time.time() - process.header.alive_at_s < _RECENT_S
        )
        reasons = (_why_silent(process) or _why_unconnected(process), _why_misdated(process))
        reason = "; ".join(filter(None, reasons))
        if reason and (is_recent or not process.is_over):
            silent.append(SilentProcess(process.title, process.header.pid, reason, process.is_over))
    silent += [
        SilentProcess(title, None, reason, is_over=False)
        for title, reason in recordings.unanswered.values()
    ]
    return silent


def _why_unconnected(process: ProcessRecording) -> str:
    """Return that a running process waits for etcd; "" if it does not."""
    waits_s = process.waits_for_etcd_s
    return "" if waits_s < _SLOW_S else f"etcd has not answered it for {waits_s:.0f} s"


def _why_misdated(process: ProcessRecording) -> str:
    """Return that the clock of a running process is wrong; "" if it is not."""
    if process.is_over or abs(process.ahead_s) <= _WRONG_DATE_S:
        return ""
    side = "ahead of" if process.ahead_s > 0 else "behind"
    return (
        f"its date is {abs(process.ahead_s):.0f} s {side} that of this command, and deadlines of"
        " requests and KV transfers are dates; synchronize the clocks"
    )


def _why_silent(process: ProcessRecording) -> str:
    """Return why a process does not work; "" if it works."""
    return _WHY_SILENT[process.state].format(process.silent_s)


def stuck_requests(recordings: Recordings, older_than_s: float) -> list[StuckRequest]:
    """Return the requests that have not ended and record nothing for `older_than_s` seconds."""
    now_ns, boot = time.monotonic_ns(), boot_id()
    found = []
    for request in recordings.requests.values():
        steps = [step for step in request.steps if step.process.header.boot_id == boot]
        is_alive = any(not step.process.is_over for step in steps)
        if steps and is_alive:
            found += list(_stuck_choices(recordings, request, steps, older_than_s, now_ns))
    return found


def _stuck_choices(
    recordings: Recordings,
    request: RequestRecording,
    steps: list[Step],
    older_than_s: float,
    now_ns: int,
) -> Iterator[StuckRequest]:
    for choice in sorted({step.entry.choice for step in steps}):
        own = [step for step in steps if step.entry.choice == choice]
        last = own[-1]
        silent_s = (now_ns - last.entry.ns) / 1e9
        running = max(step.process.header.num_running for step in own)
        if silent_s < older_than_s + running / PROGRESS_PER_TICK:
            continue
        holder = _holder(recordings, request, own)
        if holder is not None:
            last_steps = {id(step.process): step for step in own}.values()
            dates = ((step.process.title, _why_misdated(step.process)) for step in last_steps)
            beside = "".join(f"; {title}: {reason}" for title, reason in dates if reason)
            yield StuckRequest(
                request=request.id,
                silent_s=silent_s,
                held_by=holder.title,
                reason=holder.reason + beside,
                last_events=[
                    LastEvent(process.title, describe(entry, request), (now_ns - entry.ns) / 1e9)
                    for process, entry in last_steps
                ],
            )


def _holder(recordings: Recordings, request: RequestRecording, steps: list[Step]) -> Holder | None:
    """Return who holds a choice whose steps these are; None if it has ended everywhere."""
    ours = [step for step in steps if step.process.is_frontend]
    if not ours or request.finished is not None or ours[-1].process.state is ProcessState.ENDED:
        return _open_call(steps, has_finished=request.finished is not None)
    frontend = ours[-1].process
    if reason := _why_silent(frontend):
        return (
            Holder(frontend.title, reason)
            if not frontend.is_over
            else _open_call(steps, has_finished=False)
        )
    call = next(
        (step.entry for step in reversed(ours) if step.entry.event == RecordedEvent.CALL_SENT), None
    )
    last = ours[-1].entry
    if last.event == RecordedEvent.WAITING_FOR_WORKERS:
        return _of_no_worker(recordings, frontend, last)
    if last.event == RecordedEvent.RESERVING_SLOT:
        return _of_worker(
            recordings, frontend, last.a, [], "it has not answered the reservation of a slot"
        )
    if last.event == RecordedEvent.LAST_TOKEN:
        return Holder(
            f"the client of {frontend.title}", "it does not read the rest of the response"
        )
    if call is None or last.event in _NO_CALL:
        return Holder(frontend.title, _NO_CALL.get(last.event, "it has not sent a call"))
    worker = recordings.instance(call.a)
    since = [step for step in steps if step.process is worker and step.entry.ns >= call.ns]
    return _of_worker(recordings, frontend, call.a, since, "")


def _of_no_worker(recordings: Recordings, frontend: ProcessRecording, waiting: Entry) -> Holder:
    """Return who holds a request that waits for workers."""
    if waiting.b:
        return Holder(
            frontend.title, f"no worker can take it: {quarantined(waiting)} (`pairs` in /health)"
        )
    for process in recordings.processes:
        if process.namespace == frontend.namespace and (reason := _why_unconnected(process)):
            return Holder(
                "etcd",
                f"no worker can take it: a role has no worker, and {process.title}: {reason}",
            )
    return Holder(frontend.title, "no worker can take it: a role has no worker")


def quarantined(waiting: Entry) -> str:
    """Return the quarantined pair for which a request waits, as text."""
    pair = f"pair {waiting.a:x} -> {waiting.b:x}" if waiting.a else f"instance {waiting.b:x}"
    return f"{pair} is quarantined, because its KV transfers failed"


def _of_worker(
    recordings: Recordings,
    frontend: ProcessRecording,
    instance_id: int,
    steps: list[Step],
    without_steps: str,
) -> Holder:
    """Return who holds a call to a worker.

    Args:
        recordings: all recordings.
        frontend: the caller.
        instance_id: the worker.
        steps: the call's steps in the worker.
        without_steps: the reason of the worker if there are none; "": the call has not arrived.
    """
    worker = recordings.instance(instance_id)
    if worker is None:
        return recordings.without_recording(instance_id)
    if reason := _why_silent(worker):
        return Holder(worker.title, reason)
    if not steps and not without_steps:
        return Holder("NATS", f"the call has not arrived at {worker.title}, which works")
    if not steps:
        return Holder(worker.title, without_steps)
    last = steps[-1].entry
    if any(step.entry.event == RecordedEvent.CALL_ENDED for step in steps):
        return Holder(
            "NATS",
            f"{worker.title} has ended the call, and {frontend.title} has not received the end",
        )
    if last.event == RecordedEvent.KV_FETCH_STARTED:
        source = recordings.instance(last.a)
        if source is None:
            silent = recordings.without_recording(last.a)
            holder = silent.title if recordings.has_asked else worker.title
            return Holder(holder, f"{worker.title} fetches KV from {silent.title}: {silent.reason}")
        if reason := _why_silent(source):
            return Holder(source.title, f"{worker.title} fetches KV from it, and {reason}")
        return Holder(
            worker.title,
            f"it fetches KV from {source.title}, which works: check the network between them",
        )
    if last.event in (RecordedEvent.CALL_RECEIVED, RecordedEvent.QUEUED):
        return Holder(
            worker.title,
            f"the call waits in the engine's queue{_in_front(recordings, worker, steps[-1])}",
        )
    if last.event in (RecordedEvent.FIRST_TOKEN, RecordedEvent.PROGRESS):
        return Holder(
            worker.title,
            f"the engine has generated {max(1, last.a)} tokens of the call, and no more",
        )
    return Holder(worker.title, _IN_WORKER.get(last.event, "the call has not ended"))


def _in_front(recordings: Recordings, worker: ProcessRecording, queued: Step) -> str:
    """Return which prompt the engine computes meanwhile, as text; "" if there is none."""
    prompts: dict[tuple[int, int], int] = {}
    for entry in worker.entries:
        call = entry.key, entry.choice
        if entry.event == RecordedEvent.CALL_RECEIVED:
            prompts[call] = entry.a
        elif entry.event in (RecordedEvent.FIRST_TOKEN, RecordedEvent.CALL_ENDED):
            prompts.pop(call, None)
    prompts.pop((queued.entry.key, queued.entry.choice), None)
    if not prompts:
        return ""
    (key, _), tokens = max(prompts.items(), key=lambda item: item[1])
    return (
        f", behind {len(prompts)} calls; the longest is request {key:016x} with {tokens} prompt"
        " tokens"
    )


def _open_call(steps: list[Step], *, has_finished: bool) -> Holder | None:
    """Return who holds a call or KV whose frontend has finished the request or is gone."""
    by_worker: dict[int, list[Step]] = {}
    for step in steps:
        if not step.process.is_frontend and not step.process.is_over:
            by_worker.setdefault(id(step.process), []).append(step)
    why = (
        "its request has finished"
        if has_finished
        else "its frontend is gone, or was not asked or did not answer"
    )
    for own in by_worker.values():
        process, events = own[-1].process, [step.entry.event for step in own]
        silence = f"; {reason}" if (reason := _why_silent(process)) else ""
        if events.count(RecordedEvent.CALL_RECEIVED) > events.count(RecordedEvent.CALL_ENDED):
            return Holder(process.title, f"it runs a call, and {why}{silence}")
        kv = next((event for event in reversed(events) if event in _HOLDS_KV), None)
        if kv == RecordedEvent.KV_PUBLISHED:
            return Holder(
                process.title, f"it holds the KV of a call until a time-out, and {why}{silence}"
            )
    return None


# --- events as text ---


def describe(entry: Entry, request: RequestRecording) -> str:
    """Return an event and its values as text."""
    is_of_all = (
        not entry.key
        or entry.event in _OF_ALL_CHOICES
        or not any(step.entry.choice for step in request.steps)
    )
    text = f"{entry.name}{'' if is_of_all else f' (choice {entry.choice})'}{_values(entry)}"
    if entry.event == RecordedEvent.PLACED_BY_COST and entry.c:
        since_s = (entry.ns - request.steps[0].entry.ns) / 1e9
        at, low, high = ((since_s + each) * 1e3 for each in Prediction.unpacked(entry.c))
        text += f"; first token expected at {at:.1f} ms ({low:.1f} to {high:.1f})"
    return text


def _costs(number: int) -> str:
    costs = Costs.unpacked(number)
    return f"{costs.selected} (next {'none' if costs.second < 0 else costs.second})"


# What the numbers and the reason of an event mean, for `str.format`.
_MEANINGS: Final[dict[int, str]] = {
    RecordedEvent.TOKENIZED: ": {a} prompt tokens, at most {b} output tokens",
    RecordedEvent.RESERVING_SLOT: ": at {a:x}",
    RecordedEvent.CALL_SENT: ": {reason} at {a:x}",
    RecordedEvent.PROGRESS: ": {a} tokens",
    RecordedEvent.LAST_TOKEN: ": {a} tokens, {reason}",
    RecordedEvent.CALL_ENDED: ": {a} tokens, {reason}",
    RecordedEvent.CALL_RECEIVED: ": {reason} of {a} prompt tokens",
    RecordedEvent.KV_PUBLISHED: ": {a} bytes",
    RecordedEvent.CONNECTION_LOST: ": {reason}",
    RecordedEvent.PEER_LOST: ": {reason}",
    RecordedEvent.CONNECTION_AWAITED: ": {reason}",
    RecordedEvent.CONNECTED: ": {reason}",
}


def _values(entry: Entry) -> str:
    a, b, reason = entry.a, entry.b, entry.reason
    match entry.event:
        case RecordedEvent.PLACED:
            return f": prefill {a:x}, decode {b:x}" if a else f": {b:x}"
        case RecordedEvent.PLACED_BY_COST:
            costs = [("prefill", a), ("decode" if a else "aggregated", b)]
            return f": {reason}, " + ", ".join(
                f"{role} cost {_costs(number)}" for role, number in costs if number
            )
        case RecordedEvent.WAITING_FOR_WORKERS:
            return f": {quarantined(entry)}" if b else ""
        case RecordedEvent.CALL_FAILED:
            return f": {reason} at {a:x}, " + ("going on" if b else "the request ends")
        case RecordedEvent.FINISHED:
            return f": HTTP {a}, {b} tokens, {reason}" if a else f": no response, {reason}"
        case RecordedEvent.KV_FETCH_STARTED:
            return f": {b} bytes from {a:x}" if b else f": from {a:x}"
    return _MEANINGS.get(entry.event, "").format(a=a, b=b, reason=reason)
