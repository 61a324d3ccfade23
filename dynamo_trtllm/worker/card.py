"""What a worker's flags and its model's files put on the model's card: parsers, and how the model is sampled."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

import msgspec

from dynamo_trtllm import demo_models
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.checkpoint import CONFIG, read_sampling_defaults, renderer_of
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import SamplingDefaults
from dynamo_trtllm.tokenization.formats import PARSERS

_log = logging.getLogger(__name__)

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # change nothing


def sampling_defaults(config: WorkerConfig, model: str) -> SamplingDefaults:
    """Return what --generation-config asks for. Reads a file.

    Args:
        config: with `model_path` set to the model's folder.
        model: what the user gave as --model-path, which may be the name of a bundled model.

    Raises ConfigError for a value that can't be.
    """
    if config.generation_config == "none" or config.engine == "mock":  # the mock engine makes no choices
        return SamplingDefaults()
    return demo_models.sampling_defaults(model) or read_sampling_defaults(Path(config.model_path))


def without_refused(defaults: SamplingDefaults, refuses: Collection[str]) -> SamplingDefaults:
    """Return the defaults that the engine supports: another one would make each request fail. Logs what is dropped."""
    dropped = [name for name in defaults.given() if name in refuses]
    if missed := [name for name in dropped if getattr(defaults, name) != _NEUTRAL.get(name)]:
        _log.warning(
            "%s of the model's generation config is not applied: this engine does not support it", ", ".join(missed)
        )
    return msgspec.structs.replace(defaults, **dict.fromkeys(dropped))


def check_flags(config: WorkerConfig) -> None:
    """As `parsers`, before minutes of loading, where the model's folder tells its format."""
    if config.engine == "mock" or (config.dyn_reasoning_parser is None and config.dyn_tool_call_parser is None):
        return
    try:
        model_type = json.loads((Path(config.model_path) / CONFIG).read_bytes())["model_type"]
    except (OSError, ValueError, TypeError, KeyError):
        return  # the engine finds out what kind of model it is, or that it is none
    parsers(config, renderer_of(model_type))


def parsers(config: WorkerConfig, renderer: str) -> dict[str, str]:
    """By field of the card. Raises ConfigError, naming the flag, for one that the model's format does not have."""
    return {field: _parser(config, renderer, field) for field in ("reasoning_parser", "tool_call_parser")}


def _parser(config: WorkerConfig, renderer: str, field: str) -> str:
    known = PARSERS[renderer][field]
    chosen = getattr(config, f"dyn_{field}")
    if chosen is None:
        return known[0]
    if chosen not in known:
        flag = f"--dyn-{field.replace('_', '-')}"
        writes = "writes Harmony" if renderer == "harmony" else "has a chat template"
        raise ConfigError(
            f"{flag} {chosen}: this model {writes}, for which there are {', '.join(known)}; "
            "choose one or leave the flag out",
            field=f"dyn_{field}",
        )
    return str(chosen)
