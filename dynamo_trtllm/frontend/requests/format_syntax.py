"""Count what regular expressions and grammars use of the limits.

All functions take linear time and no recursion.

Syntax errors are left to the engine. If the syntax is not valid, the counts have no meaning.
Reading a grammar ends where its groups are nested more deeply than a format may nest them.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Final, NamedTuple

MAX_GROUPS: Final = 64  # how deep the groups of a format may be nested
_MANY: Final = 10**9  # stands for numbers with more than _MAX_DIGITS digits
_MAX_DIGITS: Final = 9


class RegexSyntax(NamedTuple):
    """What a regular expression uses of the limits."""

    depth: int  # depth of nested groups
    size: int  # number of characters and classes after repetitions are written out
    quantifiers: int
    # The flag x is set, so blanks and comments have no meaning. They are counted all the same.
    is_verbose: bool


class RuleSyntax:
    """What the right sides of a rule use, in all its definitions together."""

    def __init__(self) -> None:
        # Size of texts, classes and regular expressions after repetitions are written out.
        self.size = 0
        # Names of rules with the number of times that they are used.
        self.uses: dict[str, int] = {}


class GrammarSyntax:
    """What a grammar uses of the limits."""

    def __init__(self) -> None:
        self.rules: dict[str, RuleSyntax] = {}
        self.depth = 0  # depth of nested groups, braces included
        self.regexes: list[str] = []
        self.schemas: list[Any] = []  # JSON Schemas that are part of the grammar


class Mode(Enum):
    """The syntax of a grammar."""

    EBNF = "ebnf"
    LARK = "lark"


# --- regular expressions --------------------------------------------------------------------------

_REGEX_TOKEN: Final = re.compile(
    r"(?P<repeat>\{(?P<least>\d*)(?:,(?P<most>\d*))?\})|(?P<plain>[^\\\[\](){}*+?|]+)"
    # A character by its number, or a class by its name, may have braces.
    r"|(?P<escaped>\\[xuU]\{[0-9A-Fa-f]{1,8}\}|\\[pP]\{[^{}]{1,60}\}|\\.)"
    r"|(?P<group>\(\??)|(?P<other>.)",
    re.DOTALL,
)


_VERBOSE: Final = re.compile(r"\(\?[A-Za-z-]{0,20}x")  # inline flags with x


def read_regex(text: str) -> RegexSyntax:
    """Return what a regular expression uses of the limits."""
    sizes = [0]  # the sizes of the open groups
    last = 0  # size of the last atom, which a quantifier repeats
    depth = 0
    quantifiers = 0
    is_class = False
    for token in _REGEX_TOKEN.finditer(text):
        char = token.group()
        if is_class:
            is_class = char != "]"
        elif char == "[":
            is_class = True
            last = 1
            sizes[-1] += last
        elif token.lastgroup == "group":
            sizes.append(0)
            depth = max(depth, len(sizes) - 1)
            last = 0
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif char in ("*", "+", "?"):
            quantifiers += 1
        elif char == "|":
            continue
        elif token.lastgroup == "repeat":
            quantifiers += 1
            times = max(_number(token["least"]), _number(token["most"]))
            sizes[-1] += last * max(0, times - 1)
            last = 0
        elif token.lastgroup == "plain":
            last = 1  # a quantifier repeats only the last character
            sizes[-1] += len(char)
        else:
            last = 1
            sizes[-1] += last
    is_verbose = _VERBOSE.search(text) is not None
    return RegexSyntax(depth, sum(sizes), quantifiers, is_verbose=is_verbose)


def _number(digits: str | None) -> int:
    if not digits:
        return 0
    return int(digits) if len(digits) <= _MAX_DIGITS else _MANY


# --- grammars -------------------------------------------------------------------------------------

# llguidance reads a text as Lark if this pattern matches at the beginning of a line.
_IS_LARK: Final = re.compile(r"^[ \t\r\f\v]*(?:%llguidance\b|start\s*:)", re.MULTILINE)
_COMMON: Final = r"""
    (?P<text>"(?:\\.|[^"\\\n])*"?)
    |(?P<repeat>\{\s*(?P<least>\d+)\s*(?:,\s*(?:(?P<most>\d+)\s*)?)?\}
        |~[ \t]*(?P<lark_least>\d+)(?:\.\.(?P<lark_most>\d+))?)
    |(?P<rule>[A-Za-z_][\w-]*(?:\.\d{1,9}|\[[^\]\n]{0,200}\]|\{[^}\n]{0,200}\})?\s*(?:::=|:(?!:)))
    |(?P<json>%json\b)
    |(?P<name>%?[A-Za-z_][\w-]*)
    |(?P<open>[(\[])
    |(?P<close>[)\]])
    |(?P<other>\S)
