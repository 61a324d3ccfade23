"""The parsers that a worker puts on its model's card: what its flags say, or what the model's format brings."""

from __future__ import annotations

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.render.formats import PARSERS


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
