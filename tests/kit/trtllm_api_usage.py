"""Records every name of TensorRT-LLM's API that the adapter uses while it runs on the fake
TensorRT-LLM.

Records attributes, keywords and methods that `dynamo_trtllm.engines.trtllm` uses, by the class of
TensorRT-LLM that defines them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

ADAPTER = ("dynamo_trtllm.engines.trtllm", "dynamo_trtllm.engines.external")
Uses = set[tuple[str, str]]  # (class or method, name)


@contextmanager
def record_usage(package: Any, uses: Uses) -> Iterator[None]:
    """Add all uses of `package` (the fake) to `uses` during the context."""
    classes = {
        "LLM": package.llmapi.LLM,
        "SamplingParams": package.SamplingParams,
        "DisaggregatedParams": package.DisaggregatedParams,
        "GuidedDecodingParams": package.llmapi.GuidedDecodingParams,
        "CompletionOutput": package.llmapi.CompletionOutput,
        "GenerationResult": package.llmapi.RequestOutput,
        "RequestPerfMetrics": package.executor.result.RequestPerfMetrics,
        "TokenLogprobs": package.executor.result.Logprob,  # the name in the manifests
    }
    with pytest.MonkeyPatch.context() as patched:
        for owner, cls in classes.items():
            _note_attributes(patched, cls, owner, uses)
            _note_keywords(
                patched, cls, "__init__", "TorchLlmArgs" if owner == "LLM" else owner, uses
            )
        reads = [
            f"{name}{form}"
            for name in ("get_stats", "get_kv_cache_events")
            for form in ("", "_async")
        ]
        for method in ("generate_async", *reads, "shutdown"):
            _note_keywords(patched, package.llmapi.LLM, method, f"LLM.{method}", uses)
        yield


def _is_adapter(depth: int) -> bool:
    return str(sys._getframe(depth + 1).f_globals.get("__name__", "")).startswith(ADAPTER)


def _note_attributes(patched: pytest.MonkeyPatch, cls: type, owner: str, uses: Uses) -> None:
    plain = cls.__getattribute__

    def noted(self: Any, name: str) -> Any:
        if _is_adapter(1) and not name.startswith("__"):
            uses.add((owner, name))
        return plain(self, name)

    patched.setattr(cls, "__getattribute__", noted)


def _note_keywords(
    patched: pytest.MonkeyPatch, cls: type, method: str, owner: str, uses: Uses
) -> None:
    plain = getattr(cls, method)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_adapter(1):
            assert not args, (
                f"{owner} is called by position, but releases insert parameters in the middle"
            )
            uses.update(_keywords(owner, kwargs))
        return plain(self, *args, **kwargs)

    noted.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
    patched.setattr(cls, method, noted)


def _keywords(owner: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in given:
        yield owner, name
