"""Formats that would crash a compiler, or occupy it for minutes, are rejected by the name of the
limit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.frontend.requests.format_limits import LIMITS, check_formats
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.kit.cases import each_case
from tests.kit.generation_plans import WEATHER, chat

WRITTEN_OUT = "symbols with repetitions and rules written out"
LEVELS = "nesting of objects with references followed"
COUNTS = "minItems, maxItems, minContains, minProperties and maxProperties"
QUANTIFIERS = "quantifiers of a regular expression"


def chain(count: int, arrow: str, first: str) -> str:
    """Return a grammar whose rules name each the next one."""
    rules = [f"r{number}{arrow} r{number + 1}" for number in range(count - 2)]
    return "\n".join([f"{first}{arrow} r0", *rules, f'r{count - 2}{arrow} "a"'])


def doubled(count: int, arrow: str = ":", first: str = "start") -> str:
    """Return a grammar whose rules name each the next one twice."""
    begin = f"{first}{arrow} T0"
    rules = [f"T{number}{arrow} T{number + 1} T{number + 1}" for number in range(count)]
    end = f'T{count}{arrow} "a"'
    return "\n".join([begin, *rules, end])


def referring(count: int, *, is_cycle: bool = False) -> dict[str, Any]:
    """Return a schema whose definitions refer each to the next one."""
    definitions: dict[str, Any] = {}
    for number in range(count):
        definitions[f"d{number}"] = {"items": {"$ref": f"#/$defs/d{number + 1}"}}
    definitions[f"d{count}"] = {"$ref": "#/$defs/d0"} if is_cycle else {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def precedence(count: int) -> str:
    """Return a grammar with levels of precedence, as programming languages have them.

    Each names the next one twice.
    """
    levels = [f'e{number}: e{number + 1} ("+" e{number + 1})*' for number in range(count)]
    innermost = f'e{count}: "(" e0 ")"'
    return "\n".join(["start: e0", *levels, innermost])


def wide_recursive(count: int) -> dict[str, Any]:
    """Return the schema of a tree with many kinds of children: it refers to itself at all of them,
    at few levels.
    """
    kinds = {
        f"kind{at}": {"type": "array", "items": {"$ref": "#/$defs/node"}} for at in range(count)
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": kinds}}}


def objects(count: int, name: str = "properties") -> dict[str, Any]:
    return {"type": "object", name: {f"p{at}": {} for at in range(count)}}


GRAMMARS: list[tuple[Callable[[int], str], int, int, str]] = [
    # format of a size, a size within the limit, one beyond it, the limit
    (lambda n: chain(n, ":", "start"), 1_000, 1_001, "rules"),
    (lambda n: chain(n, " ::=", "root"), 1_000, 3_500, "rules"),
    (lambda n: "\n".join(f"r{at}\n  ::= [:{{[]" for at in range(n)), 1_000, 1_001, "rules"),
    (lambda n: 'root ::= "a"' + "\n" * n, 3_999, 30_000, "lines"),
    (lambda n: 'start: "a"' + "\n// r: x" * n, 3_999, 4_000, "lines"),
    (lambda n: "start: " + "(" * n + '"a"' + ")" * n, 64, 65, "nesting of groups"),
    (lambda n: "root ::= " + "(" * n + '"a"' + ")" * n, 64, 10_000, "nesting of groups"),
    (lambda n: "start: " + "%lark { start: " * n + '"a"' + "}" * n, 64, 65, "nesting of groups"),
    (lambda n: "start: " + '[ "a" ' * n + "]" * n, 64, 65, "nesting of groups"),
    (lambda n: "start: /" + "(" * n + "a" + ")" * n + "/", 64, 65, "nesting of groups"),
    (doubled, 16, 17, WRITTEN_OUT),
    (lambda n: doubled(n, " ::=", "root"), 16, 60, WRITTEN_OUT),
    (lambda n: f'start: (("a" b){{{n}}}){{{n}}}\nb: "b"', 200, 250, WRITTEN_OUT),
    (lambda n: "start: " + "(" * n + "a" + "){2}" * n, 16, 64, WRITTEN_OUT),
    (lambda n: f'start: "a" ~ 2..{n}', 100_000, 100_001, WRITTEN_OUT),
    (lambda n: f"start: /(a{{{n}}}){{{n}}}/", 300, 400, WRITTEN_OUT),
    (lambda n: f'root ::= "a"{{ {n} , {n} }}', 100_000, 10**12, WRITTEN_OUT),
    (lambda n: "start: /" + "a?" * n + "/", 100, 101, QUANTIFIERS),
    (lambda n: f"start: %json {json.dumps({'multipleOf': n})}", 1_000, 1_001, "multipleOf"),
    (lambda n: f"start: %json {json.dumps({'multipleOf': n})}", 1_000, 10**400, "multipleOf"),
]
REGEXES: list[tuple[Callable[[int], str], int, int, str]] = [
    (lambda n: "(" * n + "a" + ")" * n, 64, 65, "nesting of groups"),
    (lambda n: "(?:" * n + "a" + ")*" * n, 64, 30_000, "nesting of groups"),
    (lambda n: rf"[^\](}}]{{0,{n}}}", 100_000, 100_001, WRITTEN_OUT),
    (lambda n: f"(([ab]{{{n}}}){{{n}}}){{{n}}}", 46, 47, WRITTEN_OUT),
    (lambda n: f"x{{{n},}}", 100_000, 10**30, WRITTEN_OUT),
    (lambda n: "a?" * n, 100, 101, QUANTIFIERS),
    (lambda n: r"\?\{\(" + "(b|c)+" * n, 100, 101, QUANTIFIERS),
]
SCHEMAS: list[tuple[Callable[[int], Any], int, int, str]] = [
    (referring, 498, 499, LEVELS),
    (lambda n: referring(n, is_cycle=True), 498, 500, LEVELS),
    (lambda n: objects(n), 500, 501, "properties of an object"),
    (lambda n: {"anyOf": [objects(500) for _ in range(n)]}, 10, 11, "properties"),
    (lambda n: {"items": objects(n, "patternProperties")}, 64, 65, "patternProperties"),
    (lambda n: {"anyOf": [{"pattern": "a"} for _ in range(n)]}, 100, 101, "patterns"),
    (lambda n: {"properties": {"a": {"pattern": f"a{{{n}}}"}}}, 100_000, 100_001, WRITTEN_OUT),
    (lambda n: {"patternProperties": {"(" * n + ")" * n: {}}}, 64, 65, "nesting of groups"),
    *[
        ((lambda n, name=name: {"properties": {"a": {name: n}}}), 10_000, 10_001, COUNTS)
        for name in COUNTS.split(", ")[:3]
    ],
    (lambda n: {"maxProperties": n}, 10_000, 10_001, COUNTS),
    (lambda n: {"type": "number", "multipleOf": n / 1_000}, 1_000, 1_000_003, "multipleOf"),
    (
        lambda n: {"allOf": [{"multipleOf": 7}, {"multipleOf": 11}, {"multipleOf": n}]},
        12,
        13,
        "multipleOf",
    ),
]
CASES = [
    *[("grammar", *grammar) for grammar in GRAMMARS],
    *[("regex", *regex) for regex in REGEXES],
    *[("schema", *schema) for schema in SCHEMAS],
]


def formatted(kind: str, value: Any) -> StructuredOutput:
    content = (
        {"json_schema": json.dumps(value)} if kind == "schema" else {"json_schema": "", kind: value}
    )
    return StructuredOutput(alternatives=(OutputFormat(**content),))


@each_case(("kind", "make", "within", "beyond", "limit"), CASES)
def test_format_over_limit_names_value_and_maximum(
    kind: str, make: Callable[[int], Any], within: int, beyond: int, limit: str
) -> None:
    check_formats(formatted(kind, make(within)), "response_format")
    with pytest.raises(InvalidRequest) as caught:
        check_formats(formatted(kind, make(beyond)), "response_format")
    most = re.escape(f"at most {LIMITS[limit]} are allowed")
    assert re.search(
        rf"in response_format exceeds the limit for {re.escape(limit)}: .*\d+, {most}",
        caught.value.message,
    )
    assert caught.value.field == "response_format"


def test_formats_of_a_request_share_their_limits() -> None:
    part = formatted("grammar", chain(600, ":", "start"))
    both = StructuredOutput(alternatives=part.alternatives, trigger="x", otherwise=part)
    with pytest.raises(InvalidRequest, match="rules: 1200"):
        check_formats(both, "tools")


@each_case(
    ("kind", "value"),
    [
        ("grammar", precedence(20)),
        ("grammar", 'root ::= "(((((" | [({[] x # (((\nx ::= "::= :"'),
        ("grammar", "1\nstart: %json"),  # no schema follows
        ("schema", {"type": "string", "minLength": 1, "maxLength": 2**31 - 1}),
        ("schema", {"properties": {"price": {"multipleOf": 0.01}, "step": {"multipleOf": 999}}}),
        ("schema", {"properties": {"minItems": {"type": "integer"}, "$ref": {"enum": [10**9]}}}),
        ("schema", {"$ref": "#/no/such/place"}),
        ("schema", {"$ref": "#"}),
        ("schema", wide_recursive(500)),
        ("regex", "|".join(f"word {number}" for number in range(6_000))),
        ("regex", r"\x{20000}\u{20000}\p{Letter}" * 6),
    ],
)
def test_format_that_is_large_but_harmless_then_accepted(kind: str, value: Any) -> None:
    check_formats(formatted(kind, value), "response_format")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(?x)#[\n(x{1000}){1000}"),
        ("regex", "a(?i-sx:b)"),
        ("grammar", "start: /#[\n(x{1000}){1000}/x".replace("\n", " ")),
        ("schema", {"pattern": "(?ix)a # b"}),
    ],
)
def test_regular_expression_when_it_is_verbose_then_rejected(kind: str, value: Any) -> None:
    with pytest.raises(
        InvalidRequest,
        match="the format in response_format has a regular expression with the flag x",
    ):
        check_formats(formatted(kind, value), "response_format")


@pytest.mark.parametrize("bound", [1e9, float("inf"), 10**400, 10_001])
def test_count_when_it_is_any_large_number_then_rejected(bound: float) -> None:
    with pytest.raises(InvalidRequest, match="exceeds the limit for minItems"):
        check_formats(formatted("schema", {"minItems": bound}), "response_format")


@each_case(
    ("kind", "piece"),
    [
        *[
            ("grammar", text)
            for text in (
                "[",
                '"',
                "/",
                "/\\",
                "a.",
                "{1,",
                "~",
                "(",
                "a{",
                "%json {",
                'a"\\',
                "x[",
                "//",
                "::= [",
            )
        ],
        *[("regex", text) for text in ("[", "{", "{1,", "\\", "(", "a{2}", "[^")],
        ("grammar", "a" + " " * 60_000),
        ("grammar", "{1," + " " * 60_000),
    ],
)
def test_check_of_odd_long_text_takes_linear_time(kind: str, piece: str) -> None:
    text = (piece * (60_000 // len(piece))) + ' ::= \nstart: "a"'
    began = time.process_time()
    try:
        check_formats(formatted(kind, text), "response_format")
    except InvalidRequest:
        pass
    assert time.process_time() - began < 5  # 0.05 s if it is linear, minutes if it is not


def test_strict_tool_schemas_have_limits(harmony: ServedModel) -> None:
    function = WEATHER["function"] | {
        "parameters": {"type": "object", "properties": {"n": {"multipleOf": 1_009}}}
    }
    # its schema is only shown to the model
    chat(harmony, tools=[{"type": "function", "function": function}])
    for fields in (
        {"tools": [{"type": "function", "function": function | {"strict": True}}]},
        {"tool_choice": "required"},
    ):
        with pytest.raises(InvalidRequest, match="multipleOf: 1009, at most 1000") as caught:
            chat(harmony, **{"tools": [{"type": "function", "function": function}]} | fields)
        assert caught.value.field in ("tools", "tool_choice")


def test_documentation_then_it_lists_each_limit_with_its_value() -> None:
    page = Path("docs/request-limits.md").read_text(encoding="utf-8")
    section = page.partition("## Formats\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.+?) \| ([\d,]+) \|", section, re.MULTILINE))
    assert {name: f"{most:,}" for name, most in LIMITS.items()} == {
        name.replace("`", ""): most for name, most in rows.items()
    }
