"""Leave out the tools that a server would run, such as web search: this server runs none.

A client that lists such tools by default can do without them. So these tools are reported as
ignored, and all other tools are served. Only a `tool_choice` that demands such a tool is an error.
This applies to chat, responses and messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from pydantic import ConfigDict, ValidationInfo

from dynamo_trtllm.frontend.api.request_model import (
    Label,
    RequestModel,
    invalid,
    kind_of,
    quoted,
    unsupported,
)
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields

HOSTED: Final = "<hosted>"  # tag of HostedTool in unions


class HostedTool(RequestModel):
    """A tool that is left out. All its fields are accepted."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    type: Label
    name: Label | None = None  # a `tool_choice` of Anthropic's API demands the tool by its name


def without_hosted(
    *served: str, default: str | None = None
) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator of one tool, which keeps only the type and the name of a hosted tool.

    A type that is not served is treated like an unknown field. With `--unknown-fields reject`, it
    is an error; otherwise, it is an error only if it is a misspelled type of `served`.

    Args:
        served: the types of tools that are served.
        default: the type of a tool that has no type. None: such a tool is an error.
    """

    known = frozenset(served)

    def checked(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            invalid(f"must be an object, not {kind_of(value)}")
        kind = value.get("type")
        if kind is None:
            kind = default
        if kind is None:
            invalid("is required", field="type")
        if not isinstance(kind, str):
            invalid(f"must be a string, not {kind_of(kind)}", field="type")
        if kind in served:
            return value
        ignored: IgnoredFields | None = info.context
        # Unknown fields are rejected.
        if ignored is None:
            unsupported(
                f"{quoted(kind)} is not supported; use {' or '.join(map(repr, served))}",
                field="type",
            )
        meant = ignored.meant(kind, known)
        if meant is not None:
            unsupported(f"{quoted(kind)} is not known; did you mean {meant!r}?", field="type")
        ignored.add((f"tools.{kind}",))
        name = value.get("name")
        return {"type": kind, "name": name if isinstance(name, str) else None}

    return checked


def reject_demanded(kind: str, field: str | None = None) -> NoReturn:
    """Reject a `tool_choice` that demands a hosted tool.

    Args:
        kind: the type or the name of the tool.
        field: the name of the field. None if the validator of the field itself calls this, because
            the error then belongs to the field anyway.
    """
    unsupported(f"demands {quoted(kind)}, which this server does not run; name a function", field)


def tag_of(*served: str, default: str | None = None) -> Callable[[Any], str]:
    """Return a function that returns the tag of a tool in a union, before and after it is parsed.

    Arguments as for `without_hosted`.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None:
            kind = default
        return f"<{kind}>" if kind in served else HOSTED

    return tag
