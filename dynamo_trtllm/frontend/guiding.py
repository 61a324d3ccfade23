"""Tool choice and answer format → what is put after the prompt, and what the engine is held to."""

from __future__ import annotations

import json
from typing import NamedTuple

from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.models import ServedModel
from dynamo_trtllm.frontend.options import CallMode, Options, refuse
from dynamo_trtllm.messages import Guided, GuidedAlternative, TokenIds, Tool, token_ids
from dynamo_trtllm.render.base import NOTHING_FORCED


class Guiding(NamedTuple):
    forced: TokenIds = NOTHING_FORCED  # put after the prompt, as if the model had written it
    guided: Guided | None = None


def tools_told(tools: tuple[Tool, ...], options: Options) -> tuple[Tool, ...]:
    """The tools that go into the prompt. Raises InvalidRequest for a choice among tools that are not there."""
    choice = options.tool_choice
    known = {tool.name for tool in tools}
    wanted = (choice.name,) if choice.mode is CallMode.NAMED else choice.allowed or ()
    for name in wanted:
        if name not in known:
            raise InvalidRequest(
                f"{options.name('tool_choice')} names the function {name!r}, which is not among the tools",
                field=options.name("tool_choice"),
            )
    if choice.mode is CallMode.REQUIRED and not tools:
        raise InvalidRequest(
            f"{options.name('tool_choice')} is 'required' and there are no tools", field=options.name("tool_choice")
        )
    if choice.mode is CallMode.NONE:
        return ()
    return tools if choice.allowed is None else tuple(tool for tool in tools if tool.name in choice.allowed)


def guiding(tools: tuple[Tool, ...], options: Options, served: ServedModel) -> Guiding:
    """`tools`: those the model is told of. Raises UnsupportedParameter for what format or engine can't do."""
    choice = options.tool_choice
    if choice.mode is CallMode.AUTO and options.strict_tools.intersection(tool.name for tool in tools):
        refuse(options.name("tools") + ".strict", served.card, "it is honoured when tool_choice demands a call")
    if choice.mode is CallMode.NAMED:
        return _one_call(next(tool for tool in tools if tool.name == choice.name), options, served)
    if choice.mode is CallMode.REQUIRED:
        return _one_call(tools[0], options, served) if len(tools) == 1 else _some_call(tools, options, served)
    if options.json_schema is not None:
        return _json_answer(options.json_schema, bool(tools), options, served)
    return Guiding()


def _one_call(tool: Tool, options: Options, served: ServedModel) -> Guiding:
    header = served.renderer.call_header(tool.name)
    if header is None:
        refuse(options.name("tool_choice"), served.card, "its chat template has no form of a call that can be forced")
    if tool.name not in options.strict_tools:
        return Guiding(forced=header)
    _check_guidable(options, "tool_choice", served)
    return Guiding(forced=header, guided=Guided(alternatives=(GuidedAlternative(json_schema=_schema(tool)),)))


def _some_call(tools: tuple[Tool, ...], options: Options, served: ServedModel) -> Guiding:
    """The header is forced up to the name, the rest of it and the arguments are guided."""
    opening = served.renderer.call_header(None)
    if opening is None:
        refuse(options.name("tool_choice"), served.card, "its chat template has no form of a call that can be forced")
    _check_guidable(options, "tool_choice", served)
    alternatives = []
    for tool in tools:
        header = served.renderer.call_header(tool.name)
        assert header is not None  # as `opening` is there
        literal = served.renderer.decode(header).removeprefix(served.renderer.decode(opening))
        alternatives.append(GuidedAlternative(literal=literal, json_schema=_schema(tool)))
    return Guiding(forced=opening, guided=Guided(alternatives=tuple(alternatives)))


def _json_answer(json_schema: str, has_tools: bool, options: Options, served: ServedModel) -> Guiding:
    _check_guidable(options, "response_format", served)
    spelled, ids = served.renderer.answer_header()
    if not ids:
        if has_tools:
            refuse(options.name("response_format"), served.card, "it can't be combined with tools there")
        return Guiding(guided=Guided(alternatives=(GuidedAlternative(json_schema=json_schema),)))
    # the header's last token is forced: models also write "final <|constrain|>json" and must not slip out by it
    before, last = ids[:-1], served.renderer.decode(ids[-1:])
    alternative = GuidedAlternative(literal=last, json_schema=json_schema)
    after = spelled.removesuffix(last)
    return Guiding(guided=Guided(alternatives=(alternative,), after=after, after_ids=token_ids(before)))


def _check_guidable(options: Options, field: str, served: ServedModel) -> None:
    """What makes the model go on can't be held together with a form that ends."""
    name = options.name(field)
    if "guided" in served.card.refuses:
        refuse(name, served.card, "its engine has no guided decoding")
    for other in ("ignore_eos", "min_tokens"):
        if getattr(options.sampling, other):
            raise InvalidRequest(
                f"{options.name(other)} can't be used with this {name}, whose output ends by its form; leave it out",
                field=options.name(other),
            )


def _schema(tool: Tool) -> str:
    return json.dumps(dict(tool.parameters) or {"type": "object"})
