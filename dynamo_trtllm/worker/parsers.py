"""The parsers that a worker puts on its model's card: what its flags say, or what the model's format brings."""

from __future__ import annotations

import json
from pathlib import Path

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.checkpoint import CONFIG, renderer_of
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.render.formats import PARSERS


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
