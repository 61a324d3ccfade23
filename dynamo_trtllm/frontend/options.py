"""What a request asks beside its conversation, whatever its API calls it; and the refusal of what can't be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NoReturn

import msgspec

from dynamo_trtllm.errors import UnsupportedParameter
from dynamo_trtllm.messages import ModelDeploymentCard, Sampling

ANY_OBJECT: Final = "{}"  # the schema that engines take for "any object"
_DEFAULTS = msgspec.structs.asdict(Sampling(max_tokens=0))


class ToolChoiceMode(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    NONE = "none"  # the prompt contains no tools
    REQUIRED = "required"  # one of them, at least
    NAMED = "named"  # the one that is named


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str = ""  # with NAMED
    allowed: tuple[str, ...] | None = None  # the tools in the prompt; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to answer a conversation."""

    sampling: Sampling  # as asked; max_tokens 0: as many as the context allows; `guided` stays unset
    stop: tuple[str, ...] = ()
    n: int = 1
    tool_choice: ToolChoice = ToolChoice()
    strict_tools: frozenset[str] = frozenset()  # whose arguments must be JSON of their schema
    parallel_tool_calls: bool = True
    json_schema: str | None = None  # the answer's text must be JSON of this schema
    cache_salt: str | None = None
    effort_given: bool = False  # the client asked for the conversation's reasoning_effort
    names: Mapping[str, str] = field(default_factory=dict)  # our names of fields -> those of the API, where they differ

    def name(self, field: str) -> str:
        """The API's name of a field, for errors."""
        return self.names.get(field, field)


def reject_unsupported(
    asked: Sampling, cache_salt: str | None, card: ModelDeploymentCard, names: Mapping[str, str]
) -> None:
    """Raises UnsupportedParameter for a field that was set and that the model's engine does not support."""
    for refused in card.refuses:
        given = cache_salt if refused == "cache_salt" else getattr(asked, refused, None)
        if given != _DEFAULTS.get(refused):
            reject(names.get(refused, refused), card)


def reject(name: str, card: ModelDeploymentCard, reason: str = "its engine can't do it") -> NoReturn:
    """`name`: the API's, with a value if only that is refused."""
    raise UnsupportedParameter(
        f"{name} is not supported by {card.name}: {reason}; leave it out", field=name.partition("=")[0]
    )
