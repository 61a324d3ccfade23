"""Which renderer a model card names. Its libraries are imported when the first card asks for them, not before."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import ModelDeploymentCard
from dynamo_trtllm.tokenization.base import PARSERS, Renderer


def renderer_for(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """The renderer of this card, made of its files (name -> content). Takes up to a second: not on an event loop.

    Raises ConfigError for a renderer or a parser that does not exist and for a file that is missing or broken.
    """
    for field, known in PARSERS.get(card.renderer, {}).items():
        if getattr(card, field) not in known:
            raise ConfigError(
                f"model {card.name!r} asks for the {field} {getattr(card, field)!r}; with the renderer "
                f"{card.renderer} this version has {', '.join(known)}",
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
                f"model {card.name!r} asks for the renderer {other!r}; this version has harmony and chat_template",
                field="renderer",
            )