"""
_TOKENS: Final = {
    Mode.EBNF: re.compile(
        r"(?P<comment>\#[^\n]*)|(?P<set>\[(?:\\.|[^\]\\\n])*\]?)|" + _COMMON, re.VERBOSE
    ),
    Mode.LARK: re.compile(
        r"(?P<comment>//[^\n]*|\#[^\n]*)|(?P<regex>/(?:\\.|[^/\\\n])+(?:/[a-z]*)?)|" + _COMMON,
        re.VERBOSE,
    ),
}
_RULE_NAME: Final = re.compile(r"[A-Za-z_][\w-]*")


def grammar_modes(text: str) -> tuple[Mode, ...]:
    """Return the syntaxes in which an engine may read a grammar.

    llguidance and vLLM decide by different rules which syntax a grammar has.
    """
    if "::=" not in text:
        return (Mode.LARK,)
    if _IS_LARK.search(text):
        return (Mode.EBNF, Mode.LARK)
    return (Mode.EBNF,)


class _Atom:
    """A part of a rule that a quantifier may repeat."""

    def __init__(self, size: int = 0, name: str = "") -> None:
        self.size = size
        self.uses = {name: 1} if name else {}

    def add(self, other: _Atom, times: int = 1) -> None:
        """Add copies of an atom."""
        self.size += times * other.size
        for name, count in other.uses.items():
            self.uses[name] = self.uses.get(name, 0) + times * count


def read_grammar(text: str, mode: Mode) -> GrammarSyntax:
    """Return what a grammar uses of the limits."""
    grammar = GrammarSyntax()
    rule = RuleSyntax()  # at first, this stands for the text before the first rule
    groups = [_Atom()]  # the open groups of the rule; the first group is the whole rule
    last = _Atom()  # what a quantifier would repeat
    braces = 0  # number of open braces, which may contain rules
    position = 0
    tokens = _TOKENS[mode]
    while grammar.depth <= MAX_GROUPS:
        token = tokens.search(text, position)
        if token is None:
            break
        position = token.end()
        kind = token.lastgroup
        found = token.group()
        if kind == "rule":
            _end_rule(rule, groups)
            name = _RULE_NAME.match(found)
            assert name is not None
            rule = grammar.rules.setdefault(name.group(), RuleSyntax())
            groups = [_Atom()]
            last = _Atom()
        elif kind == "json":
            schema, position = _embedded(text, position)
            grammar.schemas.append(schema)
        elif found in ("{", "}"):
            braces += 1 if found == "{" else -1
            grammar.depth = max(grammar.depth, braces + len(groups) - 1)
        elif kind == "open":
            groups.append(_Atom())
            grammar.depth = max(grammar.depth, braces + len(groups) - 1)
        elif kind == "close" and len(groups) > 1:
            last = groups.pop()
            groups[-1].add(last)
        elif kind == "repeat":
            numbers = ("least", "most", "lark_least", "lark_most")
            times = max(_number(token[number]) for number in numbers)
            groups[-1].add(last, max(0, times - 1))
            last = _Atom()
        elif kind in ("text", "set", "regex", "name"):
            if kind == "name":
                last = _Atom(name=found)
            else:
                last = _Atom(size=_size(kind, found, grammar))
            groups[-1].add(last)
    _end_rule(rule, groups)
    return grammar


def _end_rule(rule: RuleSyntax, groups: list[_Atom]) -> None:
    """Add the sizes of the open groups to a rule. The first group is the whole right side."""
    for group in groups:
        rule.size += group.size
        for name, count in group.uses.items():
            rule.uses[name] = rule.uses.get(name, 0) + count


def _size(kind: str, found: str, grammar: GrammarSyntax) -> int:
    """Return the size of a token. Add a regular expression to those of the grammar."""
    if kind == "regex":
        regex, _, flags = found[1:].rpartition("/")
        grammar.regexes.append(f"(?x){regex}" if "x" in flags else regex)
        return read_regex(regex).size
    return len(found) - 2 if kind == "text" else 1


def _embedded(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value after a position, and where it ends.

    If it is invalid, skip the rest of the text.
    """
    begin = text.find("{", position)
    if begin < 0:
        return {}, len(text)
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return {}, len(text)
