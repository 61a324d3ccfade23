"""Report the readiness of a deployment for /health and /v1/models/{id}/ready. Pure; it decides no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypedDict

from dynamo_trtllm.messages import Role
from dynamo_trtllm.router.pair_breakers import PairBreakers, PairState, format_pair, pairs_of
from dynamo_trtllm.router.policy import differences
from dynamo_trtllm.router.view import ModelView

MOST_REJECTED_SHOWN: Final = 100

WANTED = {Role.PREFILL: "prefill worker", Role.DECODE: "decode worker", Role.AGGREGATED: "worker"}


class PairRow(TypedDict):
    """One pair in /health. Ids are hexadecimal, as in NATS subjects."""

    model: str
    prefill: str | None  # null: the instance runs aggregated requests
    decode: str
    state: str  # untried, working, failing, quarantined
    reason: str
    age_s: float | None  # since the last outcome of a request or probe; null: none yet


class RejectedRow(TypedDict):
    """One rejected etcd record."""

    key: str  # escaped and shortened
    reason: str


class ReadinessReport(TypedDict):
    """The parts of /health beside the instances."""

    pairs: list[PairRow]
    mismatched: list[str]
    rejected_records: list[RejectedRow]


def not_ready_reason(view: ModelView, name: str, breakers: PairBreakers | None) -> str | None:
    """Return why the model cannot be served now; None if it can. With `breakers`, one pair must have worked."""
    if missing := view.missing_roles():
        return f"model {name} has no {' and no '.join(WANTED[role] for role in missing)}"
    pairs = pairs_of(view)
    if not pairs:
        return f"no prefill worker of model {name} matches a decode worker: {'; '.join(mismatches(view))}"
    if breakers is None or any(breakers.status(pair).state is PairState.WORKING for pair in pairs):
        return None
    tried = [(pair, breakers.status(pair)) for pair in pairs]
    each = "; ".join(
        f"{format_pair(pair)} is {status.state}" + (f" ({status.reason})" if status.reason else "")
        for pair, status in tried
    )
    return f"model {name}: KV transfer works for no pair now: {each}"


def mismatches(view: ModelView) -> list[str]:
    """Return a line for each instance that matches no instance of the other role, with the fields that differ."""
    lines = []
    for one, other in ((view.prefill, view.decode), (view.decode, view.prefill)):
        keys = {view.keys[instance.id] for instance in other}
        lines += [
            f"instance {instance.id:x} ({instance.role}): {differences(instance, other[0])}"
            for instance in one
            if keys and view.keys[instance.id] not in keys
        ]
    return lines


def rejected_rows(reasons: Mapping[str, str]) -> list[RejectedRow]:
    """Return the first rejected records, sorted by key. The number is limited to keep /health small."""
    return [{"key": key, "reason": reasons[key]} for key in sorted(reasons)[:MOST_REJECTED_SHOWN]]


def pair_rows(view: ModelView, name: str, breakers: PairBreakers, now: float) -> list[PairRow]:
    """Return the state of every pair of a model. `now` is a time of the breakers' clock."""
    rows: list[PairRow] = []
    for pair in pairs_of(view):
        status, (prefill, decode) = breakers.status(pair), pair
        rows.append(
            {
                "model": name,
                "prefill": None if prefill is None else f"{prefill:x}",
                "decode": f"{decode:x}",
                "state": status.state,
                "reason": status.reason,
                "age_s": None if status.state is PairState.UNTRIED else round(now - status.seen_at, 3),
            }
        )
    return rows
