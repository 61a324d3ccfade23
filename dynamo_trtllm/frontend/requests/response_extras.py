"""Return what a client asked for beside the fields of the API: statistics, and Dynamo's `nvext`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dynamo_trtllm.api.nvext import Extras, NvTiming, Stats, WorkerIds
from dynamo_trtllm.frontend.generation.choice import Choice
from dynamo_trtllm.frontend.requests.answer import Answer, joined_ids, tokens_per_s
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline, last_of, seconds_by_phase

_ALWAYS_SHOWN = ("queue", "prefill", "handoff", "decode_wait")  # phases
_CALLS = ("prefill", "first_token")  # phases that begin with a call


def extras_of(answer: Answer, timeline: RequestTimeline) -> Extras:
    """Return what the client asked for, as it is now: call it after the last token."""
    extras: Extras = {}
    choices = answer.choices
    if answer.wanted.stats:
        stats = _stats_of(choices, timeline, time.monotonic())
        if len(choices) > 1:
            stats["choices"] = [
                _stats_of([choice], timeline, choice.timeline.last_s) for choice in choices
            ]
        extras["dynamo_trtllm"] = stats
    if answer.wanted.nvext:
        extras["nvext"] = {}
        if "worker_id" in answer.wanted.nvext:
            extras["nvext"]["worker_id"] = _worker_ids(choices[0])
        if "timing" in answer.wanted.nvext:
            extras["nvext"]["timing"] = _timing(answer, timeline)
    return extras


def _worker_ids(first: Choice) -> WorkerIds:
    """Return the workers of the first choice. An aggregated worker has both roles."""
    ids = (first.timeline.prefill_instance, first.timeline.decode_instance)
    known = [instance_id for instance_id in ids if instance_id is not None]
    if not known:
        return {}
    return {"prefill_worker_id": known[0], "decode_worker_id": known[-1]}


def _timing(answer: Answer, timeline: RequestTimeline) -> NvTiming:
    usage = answer.usage()
    begun_s = timeline.begun_s
    timing: NvTiming = {
        "request_received_ms": int(timeline.facts.arrived_at * 1e3),
        "total_time_ms": (time.monotonic() - begun_s) * 1e3,
        "kv_hit_rate": usage.cached_tokens / max(1, usage.prompt_tokens),
    }
    first_s = answer.first_s()
    called_s: list[float] = []
    for choice in answer.choices:
        called_s += [span.begin_s for span in choice.timeline.spans if span.phase in _CALLS]
    call_s = min(called_s, default=None)
    if first_s is not None and call_s is not None:
        timing["prefill_wait_time_ms"] = (call_s - begun_s) * 1e3
        timing["prefill_time_ms"] = (first_s - call_s) * 1e3
        timing["ttft_ms"] = (first_s - begun_s) * 1e3
    return timing


def _stats_of(choices: Sequence[Choice], timeline: RequestTimeline, end_s: float) -> Stats:
    """Return the statistics of some choices until `end_s`.

    They run in parallel; the phases are those of the last one.
    """
    transfers = [choice.transfer for choice in choices]
    _, transport = transfers[0]
    last = last_of(choices)
    begins_s = []
    for choice in choices:
        first_s = choice.timeline.first_s
        begins_s.append(choice.timeline.last_s if first_s is None else first_s)
    begin_s = min(begins_s, default=0.0)
    phases = seconds_by_phase(timeline.phases(last, end_s))
    return {
        "prefill_instance": joined_ids(choice.timeline.prefill_instance for choice in choices),
        "decode_instance": joined_ids(choice.timeline.decode_instance for choice in choices),
        "kv_bytes": sum(kv_bytes for kv_bytes, _ in transfers),
        "transport": transport,
        "queued_s": phases.get("frontend_queue", 0.0),
        "ttft_s": begin_s - timeline.begun_s,
        "tokens_per_s": tokens_per_s(choices),
        "total_s": end_s - timeline.begun_s,
        "phase_s": phases | {name: phases.get(name, 0.0) for name in _ALWAYS_SHOWN},
        "part_s": last.parts,
    }
