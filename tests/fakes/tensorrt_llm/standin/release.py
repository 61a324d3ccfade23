"""Which release is played, and classes made from its manifest."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from dynamo_trtllm.engines.manifests import ManifestField
from dynamo_trtllm.engines.trtllm.api_manifests import release_for

VERSION = os.environ.get("STANDIN_RELEASE", "1.2.1")
RELEASE = release_for(VERSION)
LINE = tuple(int(part) for part in VERSION.split(".")[:2])  # (1, 2) of 1.2.1


def _more_fields() -> dict[str, dict[str, Any]]:
    """Fields of candidates that no manifest covers, with their defaults."""
    return {} if is_before((1, 3), 24) else {"KvCacheConfig": {"kv_cache_event_hash_algo": "auto"}}


def _is_lacking(owner: str, name: str) -> bool:
    """True for fields of the nearest manifest that the played candidate is assumed not to have
    yet.
    """
    return (owner, name) == ("KvCacheConfig", "kv_cache_event_hash_algo") and is_before((1, 3), 24)


def is_before(line: tuple[int, int], candidate: int) -> bool:
    """True if the played release is older than this candidate of a line."""
    played = re.search(r"rc(\d+)", VERSION)
    return LINE < line or (LINE == line and played is not None and int(played[1]) < candidate)


def fields_class(
    name: str,
    namespace: Mapping[str, Any],
    *,
    internal: Mapping[str, Any] = {},
    slots: bool,
    kw_only: bool,
) -> type:
    """A dataclass with the fields that the played release has; `internal` ones are added."""
    fields: list[Any] = [
        (field.name, Any, dataclasses.field(default=field.default))
        for field in RELEASE.fields(name).values()
    ]
    fields += [
        (key, Any, dataclasses.field(default=value, repr=False)) for key, value in internal.items()
    ]
    return dataclasses.make_dataclass(
        name, fields, namespace=dict(namespace), slots=slots, kw_only=kw_only
    )


def field_names(owner: str) -> list[str]:
    """Of a configuration class of the played release."""
    names = [*RELEASE.fields(owner), *_more_fields().get(owner, {})]
    return [name for name in names if not _is_lacking(owner, name)]


def checked_arguments(owner: str, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Every field of `owner` with its value.

    Raises ValueError naming a key that the played release lacks.

    What was read in part takes every key and every word: nothing is known to be refused.
    """
    known = RELEASE.fields(owner)
    more = _more_fields().get(owner, {})
    checked = more | {
        name: field.default for name, field in known.items() if not _is_lacking(owner, name)
    }
    for name, value in given.items():
        if name in known and not _is_lacking(owner, name):
            checked[name] = _checked(owner, known[name], value, f"{where}{name}")
        elif name in more or (RELEASE.is_in_part(owner) and not _is_lacking(owner, name)):
            checked[name] = value
        else:
            raise ValueError(
                f"{where}{name}: Extra inputs are not permitted (TensorRT-LLM {VERSION}, {owner})"
            )
    return checked


def _allowed(owner: str, field: ManifestField) -> tuple[str, ...]:
    """The words that a Literal or an enumeration allows; () if there may be more."""
    literal = re.search(r"Literal(\[.*?\])", field.type)
    if literal is not None:
        return () if RELEASE.is_in_part(owner) else tuple(ast.literal_eval(literal[1]))
    for name in re.findall(r"\w+", field.type):
        is_complete = name not in RELEASE.open_enums and not name.endswith("Config")
        if RELEASE.values(name) and is_complete:
            return RELEASE.values(name)
    return ()


def _checked(owner: str, field: ManifestField, value: Any, where: str) -> Any:
    allowed = _allowed(owner, field)
    word = value.upper() if "LoadFormat" in field.type and isinstance(value, str) else value
    if allowed and isinstance(word, str) and word not in allowed:
        raise ValueError(f"{where}: Input should be one of {', '.join(allowed)}, not {value!r}")
    if isinstance(value, dict):
        for nested in re.findall(r"\w+Config", field.type):
            if RELEASE.fields(nested):
                return checked_arguments(nested, value, f"{where}.")
    return value
