"""Limit the output formats of a request before an engine compiles them.

Compilers of structured output recurse over nesting and references, write repetitions out, and
replace the names of rules by their content. So a format of a few kB can overflow a stack, or take
minutes. The limits are far above what clients send, and below what crashes llguidance or xgrammar.
The time to check a format is proportional to its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from dynamo_trtllm.frontend.requests.format_graph import Graph, components, longest_path
from dynamo_trtllm.frontend.requests.format_syntax import (
    MAX_GROUPS,
    GrammarSyntax,
    grammar_modes,
    read_grammar,
    read_regex,
)
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from dynamo_trtllm.protocol.number_text import is_digits

_WRITTEN_OUT: Final = "symbols with repetitions and rules written out"
_GROUPS: Final = "nesting of groups"
_LEVELS: Final = "nesting of objects with references followed"
_COUNT_LIMIT: Final = "minItems, maxItems, minContains, minProperties and maxProperties"
LIMITS: Final = {
    # Limits of all formats of a request together:
    "rules": 1_000,
    "lines": 4_000,
    "patterns": 100,
    "properties": 5_000,
    # Limits of each single place in a format:
    _GROUPS: MAX_GROUPS,
    _WRITTEN_OUT: 100_000,
    "quantifiers of a regular expression": 100,
    _LEVELS: 1_000,
    "properties of an object": 500,
    "patternProperties": 64,
    _COUNT_LIMIT: 10_000,
    "multipleOf": 1_000,
}
"""The limits by name. Errors and docs/request-limits.md use these names."""

_HUGE: Final = 10**12  # larger sizes count as this value, so that numbers stay small
_COUNT_KEYWORDS: Final = (
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)


def check_formats(guided: StructuredOutput, field: str) -> None:
    """Raise InvalidRequest if the formats of a request exceed a limit.

    `field`: the API's name of their field.
    """
    usage = _Usage(field)
    part: StructuredOutput | None = guided
    while part is not None:
        for alternative in part.alternatives:
            _add_format(alternative, usage)
        part = part.otherwise


class _Usage:
    """What the formats of a request use of each limit."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._totals = dict.fromkeys(LIMITS, 0)

    def add(self, limit: str, value: int) -> None:
        """Count `value` towards a limit for all formats together."""
        self._totals[limit] += value
        self.check(limit, self._totals[limit])

    def check(self, limit: str, value: int | Fraction) -> None:
        """Raise InvalidRequest if `value` exceeds a limit for one place."""
        if value > LIMITS[limit]:
            shown = str(value) if value < _HUGE else f"at least {_HUGE}"
            self.reject(
                f"exceeds the limit for {limit}: {shown}, at most {LIMITS[limit]} are allowed;"
                " simplify it"
            )

    def reject(self, text: str) -> NoReturn:
        """Raise InvalidRequest. `text`: what is wrong with the format, after its name."""
        raise InvalidRequest(f"the format in {self._field} {text}", field=self._field)


def _add_format(alternative: OutputFormat, usage: _Usage) -> None:
    if alternative.grammar:
        _add_grammar(alternative.grammar, usage)
    elif alternative.regex:
        _add_regex(alternative.regex, usage)
    else:
        _add_schema(json.loads(alternative.json_schema), usage)


def _add_regex(text: str, usage: _Usage) -> None:
    regex = read_regex(text)
    if regex.is_verbose:
        usage.reject(
            "has a regular expression with the flag x; leave out its comments, its blanks and the"
            " flag"
        )
    usage.check(_GROUPS, regex.depth)
    usage.check(_WRITTEN_OUT, regex.size)
    usage.check("quantifiers of a regular expression", regex.quantifiers)


# --- grammars -------------------------------------------------------------------------------------


