"""The one importer of `tensorrt_llm`: binds the names the engine uses and settles what differs between releases, once.

Importing this module does not import the vendor; `load_bindings` does. Nothing is looked up per request.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.engines.external import construct
from dynamo_trtllm.engines.trtllm.api_manifests import ApiManifest, Presence, release_for
from dynamo_trtllm.engines.trtllm.requests import TrtllmCall
from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

PACKAGE = "tensorrt_llm"
_LIBRARY = "TensorRT-LLM"
INSTALL = "pip install tensorrt-llm on a machine with NVIDIA GPUs, or run in NVIDIA's TensorRT-LLM container"

# Each class and the modules that may have it: releases moved some, and re-export others.
_WHERE: Mapping[str, tuple[str, ...]] = {
    "LLM": ("tensorrt_llm", "tensorrt_llm.llmapi"),
    "SamplingParams": ("tensorrt_llm", "tensorrt_llm.sampling_params"),
    "DisaggregatedParams": ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm.disaggregated_params"),
    "GuidedDecodingParams": ("tensorrt_llm.llmapi", "tensorrt_llm.sampling_params"),
    "CompletionOutput": ("tensorrt_llm.llmapi", "tensorrt_llm.executor.result"),
    "RequestError": ("tensorrt_llm.executor.utils", "tensorrt_llm.executor"),
}
_WHERE_OPTIONAL: Mapping[str, tuple[str, ...]] = {"Logprob": ("tensorrt_llm.executor.result",)}

# Every name the engine touches, by owner. Without one of NEEDED it does not start.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "LLM": ("generate_async", "get_stats", "shutdown"),
    "LLM.generate_async": ("inputs", "sampling_params", "streaming", "disaggregated_params"),
    "SamplingParams": (
        "end_id",
        "max_tokens",
        "stop_token_ids",
        "include_stop_str_in_output",
        "embedding_bias",
        "top_k",
        "top_p",
        "seed",
        "temperature",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "min_p",
        "logprobs",
        "guided_decoding",
        "ignore_eos",
        "detokenize",
    ),
    "DisaggregatedParams": (
        "request_type",
        "first_gen_tokens",
        "ctx_request_id",
        "opaque_state",
        "draft_tokens",
    ),
    "GuidedDecodingParams": ("json", "json_object", "structural_tag"),
    "CompletionOutput": ("token_ids", "logprobs", "finish_reason", "stop_reason", "disaggregated_params"),
}
# What is used where the installed release has it.
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "LLM.generate_async": ("cache_salt",),
    "DisaggregatedParams": ("first_gen_log_probs", "disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the installed release can do, as far as the engine asks. Made once at start."""

    release: str  # the manifest's name
    line: str  # what both roles must share: minor line, or the whole version of a pre-release
    disagg_fields: frozenset[str]
    cache_salt: bool
    cached_tokens: bool  # results tell how much of the prompt was reused
    structural_tag_format: bool  # takes the newer {"format": …} form of structural tags


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmBindings:
    """The bound classes. Any: the package has no types that a machine without it could check."""

    version: str
    capabilities: Capabilities
    llm: Callable[..., Any]
    sampling_params: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    guided_decoding_params: Callable[..., Any]
    logprob: Callable[..., Any] | None
    request_error: type[Exception]
    reports_health: bool  # LLM has the health call that TensorRT-LLM's own server uses

    def healthy(self, llm: Any) -> bool:
        """False once the executor is shut down, by us or by a background error. True may still be wrong."""
        return bool(llm._check_health()) if self.reports_health else True

    def arguments(self, call: TrtllmCall, disagg: Mapping[str, Any] | None, *, vocab_size: int) -> dict[str, Any]:
        """Keywords of `generate_async`, by name only: releases insert parameters in the middle.

        Raises RequestRejected for values that the vendor's classes refuse.
        """
        sampling = dict(call.sampling)
        if call.guided is not None:
            sampling["guided_decoding"] = construct(_LIBRARY, self.guided_decoding_params, call.guided)
        if call.bias:
            sampling["embedding_bias"] = _bias(call.bias, vocab_size)
        keywords = {
            "inputs": call.prompt,
            "sampling_params": construct(_LIBRARY, self.sampling_params, sampling),
            "streaming": call.streaming,
        }
        if disagg is not None:
            keywords["disaggregated_params"] = construct(_LIBRARY, self.disaggregated_params, disagg)
        if call.cache_salt is not None:
            keywords["cache_salt"] = call.cache_salt
        return keywords


