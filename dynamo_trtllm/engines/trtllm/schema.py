"""Check arguments of `LLM` against the manifest of a release: names, types, allowed values and ranges.

Arguments are named by dotted keys, as in the YAML: `kv_cache_config.dtype`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from dynamo_trtllm.config.base import suggest
from dynamo_trtllm.engines.trtllm.api_manifests import ApiManifest, ManifestField, Presence, in_development, releases
from dynamo_trtllm.errors import ConfigError

ROOT = "TorchLlmArgs"
_MOST_LISTED = 20  # known keys that an error text lists

# Ranges of numbers, as (smallest, largest), from the validators of 1.2.1 and the executor.
_RANGES: Mapping[str, tuple[float, float | None]] = {
    "tensor_parallel_size": (1, None),
    "pipeline_parallel_size": (1, None),
    "context_parallel_size": (1, None),
    "moe_expert_parallel_size": (1, None),
    "max_batch_size": (1, None),
    "max_num_tokens": (1, None),
    "max_seq_len": (1, None),
    "stream_interval": (1, None),
    "num_postprocess_workers": (0, None),
    "batch_wait_timeout_ms": (0, None),
    "batch_wait_timeout_iters": (0, None),
    "batch_wait_max_tokens_ratio": (0, 1),
    "cuda_graph_config.max_batch_size": (0, None),
    "kv_cache_config.free_gpu_memory_fraction": (0, 1),
    "kv_cache_config.max_gpu_total_bytes": (0, None),
    "kv_cache_config.tokens_per_block": (1, None),
    "cache_transceiver_config.max_tokens_in_buffer": (1, None),
    "cache_transceiver_config.kv_transfer_timeout_ms": (1, None),
    "cache_transceiver_config.kv_transfer_sender_future_timeout_ms": (1, None),
    "cache_transceiver_config.kv_transfer_poll_interval_ms": (1, None),
}
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}


class Found(NamedTuple):
    """Result of a search for a key in a release."""

    presence: Presence
    field: ManifestField | None = None  # None also for a key of a mapping without a schema


class Unverified(NamedTuple):
    """A key that the manifests do not cover."""

    release: str
    key: str
    note: str  # releases that have the key; "" if unknown


def find(release: ApiManifest, key: str) -> Found:
    """Look an argument up in a release by its dotted key."""
    owners: tuple[str, ...] = (ROOT,)
    field: ManifestField | None = None
    for part in key.split("."):
        if not owners:
            return Found(Presence.PRESENT)  # inside a mapping without a schema
        field = next((fields[part] for owner in owners if part in (fields := release.fields(owner))), None)
        if field is None:
            unread = any(release.presence(owner, part) is Presence.NOT_READ for owner in owners)
            return Found(Presence.NOT_READ if unread else Presence.ABSENT)
        owners = _owners(release, field.type)
    return Found(Presence.PRESENT, field)


def check(values: Mapping[str, Any], release: ApiManifest, where: str) -> list[Unverified]:
    """Check the arguments of one source and return the keys that could not be verified.

    Args:
        values: nested arguments.
        release: API of the installed TensorRT-LLM.
        where: name of the source; error texts begin with it.

    Raises:
        ConfigError: names the first invalid key.
    """
    return list(_check(values, release, where, ""))


def check_together(get: Mapping[str, Any]) -> None:
    """Check TensorRT-LLM's constraints between arguments.

    Args:
        get: values by dotted key.

    Raises:
        ConfigError: two arguments conflict.
    """
    sizes, largest = get.get("cuda_graph_config.batch_sizes"), get.get("cuda_graph_config.max_batch_size")
    if sizes and largest and max(sizes) != largest:
        raise ConfigError(
            f"cuda_graph_config.batch_sizes ends at {max(sizes)}, but cuda_graph_config.max_batch_size is {largest}. "
            "Set only one of them.",
            field="cuda_graph_config.batch_sizes",
        )
    if get.get("attention_dp_config.enable_balance"):
        for name in ("timeout_iters", "batching_wait_iters"):
            key = f"attention_dp_config.{name}"
            if (get.get(key) or 0) < 0:
                raise ConfigError(f"{key} is {get[key]}: expected 0 or more with enable_balance", field=key)


def default(release: ApiManifest, key: str) -> Any:
    """Return the release's default of a dotted key; None if it has none, is unknown, or its section is null."""
    parent, _, _ = key.rpartition(".")
    while parent:
        above = find(release, parent).field
        if above is None or not above.is_built:
            return None
        parent = parent.rpartition(".")[0]
    field = find(release, key).field
    return field.default if field is not None else None


