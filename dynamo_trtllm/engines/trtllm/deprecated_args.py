"""Arguments as older releases and guides spell them, translated to what releases from 1.0 on take. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.errors import ConfigError

# Old key -> the key it became.
_MOVED = {
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",  # a flag of trtllm-serve
    "moe_backend": "moe_config.backend",
    "moe_max_num_tokens": "moe_config.max_num_tokens",
    "moe_load_balancer": "moe_config.load_balancer",
    "cuda_graph_batch_sizes": "cuda_graph_config.batch_sizes",
    "cuda_graph_max_batch_size": "cuda_graph_config.max_batch_size",
    "cuda_graph_padding_enabled": "cuda_graph_config.enable_padding",
    "cuda_graph_config.padding_enabled": "cuda_graph_config.enable_padding",
}
_LIFTED = "pytorch_backend_config"
_TRANSCEIVER = "cache_transceiver_config"


class Translated(NamedTuple):
    """The arguments with today's keys, and a line for each that was given in a deprecated form."""

    values: dict[str, Any]
    notes: list[str]


def translate(given: Mapping[str, Any], where: str) -> Translated:
    """`given` as nested mappings; `where` begins each line. Raises ConfigError where both spellings disagree."""
    work = _Work(copy.deepcopy(dict(given)), where)
    if isinstance(work.values.get(_LIFTED), Mapping):
        work.lift()
    for old, new in _MOVED.items():
        work.move(old, new)
    work.graphs()
    work.overlap()
    work.transceiver()
    if work.values.get("backend") == "pytorch":
        del work.values["backend"]  # the engine says so itself
    return Translated(work.values, work.notes)


class _Work:
    """One translation under way."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.notes: list[str] = []

    def lift(self) -> None:
        for key, value in self.values.pop(_LIFTED).items():
            self._put(f"{_LIFTED}.{key}", key, value)

    def move(self, old: str, new: str) -> None:
        parent, _, last = old.rpartition(".")
        level = self.values.get(parent) if parent else self.values
        if isinstance(level, dict) and last in level:
            self._put(old, new, level.pop(last))

    def graphs(self) -> None:
        """`use_cuda_graph: false` is `cuda_graph_config: null`; on is the default."""
        if "use_cuda_graph" not in self.values:
            return
        on = self._flag("use_cuda_graph")
        if on:
            current = self.values.setdefault("cuda_graph_config", {})
            self._agree("use_cuda_graph", "cuda_graph_config", current is not None)
            self._note("use_cuda_graph", "cuda_graph_config, which is on")
        else:
            self.values["cuda_graph_config"] = None
            self._note("use_cuda_graph", "cuda_graph_config: null")

    def overlap(self) -> None:
        if "enable_overlap_scheduler" in self.values:
            self._put(
                "enable_overlap_scheduler", "disable_overlap_scheduler", not self._flag("enable_overlap_scheduler")
            )

    def transceiver(self) -> None:
        level = self.values.get(_TRANSCEIVER)
        backend = level.get("backend") if isinstance(level, dict) else None
        if isinstance(level, dict) and isinstance(backend, str) and backend != backend.upper():
            level["backend"] = backend.upper()
            self._note(f"{_TRANSCEIVER}.backend: {backend}", backend.upper())

    def _flag(self, key: str) -> bool:
        value = self.values.pop(key)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} is {value!r}: expected true or false", field=key)
        return value

    def _put(self, old: str, new: str, value: Any) -> None:
        *parents, last = new.split(".")
        level = self.values
        for parent in parents:
            if level.get(parent) is None:
                level[parent] = {}
            level = level[parent]
            if not isinstance(level, dict):
                raise ConfigError(f"{self.where}: {parent} is {level!r}: expected a mapping (key: value)", field=parent)
        self._agree(old, new, last not in level or level[last] == value)
        level[last] = value
        self._note(old, f"{new}: {'true' if value is True else 'false' if value is False else value}")

    def _agree(self, old: str, new: str, agrees: bool) -> None:
        if not agrees:
            raise ConfigError(f"{self.where}: {old} and {new} disagree; keep {new}", field=old)

    def _note(self, old: str, new: str) -> None:
        self.notes.append(f"{self.where}: {old} is an old spelling; taken as {new}")
