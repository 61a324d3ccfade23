"""Define the tools of `POST /v1/responses`, and which functions the model sees for them.

Tools that the client runs are served as functions. For all other tools, see `hosted_tools`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from dynamo_trtllm.frontend.api import chat, custom_tools
from dynamo_trtllm.frontend.api.hosted_tools import HOSTED, HostedTool, tag_of, without_hosted
from dynamo_trtllm.frontend.api.request_model import Id, List, RequestModel, invalid
from dynamo_trtllm.frontend.api.schemas import ToolSchema
from dynamo_trtllm.frontend.tokenization.text_input import SCHEMA

Kind = Literal["function", "custom", "local_shell"]
LOCAL_SHELL: Final = "local_shell"  # name of its function
_IN_NAMESPACE: Final = ("function", "custom")  # types of tools that a namespace may contain
_SERVED: Final = (*_IN_NAMESPACE, "local_shell", "namespace")  # types of tools that are served
# The fields of OpenAI's `local_shell_call.action`.
_LOCAL_SHELL_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class ServedTool(NamedTuple):
    """A function that the model sees, and what its calls are for the client."""

    name: str  # qualified by its namespace
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool
    kind: Kind
    own_name: str  # the name in the request, without the namespace
    namespace: str | None = None
    is_text: bool = False  # the input of the tool is a text that follows no grammar


class ResponsesFunctionTool(RequestModel):
    # These change nothing: the prompt contains all tools, only the model calls them, and their
    # results are not checked.
    hints: ClassVar = frozenset({"defer_loading", "allowed_callers", "output_schema"})
    no_ops: ClassVar = {"async": (False,)}

    type: Literal["function"]
    name: chat.FunctionName
    description: chat.Description = ""
    strict: bool = False  # declared before `parameters`, whose check reads it
    parameters: ToolSchema = Field(default_factory=dict)


class GrammarFormat(custom_tools.Grammar):
    type: Literal["grammar"]


class CustomTool(RequestModel):
    """A tool whose input is a text."""

    hints: ClassVar = frozenset({"defer_loading"})

    type: Literal["custom"]
    name: chat.Name
    description: chat.Description = ""
    format: Annotated[custom_tools.AnyText | GrammarFormat, Discriminator("type")] = (
        custom_tools.AnyText()
    )

    def shown_description(self) -> str:
        """Return the description that the model sees, with the grammar of the input."""
        grammar = self.format if isinstance(self.format, GrammarFormat) else None
        return custom_tools.described(self.description, grammar)


class LocalShellTool(RequestModel):
    """A shell of the client."""

    type: Literal["local_shell"]


_Function = Annotated[ResponsesFunctionTool, Tag("<function>")]
_Custom = Annotated[CustomTool, Tag("<custom>")]
_Hosted = Annotated[HostedTool, Tag(HOSTED)]
_InNamespace = Annotated[
    _Function | _Custom | _Hosted,
    Discriminator(tag_of(*_IN_NAMESPACE)),
    BeforeValidator(without_hosted(*_IN_NAMESPACE)),
]


class NamespaceTool(RequestModel):
    """Tools under one name."""

    type: Literal["namespace"]
    name: chat.Name
    description: chat.Description = ""
    tools: List[_InNamespace] = Field(max_length=chat.MAX_TOOLS)


_Namespace = Annotated[NamespaceTool, Tag("<namespace>")]
_LocalShell = Annotated[LocalShellTool, Tag("<local_shell>")]
ToolSent = Annotated[
    _Function | _Custom | _LocalShell | _Namespace | _Hosted,
    Discriminator(tag_of(*_SERVED)),
    BeforeValidator(without_hosted(*_SERVED)),
]
Tools = Annotated[
    List[ToolSent],
    Field(
        max_length=chat.MAX_TOOLS,
        description=f"At most {chat.MAX_TOOLS_BYTES} bytes of JSON together.",
    ),
    chat.ToolsSize,
]


def served_tools(tools: Iterable[Any], namespace: str | None = None) -> Iterator[ServedTool]:
    """Yield the functions that the model sees for the tools of a request."""
    for tool in tools:
        match tool:
            case ResponsesFunctionTool():
                yield ServedTool(
                    name=qualified_name(tool.name, namespace),
                    description=tool.description,
                    parameters=tool.parameters,
                    is_strict=tool.strict,
                    kind="function",
                    own_name=tool.name,
                    namespace=namespace,
                )
            case CustomTool():
                yield ServedTool(
                    name=qualified_name(tool.name, namespace),
                    description=tool.shown_description(),
                    parameters=SCHEMA,
                    is_strict=True,
                    kind="custom",
                    own_name=tool.name,
                    namespace=namespace,
                    is_text=tool.format.type == "text",
                )
            case LocalShellTool():
                yield ServedTool(
                    name=LOCAL_SHELL,
                    description="Runs a command on the user's computer and returns its output.",
                    parameters=_LOCAL_SHELL_SCHEMA,
                    is_strict=True,
                    kind="local_shell",
                    own_name=LOCAL_SHELL,
                )
            case NamespaceTool():
                yield from served_tools(tool.tools, tool.name)


def echoed(tools: Iterable[RequestModel]) -> list[dict[str, Any]]:
    """Return the tools as a response repeats them, without those that were left out."""
    echoes = []
    for tool in tools:
        if isinstance(tool, HostedTool):
            continue
        fields = tool.model_dump()
        if isinstance(tool, NamespaceTool):
            fields["tools"] = echoed(tool.tools)
        echoes.append(fields)
    return echoes


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a function.

    The names of namespaces have no dot. So only functions of gpt-oss's browser can be declared in
    two ways: with a namespace, or with a dot in their name.
    """
    return name if namespace is None else f"{namespace}.{name}"


class NamedTool(RequestModel):
    """A tool that a `tool_choice` names."""

    type: Kind = "function"
    name: Id | None = None
    namespace: Id | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> NamedTool:
        if self.name is None and self.type != "local_shell":
            invalid("is required", field="name")
        return self

    @property
    def function(self) -> str:
        """The name of the function that the model sees for the tool."""
        return qualified_name(self.name or LOCAL_SHELL, self.namespace)
