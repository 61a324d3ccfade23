"""Reject output formats that xgrammar would compile for many seconds.

vLLM and TensorRT-LLM compile formats in their own processes, where a compilation can't be ended. So
the cost of a format is estimated before.

xgrammar finds out for each state of a format which tokens the state allows. So the cost of a state
is the number of tokens that xgrammar looks at: most tokens where any character may follow, few
tokens where only digits may follow. The figures are CPU times of xgrammar 0.2.8 on one core with a
vocabulary of 201,088 tokens. The estimate takes time in proportion to the size of a format.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from dynamo_trtllm.protocol.errors import FormatTooComplex
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput

COMPILE_TIME: Final = "estimated milliseconds to compile"
LENGTHS: Final = "characters of different bounded lengths"
LIMITS: Final = {COMPILE_TIME: 2_000, LENGTHS: 1_280}
"""The limits by name. Errors and docs/request-limits.md use these names."""


class Width(Enum):
    """How many tokens a character or class allows.

    The three values are the microseconds that a state takes, the microseconds that a loop takes,
    and the weight of the character in a run (see `_Piece`).
    """

    LITERAL = (36, 36, 0.0)
    NARROW = (300, 300, 0.0)  # digits, punctuation, a few letters
    BLANK = (6_000, 6_000, 0.0)  # half of all tokens begin with a blank
    WORD = (10_000, 25_000, 0.4)  # letters
    WIDE = (40_000, 30_000, 1.0)  # almost any character

    @property
    def state_us(self) -> int:
        return int(self.value[0])

    @property
    def loop_us(self) -> int:
        return int(self.value[1])

    @property
    def weight(self) -> float:
        return self.value[2]

    @property
    def splits_runs(self) -> bool:
        """True if such a character ends a run, as a literal does."""
        return self.weight == 0


_PROPERTY_US: Final = 350
_OPTIONAL_PAIR_US: Final = 25  # for each pair of optional properties of an object
_AMBIGUITY_US: Final = 40_000  # for a run of a weight above 1: times (weight - 1) ** 2
_LONG: Final = 10  # characters; a longer bounded length counts towards the limit LENGTHS
_MAX_STATES: Final = 128  # xgrammar writes out no more repetitions than these
_MAX_LENGTH: Final = 10**9  # a larger length counts as this one
_LEAST_WEIGHT: Final = 0.05  # the least weight of a piece of variable length
_LOOP_WEIGHT: Final = 1.2  # the weight of any number of letters or other characters
# The weight of a copy of a group, relative to the weight of a piece that is written again.
_COPY_WEIGHT: Final = 0.4
# The weight of a group that contains a literal and may be left out or repeated, relative to the
# weight of the heavier one of the two runs at its ends.
_SPLIT_WEIGHT: Final = 0.5
# The weight of a bounded length, relative to the weight of one optional character.
_LENGTH_WEIGHT: Final = 2


def check_cost(guided: StructuredOutput) -> None:
    """Raise FormatTooComplex if the formats of a request exceed a limit."""
    estimate = _Estimate()
    part: StructuredOutput | None = guided
    while part is not None:
        for alternative in part.alternatives:
            estimate.add(alternative)
        part = part.otherwise
    estimate.check()


class _Estimate:
    """The cost of the formats of a request.

    xgrammar compiles equal patterns and lengths once, so they count once.
    """

    def __init__(self) -> None:
        self._compile_us = 0.0
        self._patterns: set[str] = set()
        self._string_lengths: set[tuple[int, int]] = set()
        # States of patterns that count the characters of bounded lengths.
        self._pattern_states = 0.0

    def check(self) -> None:
        """Raise FormatTooComplex if a limit is exceeded."""
        states = round(self._pattern_states) + _length_states(self._string_lengths)
        used = {COMPILE_TIME: round(self._compile_us / 1000), LENGTHS: states}
        for name, limit in LIMITS.items():
            if used[name] > limit:
                raise FormatTooComplex(
                    f"the output format exceeds this engine's limit for {name}: {used[name]}, at"
                    f" most {limit} are allowed; simplify it",
                    field="guided",
                )

    def add(self, alternative: OutputFormat) -> None:
        """Add the cost of one format."""
        if alternative.grammar:
            self._add_grammar(alternative.grammar)
        elif alternative.regex:
            self._add_regex(alternative.regex)
        else:
            for node in _objects(json.loads(alternative.json_schema)):
                self._add_object(node)

    def _add_regex(self, text: str) -> None:
        if text in self._patterns:
            return
        self._patterns.add(text)
        piece = _read_regex(text)
        self._compile_us += piece.total_us()
        self._pattern_states += piece.states

    def _add_object(self, node: Mapping[str, Any]) -> None:
        properties = node.get("properties")
        if isinstance(properties, dict):
            required = {name for name in _listed(node.get("required")) if isinstance(name, str)}
            optional = len(properties.keys() - required)
            self._compile_us += _PROPERTY_US * len(properties) + _OPTIONAL_PAIR_US * optional**2
            self._add_texts(properties)
        self._add_texts([node.get("const"), *_listed(node.get("enum"))])
        for pattern in (node.get("pattern"), *_keys(node.get("patternProperties"))):
            if isinstance(pattern, str):
                self._add_regex(pattern)
        least = _count(node.get("minLength"))
        most = _count(node.get("maxLength"))
        if least or most:
            self._string_lengths.add((least, most))

    def _add_texts(self, values: Any) -> None:
        """Add the cost of values that an output has to repeat."""
        size = sum(
            len(value) if isinstance(value, str) else len(json.dumps(value)) for value in values
        )
        self._compile_us += Width.LITERAL.state_us * size

    def _add_grammar(self, text: str) -> None:
        for found in _GRAMMAR_TOKEN.finditer(text):
            if found["regex"]:
                self._add_regex(found["regex"][1:-1])
            elif found["text"]:
                self._compile_us += Width.LITERAL.state_us * len(found["text"])
            elif found["set"]:
                # A class with its quantifier is a regular expression.
                piece = _read_regex(found["set"] + (found["repeat"] or ""))
                self._compile_us += piece.total_us()
                self._pattern_states += piece.states


def _length_states(lengths: Iterable[tuple[int, int]]) -> int:
    """Return the number of states that count the characters of strings.

    `lengths`: the minimum and the maximum of each length. The larger number of the two counts.

    Lengths below _MAX_STATES are written out, and the shorter ones use the states of the longest
    one.
    """
    counts = [max(length) for length in lengths]
    longest_written_out = max((count for count in counts if count < _MAX_STATES), default=0)
    return longest_written_out + sum(_MAX_STATES for count in counts if count >= _MAX_STATES)


def _count(value: Any) -> int:
    """Return the value of a keyword such as maxLength; 0 if the value is no positive number."""
    is_positive = isinstance(value, int | float) and value > 0
    if not is_positive:
        return 0
    return int(min(value, _MAX_LENGTH))


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


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


# --- regular expressions --------------------------------------------------------------------------

_CLASS: Final = r"\[\^?\]?(?:\\.|[^\]\\])*\]?"
_REPEAT: Final = r"(?:[*+?]|\{\d*(?:,\d*)?\})"
_PROPERTY: Final = r"\\[pP]\{[^{}]{0,60}\}"
# These begin a group: "(", "(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?<name>", "(?P<name>".
_GROUP: Final = r"\((?:\?(?:P?<\w*>|<?[=!]|[A-Za-z-]*:?))?"
_TEXT: Final = r"[^\\\[\](){}*+?|^$.]+(?![*+?{])"  # a quantifier repeats only the last character
_ESCAPE: Final = r"\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[xuU]\{[0-9A-Fa-f]{1,8}\}"
_REGEX_TOKEN: Final = re.compile(
    rf"""
      (?P<group> {_GROUP} )
    | (?P<end> \) )
    | (?P<or> \| )
    | (?P<text> {_TEXT} )
    | (?P<anchor> [\^$] | \\[bBAzZ] )
    | (?P<char> {_ESCAPE} )
    | (?P<class> {_CLASS} | \. | {_PROPERTY} | \\[A-Za-z] )
    | (?P<repeat> {_REPEAT} )
    | (?P<blank> \x20 )
    | (?P<plain> \\. | . )
    """,
    re.DOTALL | re.VERBOSE,
)
_GRAMMAR_TOKEN: Final = re.compile(
    rf'(?P<comment>\#[^\n]*|//[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"?)'
    rf"|(?P<set>{_CLASS})\s*(?P<repeat>{_REPEAT})?|(?P<regex>/(?:\\.|[^/\\\n])+/)",
    re.DOTALL,
)
_BOUNDS: Final = re.compile(r"\{(\d*)(,?)(\d*)\}")
_LETTERS: Final = "etaoin"
# Characters of a class that `re` would read in another way, or warn of.
_SET_OPERATION: Final = re.compile(r".\[|--|&&|~~|\|\|", re.DOTALL)


class _Piece(NamedTuple):
    """A piece of a regular expression.

    A run is a sequence of pieces of variable length, such as `a?b*`, without a literal in between.
    A run is ambiguous: after the same text, the format may be in many states of the run. The weight
    of a run says how ambiguous the run is.
    """

    us: float = 0.0  # microseconds, without the runs at the ends of this piece
    # Number of states that count bounded lengths, each times the weight of its characters.
    states: float = 0.0
    # Weight of all characters, as if they were one run.
    weight: float = 0.0
    before: float = 0.0  # weight of the run at its beginning
    after: float = 0.0  # weight of the run at its end
    # True if the piece has a literal. Without one, `before` and `after` are the same run.
    is_split: bool = False
    width: Width | None = None  # the width of a single character or class

    def then(self, other: _Piece) -> _Piece:
        """Return this piece followed by another one."""
        us = self.us + other.us
        if self.is_split and other.is_split:
            us += _run_us(self.after + other.before)
        return _Piece(
            us=us,
            states=self.states + other.states,
            weight=self.weight + other.weight,
            before=self.before if self.is_split else self.before + other.before,
            after=other.after if other.is_split else self.after + other.after,
            is_split=self.is_split or other.is_split,
        )

    def total_us(self) -> float:
        """Return the microseconds with all runs."""
        total_us = self.us + _run_us(self.before)
        if self.is_split:
            total_us += _run_us(self.after)
        return total_us

    def variable(self, times: int = 1) -> _Piece:
        """Return a piece with at most `times` copies of this one.

        xgrammar compiles the copies of a group once.
        """
        copies = _copies(times)
        if self.is_split:  # a literal in each copy ends the run of that copy
            weight = _SPLIT_WEIGHT * max(self.before, self.after)
        else:
            weight = copies * self.weight
        weight = max(weight, copies * _LEAST_WEIGHT)
        return _one_run(self.total_us(), self.states, weight)

    def repeated(self, times: int) -> _Piece:
        """Return a piece with `times` copies of this one after each other.

        xgrammar compiles the copies of a group once.
        """
        if times == 0:
            return _Piece()
        if self.is_split:
            us = self.us + _run_us(self.after + self.before)
            return self._replace(us=us, width=None)
        run = self.before * _copies(times)
        weight = self.weight * _copies(times)
        return _Piece(us=self.us, states=self.states, weight=weight, before=run, after=run)


def _one_run(us: float, states: float, weight: float) -> _Piece:
    """Return a piece that is one run."""
    return _Piece(us, states, weight=weight, before=weight, after=weight)


def _copies(times: int) -> float:
    """Return the weight of `times` copies of a group, relative to the weight of one group."""
    return max(1.0, _COPY_WEIGHT * times)


def _run_us(weight: float) -> float:
    return _AMBIGUITY_US * max(0.0, weight - 1) ** 2


class _OpenGroup:
    """The alternatives of an open group."""

    def __init__(self) -> None:
        self._done: list[_Piece] = []  # the alternatives that have ended
        # The pieces of the current alternative, without the last one, as one piece.
        self._joined = _Piece()
        self._last = _Piece()  # the piece that a quantifier would repeat

    def add(self, piece: _Piece) -> None:
        self._joined = self._joined.then(self._last)
        self._last = piece

    def quantify(self, text: str) -> None:
        self._last = _quantified(self._last, text)

    def end_alternative(self) -> None:
        self._done.append(self._joined.then(self._last))
        self._joined = _Piece()
        self._last = _Piece()

    def closed(self) -> _Piece:
        """Return the group as one piece."""
        self.end_alternative()
        if len(self._done) == 1:
            return self._done[0]._replace(width=None)
        variable = [piece.variable() for piece in self._done]
        weight = max(piece.weight for piece in variable)
        us = sum(piece.us for piece in variable)
        states = sum(piece.states for piece in variable)
        return _one_run(us, states, weight)


def _read_regex(text: str) -> _Piece:
    """Return a regular expression as one piece."""
    groups = [_OpenGroup()]
    for token in _REGEX_TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "group":
            groups.append(_OpenGroup())
        elif kind == "end" and len(groups) > 1:
            piece = groups.pop().closed()
            groups[-1].add(piece)
        elif kind == "or":
            groups[-1].end_alternative()
        elif kind == "repeat":
            groups[-1].quantify(token.group())
        elif kind == "text":
            groups[-1].add(_Piece(Width.LITERAL.state_us * len(token.group()), is_split=True))
        elif kind != "anchor":
            width = _width(token.group()) if kind in ("class", "blank") else Width.LITERAL
            # A blank costs more than a literal only where it may be repeated or left out.
            state_us = Width.LITERAL.state_us if width is Width.BLANK else width.state_us
            groups[-1].add(
                _Piece(state_us, weight=width.weight, is_split=width.splits_runs, width=width)
            )
    while len(groups) > 1:  # groups without an end, which the engine rejects
        piece = groups.pop().closed()
        groups[-1].add(piece)
    return groups[0].closed()


def _quantified(piece: _Piece, text: str) -> _Piece:
    least, most = _bounds(text)
    if piece.width is not None:
        return _characters(piece.width, least, most)
    # Without an upper bound, the least number of copies counts.
    times = max(1, least) if most is None else most
    times = min(times, _MAX_STATES)
    return piece.repeated(times) if least == most else piece.variable(times)


def _characters(width: Width, least: int, most: int | None) -> _Piece:
    """Return a repeated character or class. In a run, the number of repetitions does not matter."""
    written_out = min(max(least, most or 0), _MAX_STATES)
    us = width.loop_us if most is None else 0.0
    states = 0.0
    if width.weight and written_out > _LONG:
        states = written_out * width.weight
    elif written_out > 1 or most is not None:
        # The quantifiers `*`, `+`, `{0,}` and `{1,}` have only a loop. All others have states that
        # are written out.
        us += written_out * width.state_us
    if least == most:
        return _Piece(us, states, width.weight, is_split=width.splits_runs and least > 0)
    weight = max(width.weight, _LEAST_WEIGHT)
    if width.weight and most is None:
        weight = _LOOP_WEIGHT
    elif written_out > 1:
        weight *= _LENGTH_WEIGHT
    return _one_run(us, states, weight)


def _bounds(text: str) -> tuple[int, int | None]:
    """Return the least and the greatest number of repetitions of a quantifier; None if there is no
    greatest number.
    """
    if text == "?":
        return 0, 1
    if text in ("*", "+"):
        return int(text == "+"), None
    found = _BOUNDS.fullmatch(text)
    assert found is not None
    least = _number(found[1])
    if not found[2]:
        return least, least
    return least, _number(found[3]) if found[3] else None


def _number(digits: str) -> int:
    """Return the number. Of a longer number, only the first nine digits count: they exceed all
    limits.
    """
    return int(digits.lstrip("0")[:9] or 0)


@functools.lru_cache(maxsize=1024)
def _width(text: str) -> Width:
    """Return how many tokens a class allows."""
    if _SET_OPERATION.search(text):
        return Width.WIDE
    try:
        matches = re.compile(text, re.ASCII | re.DOTALL).fullmatch
    except (re.error, OverflowError):
        return Width.WIDE
    letters = sum(
        matches(letter) is not None or matches(letter.upper()) is not None for letter in _LETTERS
    )
    # Letters beyond ASCII, or words with blanks between them.
    if matches("\u00e9") or (letters and matches(" ")):
        return Width.WIDE
    if letters > 2:  # hexadecimal digits have two of _LETTERS
        return Width.WORD
    return Width.BLANK if matches(" ") else Width.NARROW