def every_key(release: ApiManifest, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted key of each known argument. A section that is null, by default or in `given`, is one key."""
    for name, field in release.fields(ROOT).items():
        is_on = isinstance(given[name], Mapping) if name in given else field.is_built
        inner = [part for owner in _owners(release, field.type) for part in release.fields(owner)] if is_on else []
        yield from (f"{name}.{part}" for part in inner) if inner else (name,)


def is_known(key: str) -> bool:
    """Return True if a known release or an unreleased commit has the argument."""
    return bool(_where_else(key))


def _check(values: Mapping[str, Any], release: ApiManifest, where: str, prefix: str) -> Iterator[Unverified]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        presence, field = find(release, key)
        if presence is Presence.ABSENT:
            _reject(key, release, where)
        if presence is Presence.NOT_READ:
            yield Unverified(release.name, key, _where_else(key))
            continue
        if field is None:
            continue
        _check_value(key, value, field, release, where)
        if isinstance(value, Mapping) and _owners(release, field.type):
            yield from _check(value, release, where, f"{key}.")


def _reject(key: str, release: ApiManifest, where: str) -> NoReturn:
    having = [other.name for other in releases() if find(other, key).presence is Presence.PRESENT]
    if having:
        fix = f"Remove it, or install a release that has it ({', '.join(having)})."
        raise ConfigError(f"{where}: TensorRT-LLM {release.title} has no {key}. {fix}", field=key)
    parent, _, name = key.rpartition(".")
    field = find(release, parent).field if parent else None
    owners = _owners(release, field.type) if field is not None else (ROOT,)
    names = [known for owner in owners for known in release.fields(owner)]
    guess = suggest(name, names)
    inside = f"{parent}." if parent else ""
    listed = (
        f"known: {', '.join(sorted(names))}" if len(names) <= _MOST_LISTED else "--print-config lists the known keys"
    )
    hint = f"did you mean {inside + guess!r}?" if guess else listed
    raise ConfigError(f"{where}: unknown key {key!r}; {hint}", field=key)


def _where_else(key: str) -> str:
    having = [release.name for release in releases() if find(release, key).presence is Presence.PRESENT]
    if having:
        return f"in {', '.join(having)}"
    parent, _, name = key.rpartition(".")
    fields = [found.field for release in releases() if parent and (found := find(release, parent)).field is not None]
    owners = {owner for field in fields if field is not None for owner in re.findall(r"\w*Config\b", field.type)}
    seen = any(in_development(owner, name) for owner in owners or {ROOT})
    return "in an unreleased commit" if seen else ""


def _check_value(key: str, value: Any, field: ManifestField, release: ApiManifest, where: str) -> None:
    if not _fits(_tree(field.type), value, release):
        raise ConfigError(f"{where}: {key} is {value!r}: expected {_expected(field, release)}", field=key)
    low, high = _RANGES.get(key, (None, None))
    if low is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < low or (high is not None and value > high):
            span = f"{low} to {high}" if high is not None else f"{low} or more"
            raise ConfigError(f"{where}: {key} is {value!r}: expected {span}", field=key)
    if key == "kv_cache_config.max_attention_window" and value is not None and (not value or min(value) < 1):
        raise ConfigError(f"{where}: {key} is {value!r}: expected a list of positive whole numbers", field=key)


@functools.cache
def _tree(type_text: str) -> ast.expr:
    return ast.parse(type_text, mode="eval").body


def _owners(release: ApiManifest, type_text: str) -> tuple[str, ...]:
    """Return the configuration classes in an annotation; only the known ones if there are any."""
    named = tuple(re.findall(r"\b[A-Z]\w*Config\b", type_text))
    return tuple(name for name in named if release.fields(name)) or named


def _fits(tree: ast.expr, value: Any, release: ApiManifest) -> bool:
    if isinstance(tree, ast.Constant):
        return value is tree.value
    if isinstance(tree, ast.Name):
        return _fits_name(tree.id, value, release)
    assert isinstance(tree, ast.Subscript), ast.dump(tree)
    assert isinstance(tree.value, ast.Name), ast.dump(tree)
    inner = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
    match tree.value.id:
        case "Optional":
            return value is None or _fits(inner[0], value, release)
        case "Union":
            enums = [part for part in inner if isinstance(part, ast.Name) and release.values(part.id)]
            return any(_fits(part, value, release) for part in enums or inner)  # an enumeration restricts a str
        case "Literal":
            return any(value == ast.literal_eval(part) and isinstance(value, str) for part in inner)
        case "List":
            return isinstance(value, list) and all(_fits(inner[0], item, release) for item in value)
        case _:
            return isinstance(value, Mapping)


def _fits_name(name: str, value: Any, release: ApiManifest) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    match name:
        case "int":
            return number
        case "float":
            return number or isinstance(value, float)
        case "bool":
            return isinstance(value, bool)
        case "str" | "Path":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, Mapping)
    if name.endswith("Config"):
        return isinstance(value, Mapping)
    members = release.values(name)
    folded = str(value).casefold() if name == "LoadFormat" else value
    return not members or folded in ([m.casefold() for m in members] if name == "LoadFormat" else members)


def _expected(field: ManifestField, release: ApiManifest) -> str:
    null = " or null" if field.type.startswith("Optional") else ""
    members = [*field.allowed, *(m for name in re.findall(r"\w+", field.type) for m in release.values(name))]
    if members and "Config" not in field.type:
        either = "true, false or " if "bool" in field.type else ""
        return f"{either}one of {', '.join(map(str, members))}{null}"
    plain = re.sub(r"^Optional\[(.*)\]$", r"\1", field.type)
    if plain.startswith("List["):
        return f"a list of {plain[5:-1]}{null}"
    return _WORDS.get(plain, "a mapping (key: value)") + null
