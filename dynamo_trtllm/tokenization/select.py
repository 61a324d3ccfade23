"""Create the renderer that a model card names. Its libraries are imported at first use."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import ModelDeploymentCard
from dynamo_trtllm.tokenization.base import PARSERS, Renderer


def renderer_for(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """Create the renderer of a model card. The call takes up to 1 s, so do not run it on an event loop.

    Args:
        card: The model card; it names renderer and parsers.
        files: Contents of the model's files by name.

    Raises:
        ConfigError: A renderer or parser does not exist, or a file is missing or can't be parsed.
    """
    for field, known in PARSERS.get(card.renderer, {}).items():
        if getattr(card, field) not in known:
            raise ConfigError(
                f"model {card.name!r} needs the {field} {getattr(card, field)!r}, which the renderer {card.renderer} "
                f"does not have; choose one of {', '.join(known)}",
                field=field,
            )
    match card.renderer:
        case "harmony":
            from dynamo_trtllm.tokenization.harmony import HarmonyRenderer

            return HarmonyRenderer(reasoning_parser=card.reasoning_parser, tool_call_parser=card.tool_call_parser)
        case "chat_template":
            from dynamo_trtllm.tokenization.template import ChatTemplateRenderer

            return ChatTemplateRenderer(
                files,
                stop_token_ids=card.eos_token_ids,
                reasoning_parser=card.reasoning_parser,
                tool_call_parser=card.tool_call_parser,
            )
        case other:
            raise ConfigError(
                f"model {card.name!r} needs the renderer {other!r}; this version has only harmony and chat_template",
                field="renderer",
            )
