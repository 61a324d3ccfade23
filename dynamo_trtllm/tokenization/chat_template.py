"""A model's jinja chat templates, sandboxed, with the names that Hugging Face templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo_trtllm.errors import ConfigError, InvalidRequest

_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
# what the code of a template can raise on a conversation it was not written for
_TEMPLATE_FAULTS: Final = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


class ChatTemplates:
    """The templates of one model. Raises ConfigError for one that is no jinja."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self.variables: frozenset[str] = frozenset()  # that any of them reads
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self.variables |= meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as exc:
                raise ConfigError(f"chat template {name!r} is not valid: {exc}") from exc

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text. Raises InvalidRequest with the template's own message."""
        template = self._templates.get(_WITH_TOOLS) if variables.get("tools") else None
        template = template or self._templates.get(_DEFAULT)
        if template is None:
            raise InvalidRequest("this model has no chat template: only /v1/completions works for it")
        try:
            return template.render(variables)
        except _TEMPLATE_FAULTS as exc:
            raise InvalidRequest(f"the model's chat template refused the messages: {exc}", field="messages") from exc


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like jinja's filter of this name, without its HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
