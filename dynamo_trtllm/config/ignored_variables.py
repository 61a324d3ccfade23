"""Name the environment variables that look like settings but have no effect, in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from dynamo_trtllm.config.base import suggest
from dynamo_trtllm.config.dynamo_variables import PREFIX, VARIABLES, find

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
        env: Environment.
        known: Variables that any command reads.
        read: Variables that these processes read.
        processes: Kinds of process, for which variables of others are left out.
    """
    reasons: dict[str, list[str]] = {}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in read and env[name].strip():
            variable = find(name)
            if variable is None:
                if name not in known and not _is_of_kubernetes(name, env[name]):
                    reasons.setdefault(_unknown(name, known), []).append(name)
            elif processes.isdisjoint(variable.processes):
                continue
            elif env[name].strip().lower() not in map(str.lower, variable.same):
                reasons.setdefault(variable.reason, []).append(name)
    parts = [f"{_list(names)} ({reason})" for reason, names in reasons.items()]
    return f"environment variables without effect: {'; '.join(parts)}; unset them" if parts else ""


def _is_of_kubernetes(name: str, value: str) -> bool:
    is_address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value)
    return bool(_SERVICE.fullmatch(name) or is_address)


def _unknown(name: str, known: Collection[str]) -> str:
    names = {*known, *(each for each in VARIABLES if not each.endswith("*"))}
    # the common prefix would make any two short names similar
    rests = [each.removeprefix(PREFIX) for each in names if each.startswith(PREFIX)]
    guess = suggest(name.removeprefix(PREFIX), sorted(rests))
    return f"unknown; did you mean {PREFIX}{guess}?" if guess else "unknown"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