def _add_grammar(text: str, usage: _Usage) -> None:
    usage.add("lines", text.count("\n") + 1)
    for mode in grammar_modes(text):
        grammar = read_grammar(text, mode)
        usage.add("rules", len(grammar.rules))
        usage.check(_GROUPS, grammar.depth)
        usage.check(_WRITTEN_OUT, _written_out(grammar))
        for regex in grammar.regexes:
            _add_regex(regex, usage)
        for schema in grammar.schemas:
            _add_schema(schema, usage)


def _written_out(grammar: GrammarSyntax) -> int:
    """Return the size of the largest rule when the rules that it names are put in their places.

    A rule that contains itself can't be written out: within a group of such rules, each name counts
    as one symbol.
    """
    rules = grammar.rules
    graph: Graph = {
        name: [used for used in rule.uses if used in rules] for name, rule in rules.items()
    }
    sizes: dict[str, int] = {}
    # `components` yields a rule after the rules that it names.
    for group in components(graph):
        group_sizes = {}
        for name in group:
            total = rules[name].size
            for used, times in rules[name].uses.items():
                total += times * sizes.get(used, 1)
            group_sizes[name] = min(total, _HUGE)
        sizes |= group_sizes
    return max(sizes.values(), default=0)


# --- JSON Schemas ---------------------------------------------------------------------------------


def _add_schema(schema: Any, usage: _Usage) -> None:
    multiples: set[Fraction] = set()
    is_combined = False
    # Objects are named by their `id()`, because they can't be keys.
    children: dict[int, list[int]] = {}
    references: dict[int, int] = {}  # from an object to the object that its $ref refers to
    targets: dict[str, Any] = {}  # the values that references refer to, by the text of $ref
    for node in _objects(schema):
        _check_object(node, usage)
        _add_patterns(node, usage)
        multiple = _multiple(node)
        if multiple is not None:
            multiples.add(multiple)
        reference = node.get("$ref")
        is_combined = is_combined or "allOf" in node or isinstance(reference, str)
        children[id(node)] = [id(child) for child in _children(node)]
        if isinstance(reference, str):
            if reference not in targets:
                targets[reference] = _resolved(schema, reference)
            if isinstance(targets[reference], dict):
                references[id(node)] = id(targets[reference])
    usage.check(_LEVELS, longest_path(children, references))
    for multiple in multiples:
        usage.check("multipleOf", multiple.numerator)
    if is_combined:
        # A number may have to be a multiple of all these numbers.
        usage.check("multipleOf", math.lcm(*(multiple.numerator for multiple in multiples)))


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a schema, at any depth and in any place."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _children(node: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that are directly in an object, or in lists in it."""
    waiting = list(node.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            waiting += value


def _check_object(node: Mapping[str, Any], usage: _Usage) -> None:
    properties = node.get("properties")
    if isinstance(properties, dict):
        usage.check("properties of an object", len(properties))
        usage.add("properties", len(properties))
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        usage.check("patternProperties", len(patterns))
    for name in _COUNT_KEYWORDS:
        bound = node.get(name)
        if isinstance(bound, int | float) and bound > LIMITS[_COUNT_LIMIT]:
            # Without `min`, `int` would fail for infinity.
            usage.check(_COUNT_LIMIT, int(min(bound, _HUGE)))


def _add_patterns(node: Mapping[str, Any], usage: _Usage) -> None:
    patterns = [node.get("pattern")]
    named = node.get("patternProperties")
    if isinstance(named, dict):
        patterns += named
    for pattern in patterns:
        if isinstance(pattern, str):
            usage.add("patterns", 1)
            _add_regex(pattern, usage)


def _multiple(node: Mapping[str, Any]) -> Fraction | None:
    value = node.get("multipleOf")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return Fraction(repr(value))


def _resolved(schema: Any, reference: str) -> Any:
    """Return the value to which a JSON pointer refers.

    Return None if there is no such value. The engine rejects such a reference.
    """
    if not reference.startswith("#"):
        return None
    value = schema
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        is_index = is_digits(key) and len(key) < 6
        if isinstance(value, list) and is_index and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value
