"""Configuration classes, with the fields that the manifest names and no checks of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY


class _Part(SimpleNamespace):
    def __init__(self, **values: Any) -> None:
        unknown = set(values) - set(LIBRARY.newest.fields(type(self).__name__))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got an unexpected keyword argument {sorted(unknown)[0]!r}"
            )
        super().__init__(**values)


for _name in LIBRARY.newest.owners:
    if _name != LIBRARY.root:
        globals()[_name] = type(_name, (_Part,), {})


class VllmConfig(SimpleNamespace):
    """The configuration that AsyncEngineArgs creates."""
