"""Name the environment variables that look like settings but have no effect, in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from dynamo_trtllm.config.dynamo_variables import PREFIX, VARIABLES, find
from dynamo_trtllm.config.suggestions import suggest

# Kubernetes sets such variables for each Service of a namespace; `dyn-a` gives DYN_A_SERVICE_HOST.
_SERVICE = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)"
    r"|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?",
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+")


def ignored(
    env: Mapping[str, str],
    *,
    known: Collection[str],
    read: Collection[str],
    processes: AbstractSet[str],
) -> str:
    """Return a line that names each variable without effect, and what to do; "" if there is none.

    Values are left out, because some are passwords.

    Args:
        env: environment.
        known: variables that any command reads.
        read: variables that these processes read.
        processes: kinds of process, for which variables of others are left out.
    """
    reasons: dict[str, list[str]] = {}
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in read or not env[name].strip():
            continue
        reason = _reason(name, env[name], known, processes)
        if reason is not None:
            reasons.setdefault(reason, []).append(name)
    if not reasons:
        return ""
    parts = [f"{_list(names)} ({reason})" for reason, names in reasons.items()]
    return f"environment variables without effect: {'; '.join(parts)}; unset them"


def _reason(
    name: str, value: str, known: Collection[str], processes: AbstractSet[str]
) -> str | None:
    """Return why a variable has no effect; None if it need not be named."""
    variable = find(name)
    if variable is None:
        if name in known or _is_of_kubernetes(name, value):
            return None
        return _unknown(name, known)
    if processes.isdisjoint(variable.processes):
        return None
    asks_for_what_happens_anyway = value.strip().lower() in map(str.lower, variable.no_op_values)
    return None if asks_for_what_happens_anyway else variable.reason


def _is_of_kubernetes(name: str, value: str) -> bool:
    is_address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value)
    return bool(_SERVICE.fullmatch(name) or is_address)


def _unknown(name: str, known: Collection[str]) -> str:
    of_dynamo = [other for other in VARIABLES if not other.endswith("*")]
    # The common prefix would make any two short names similar.
    rests = {
        other.removeprefix(PREFIX) for other in (*known, *of_dynamo) if other.startswith(PREFIX)
    }
    guess = suggest(name.removeprefix(PREFIX), sorted(rests))
    return f"unknown; did you mean {PREFIX}{guess}?" if guess else "unknown"


def _list(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
