"""Translate deprecated arguments of `LLM` into those of current releases."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.config.layers import Source
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.protocol.errors import ConfigError

_LEGACY_SECTION = "pytorch_backend_config"
_TRANSCEIVER = "cache_transceiver_config"


def translate(source: Source, notes: list[str]) -> Source:
    """Return one source with current keys instead of deprecated ones.

    Args:
        source: the source.
        notes: receives a line for each deprecated key.

    Raises:
        ConfigError: a deprecated key and its replacement have different values.
    """
    work = _ArgumentTranslation(copy.deepcopy(dict(source.values)), source.name, notes)
    if isinstance(work.values.get(_LEGACY_SECTION), Mapping):
        for key, value in work.values.pop(_LEGACY_SECTION).items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{source.name}: key {key!r} of {_LEGACY_SECTION} is not text; quote it",
                    field=_LEGACY_SECTION,
                )
            work.put(f"{_LEGACY_SECTION}.{key}", key, value)
    for old, new in LIBRARY.moved.items():
        work.move(old, new)
    work.translate_graphs()
    overlaps = work.pop_flag("enable_overlap_scheduler")
    if overlaps is not None:
        work.put("enable_overlap_scheduler", "disable_overlap_scheduler", not overlaps)
    work.capitalize_backend()
    if work.values.get("backend") == "pytorch":
        del work.values["backend"]  # the engine sets it
    return source._replace(values=work.values)


class _ArgumentTranslation(NamedTuple):
    """State of one translation."""

    values: dict[str, Any]
    where: str
    notes: list[str]

    def move(self, old: str, new: str) -> None:
        """Move the value of a key, if it is set, to the key that replaces it."""
        parent, _, last = old.rpartition(".")
        level = self.values.get(parent) if parent else self.values
        if isinstance(level, dict) and last in level:
            self.put(old, new, level.pop(last))

    def translate_graphs(self) -> None:
        """Translate `use_cuda_graph`. The value false becomes `cuda_graph_config: null`. The value
        true is the default.
        """
        is_on = self.pop_flag("use_cuda_graph")
        if is_on:
            current = self.values.setdefault("cuda_graph_config", {})
            self._agree("use_cuda_graph", "cuda_graph_config", current is not None)
            self._note("use_cuda_graph", "cuda_graph_config, which is on by default")
        elif is_on is not None:
            current = self.values.get("cuda_graph_config")
            self._agree("use_cuda_graph", "cuda_graph_config", current is None)
            self.values["cuda_graph_config"] = None
            self._note("use_cuda_graph", "cuda_graph_config: null")

    def capitalize_backend(self) -> None:
        """Write the transceiver's backend in capitals, as current releases do."""
        level = self.values.get(_TRANSCEIVER)
        backend = level.get("backend") if isinstance(level, dict) else None
        if isinstance(level, dict) and isinstance(backend, str) and backend != backend.upper():
            level["backend"] = backend.upper()
            self._note(f"{_TRANSCEIVER}.backend: {backend}", backend.upper())

    def pop_flag(self, key: str) -> bool | None:
        """Remove a key, and return its value; None if it is not set."""
        if key not in self.values:
            return None
        value = self.values.pop(key)
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{self.where}: {key} is {value!r}: expected true or false", field=key)

    def put(self, old: str, new: str, value: Any) -> None:
        """Set the key `new` to a value that came from the deprecated key `old`."""
        *parents, last = new.split(".")
        level = self.values
        for parent in parents:
            if level.get(parent) is None:
                level[parent] = {}
            level = level[parent]
            if not isinstance(level, dict):
                raise ConfigError(
                    f"{self.where}: {parent} is {level!r}: expected a mapping (key: value)",
                    field=parent,
                )
        self._agree(old, new, last not in level or level[last] == value)
        level[last] = value
        # Booleans are shown as YAML writes them.
        shown = str(value).lower() if isinstance(value, bool) else value
        self._note(old, f"{new}: {shown}")

    def _agree(self, old: str, new: str, agrees: bool) -> None:
        if not agrees:
            raise ConfigError(
                f"{self.where}: {old} and {new} have different values. Remove {old}.", field=old
            )

    def _note(self, old: str, new: str) -> None:
        self.notes.append(f"{self.where}: {old} is deprecated; use {new}")
