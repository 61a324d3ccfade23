"""Define a model that a frontend serves: its card and its renderer."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.protocol.messages import ModelDeploymentCard


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose files are loaded."""

    card: ModelDeploymentCard
    renderer: Renderer
    # Whether the prompt format writes the names of messages, by role and by whether there are
    # tools; filled on demand.
    writes_names: dict[tuple[str, bool], bool] = field(default_factory=dict, compare=False)