def installed() -> bool:
    """Whether the package can be found, without importing it: that takes long, and reads the environment."""
    return importlib.util.find_spec(PACKAGE) is not None


def installed_version() -> str:
    """Without importing it where pip knows. Raises ConfigError when it is not installed."""
    if not installed():
        raise ConfigError(f"the trtllm engine needs TensorRT-LLM; {INSTALL}", field="engine")
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return str(_import(PACKAGE).__version__)


def load_bindings() -> TrtllmBindings:
    """Imports the package: seconds, and the environment must be set before. Raises ConfigError for what it lacks."""
    package = _import(PACKAGE)
    version = str(package.__version__)
    found = {name: _find(name, modules) for name, modules in _WHERE.items()}
    has = {owner: _names(owner, found) for owner in {**NEEDED, **OPTIONAL}}
    check_needed(has, version)
    release = release_for(version)
    _note_differences(release, has)
    return TrtllmBindings(
        version=version,
        capabilities=_capabilities(release, version, has),
        llm=found["LLM"],
        sampling_params=found["SamplingParams"],
        disaggregated_params=found["DisaggregatedParams"],
        guided_decoding_params=found["GuidedDecodingParams"],
        logprob=_find_optional("Logprob"),
        request_error=found["RequestError"],
        reports_health=hasattr(found["LLM"], "_check_health"),
    )


def check_needed(has: Mapping[str, frozenset[str]], version: str) -> None:
    """Raises ConfigError naming everything of NEEDED that the installed package lacks."""
    lacking = [f"{owner}.{name}" for owner, names in NEEDED.items() for name in names if name not in has[owner]]
    if lacking:
        raise ConfigError(
            f"TensorRT-LLM {version} lacks what this engine calls: {', '.join(lacking)}; "
            "install a release from 1.0.0 on, or a dynamo_trtllm made for this one",
            field="engine",
        )


def release_line(version: str) -> str:
    """1.2 for 1.2.1; a pre-release stands for itself, because candidates of one line differ."""
    version = version.partition("+")[0]
    major, minor, *rest = version.split(".")
    final = all(part.isdigit() for part in rest)
    return f"{major}.{minor}" if final else version


def _capabilities(release: ApiManifest, version: str, has: Mapping[str, frozenset[str]]) -> Capabilities:
    known = {*NEEDED["DisaggregatedParams"], *OPTIONAL["DisaggregatedParams"]}
    return Capabilities(
        release=release.name,
        line=release_line(version),
        disagg_fields=has["DisaggregatedParams"] & known,
        cache_salt="cache_salt" in has["LLM.generate_async"],
        cached_tokens=not release.name.startswith(("1.0", "1.1")),
        structural_tag_format=not release.name.startswith(("1.0", "1.1")),
    )


def _note_differences(release: ApiManifest, has: Mapping[str, frozenset[str]]) -> None:
    """Says where the installed package is not what its release was read to be: the package is believed."""
    for owner, names in OPTIONAL.items():
        for name in names:
            read = release.presence(owner, name)
            if read is not Presence.NOT_READ and (name in has[owner]) is not (read is Presence.PRESENT):
                state = "has" if name in has[owner] else "lacks"
                _log.warning("TensorRT-LLM %s %s %s.%s, unlike the release as read", release.name, state, owner, name)


def _bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> Any:
    import torch  # comes with TensorRT-LLM

    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    for token, value in bias:
        tensor[token] += value
    return tensor


def _names(owner: str, found: Mapping[str, Any]) -> frozenset[str]:
    """Parameters of a method; of a class those of its constructor, and its attributes."""
    cls, _, method = owner.partition(".")
    if method:
        return frozenset(inspect.signature(getattr(found[cls], method)).parameters)
    return frozenset(inspect.signature(found[cls]).parameters) | frozenset(dir(found[cls]))


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(
            f"TensorRT-LLM can't be imported ({exc}); {INSTALL}, and see that its CUDA and MPI libraries are found",
            field="engine",
        ) from exc


def _find(name: str, modules: Iterable[str]) -> Any:
    for module in modules:
        if importlib.util.find_spec(module) is not None and hasattr(found := _import(module), name):
            return getattr(found, name)
    raise ConfigError(
        f"TensorRT-LLM has no {name} in {', '.join(modules)}; install a release from 1.0.0 on", field="engine"
    )


def _find_optional(name: str) -> Any:
    for module in _WHERE_OPTIONAL[name]:
        if importlib.util.find_spec(module) is not None:
            return getattr(_import(module), name, None)
    return None
