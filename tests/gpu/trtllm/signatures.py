"""How an importable `tensorrt_llm` differs from the manifest of the release that it says it is."""

from __future__ import annotations

import inspect
import re
from typing import Any

from dynamo_trtllm.engines.manifests import ApiManifest

_METHODS = ("__init__", "generate_async", "get_stats", "get_stats_async", "shutdown")
_VALUES = ("SamplingParams", "DisaggregatedParams")


def differences(package: Any, release: ApiManifest) -> list[str]:
    """One line for each name that only one of the two has, or whose default differs."""
    found: list[str] = []
    for name in _VALUES:
        found += _names(name, _parameters(getattr(package, name)), release)
    for method in _METHODS:
        owner = f"LLM.{method}"
        if release.fields(owner):
            found += _names(owner, _parameters(getattr(package.LLM, method)), release)
    output = set(dir(package.llmapi.CompletionOutput))
    found += [
        f"CompletionOutput.{name} is missing"
        for name in release.fields("CompletionOutput")
        if name not in output
    ]
    return found


def argument_differences(package: Any, release: ApiManifest) -> list[str]:
    """Of the LLM's arguments and their nested configurations, as pydantic models of the package."""
    found: list[str] = []
    models = vars(package.llmapi.llm_args)
    for owner in release.owners:
        model = models.get(owner)
        if model is not None and hasattr(model, "model_fields"):
            has = {name: _default(field) for name, field in model.model_fields.items()}
            found += _names(owner, has, release)
    return found


_UNKNOWN = object()


def _parameters(target: Any) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters.values()
    return {
        parameter.name: _UNKNOWN
        if parameter.default is inspect.Parameter.empty
        else parameter.default
        for parameter in parameters
        if parameter.name != "self"
        and not re.match(r"_(?!postproc_params|mpi_session)", parameter.name)
    }


def _default(field: Any) -> Any:
    return _UNKNOWN if field.is_required() or field.default_factory is not None else field.default


def _names(owner: str, has: dict[str, Any], release: ApiManifest) -> list[str]:
    read = release.fields(owner)
    new = set() if release.is_in_part(owner) else has.keys() - read.keys()
    found = [f"{owner}.{name} is new" for name in new]
    found += [f"{owner}.{name} is missing" for name in read.keys() - has.keys()]
    for name in has.keys() & read.keys():
        field = read[name]
        plain = isinstance(has[name], (bool, int, float, str, type(None)))
        if (
            has[name] is not _UNKNOWN
            and field.default_known
            and not field.default_is_object
            and plain
        ):
            is_member = isinstance(has[name], str) and str(field.default) in has[name]
            if has[name] != field.default and not is_member:
                found.append(f"{owner}.{name} defaults to {has[name]!r}, read as {field.default!r}")
    return sorted(found)
