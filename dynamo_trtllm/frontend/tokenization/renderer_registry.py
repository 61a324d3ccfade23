"""Create the renderer of a model card.

`renderer_for` imports the libraries of a format at its first use.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.models.parser_names import PARSERS
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import ModelDeploymentCard


def renderer_for(card: ModelDeploymentCard, files: Mapping[str, bytes]) -> Renderer:
    """Create the renderer of a model card.

    The call takes up to 1 s, so do not run it on an event loop.

    Args:
        card: the model card; it names renderer and parsers.
        files: contents of the model's files by name.

    Raises:
        ConfigError: a renderer or parser does not exist, or a file is missing or can't be parsed.
    """
    parsers = PARSERS.get(card.renderer)
    if parsers is None:
        raise ConfigError(
            f"model {card.name!r} needs the renderer {card.renderer!r}; this version has only"
            f" {' and '.join(PARSERS)}",
            field="renderer",
        )
    chosen = {name: getattr(card, name) for name in parsers}
    for name, known in parsers.items():
        if chosen[name] not in known:
            raise ConfigError(
                f"model {card.name!r} needs the {name} {chosen[name]!r}, which the renderer"
                f" {card.renderer} does not have; choose one of {', '.join(known)}",
                field=name,
            )
    if card.renderer == "harmony":
        from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer

        return HarmonyRenderer(**chosen)
    from dynamo_trtllm.frontend.tokenization.template import ChatTemplateRenderer

    return ChatTemplateRenderer(files, stop_token_ids=card.eos_token_ids, **chosen)
