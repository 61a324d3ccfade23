"""Formats that xgrammar would compile for many seconds are rejected by the name of a limit, and
real ones are not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.external.format_cost import COMPILE_TIME, LENGTHS, LIMITS, check_cost
from dynamo_trtllm.engines.external.library import guided_params
from dynamo_trtllm.protocol.errors import FormatTooComplex
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.kit.cases import each_case
from tests.unit.engines.real_formats import (
    REAL_GRAMMARS,
    REAL_PATTERNS,
    REAL_SCHEMAS,
    optional,
    required,
)


def formatted(kind: str, value: Any) -> StructuredOutput:
    content = (
        {"json_schema": json.dumps(value)} if kind == "schema" else {"json_schema": "", kind: value}
    )
    return StructuredOutput(alternatives=(OutputFormat(**content),))


def properties(count: int) -> dict[str, Any]:
    return {f"property_{number}": {} for number in range(count)}


def lengths(keyword: str, count: int) -> dict[str, Any]:
    return required(
        **{f"p{number}": {"type": "string", keyword: 200 + number} for number in range(count)}
    )


def patterns(make: Callable[[int], str], count: int) -> dict[str, Any]:
    return required(
        **{f"p{number}": {"type": "string", "pattern": make(number)} for number in range(count)}
    )


def bounded_rules(count: int) -> str:
    return "root ::= " + " | ".join(
        f'"{number}" [^\\n]{{0,{number}}}' for number in range(200, 200 + count)
    )


def open_rules(count: int) -> str:
    return "root ::= r0\n" + "\n".join(f'r{number} ::= "{number}" [^a]*' for number in range(count))


CASES: list[tuple[str, Callable[[int], Any], int, int, str]] = [
    # kind, format of a size, a size within the limit, one beyond it, the limit
    ("schema", lambda n: lengths("maxLength", n), 10, 11, LENGTHS),
    ("schema", lambda n: lengths("minLength", n), 10, 11, LENGTHS),
    ("schema", lambda n: patterns(lambda at: f"^.{{0,{200 + at}}}$", n), 10, 11, LENGTHS),
    ("schema", lambda n: patterns(lambda at: f"^{at}[^<]{{0,200}}$", n), 10, 11, LENGTHS),
    ("schema", lambda n: patterns(lambda at: f"^[a-z]{{{200 + at},}}$", n), 24, 30, LENGTHS),
    (
        "schema",
        lambda n: {"anyOf": [{"maxLength": 200.0 + at} for at in range(n)]},
        10,
        11,
        LENGTHS,
    ),
    ("grammar", bounded_rules, 10, 11, LENGTHS),
    ("schema", lambda n: optional(**properties(n)), 200, 300, COMPILE_TIME),
    (
        "schema",
        lambda n: {"anyOf": [optional(**properties(100)) for _ in range(n)]},
        5,
        10,
        COMPILE_TIME,
    ),
    ("schema", lambda n: {"enum": ["x" * n]}, 50_000, 60_000, COMPILE_TIME),
    ("schema", lambda n: required(**{"x" * n: {}}), 50_000, 60_000, COMPILE_TIME),
    ("schema", lambda n: patterns(lambda at: f"^{at}[^<]*$", n), 50, 70, COMPILE_TIME),
    ("regex", lambda n: ".?" * n, 6, 9, COMPILE_TIME),
    ("regex", lambda n: "(?:.?){" + str(n) + "}", 10, 25, COMPILE_TIME),
    ("regex", lambda n: "(?:.|..|...){" + str(n) + "}", 3, 8, COMPILE_TIME),
    ("regex", lambda n: "[a-z]?" * n, 16, 25, COMPILE_TIME),
    ("regex", lambda n: ".{0,5}" * n, 2, 5, COMPILE_TIME),
    ("regex", lambda n: r"\w+ ?" * n, 5, 10, COMPILE_TIME),
    ("regex", lambda n: ".*" * n, 6, 9, COMPILE_TIME),
    ("regex", lambda n: "((.a?)?b?){" + str(n) + "}", 5, 20, COMPILE_TIME),
    ("regex", lambda n: "|".join(f"{number}.*" for number in range(n)), 60, 70, COMPILE_TIME),
    ("regex", lambda n: "[^a]b" * n, 45, 55, COMPILE_TIME),
    ("grammar", open_rules, 60, 70, COMPILE_TIME),
]


@each_case(("kind", "make", "within", "beyond", "limit"), CASES)
def test_format_that_compiles_too_long_is_rejected(
    kind: str, make: Callable[[int], Any], within: int, beyond: int, limit: str
) -> None:
    check_cost(formatted(kind, make(within)))
    with pytest.raises(FormatTooComplex) as caught:
        guided_params(formatted(kind, make(beyond)))
    assert re.search(
        rf"limit for {limit}: \d+, at most {LIMITS[limit]} are allowed", caught.value.message
    )
    assert caught.value.field == "guided"


@each_case(
    ("kind", "value"),
    [
        *[("schema", schema) for schema in REAL_SCHEMAS.values()],
        *[("regex", pattern) for pattern in REAL_PATTERNS.values()],
        *[("grammar", grammar) for grammar in REAL_GRAMMARS.values()],
    ],
)
def test_formats_that_clients_send_are_within_limits(kind: str, value: Any) -> None:
    check_cost(formatted(kind, value))


def test_format_costs_add_up_and_equal_ones_count_once() -> None:
    first = formatted("schema", lengths("minLength", 6))
    second = formatted("schema", lengths("maxLength", 6))
    check_cost(StructuredOutput(alternatives=first.alternatives * 9, trigger="x", otherwise=first))
    check_cost(formatted("schema", patterns(lambda _: "^.{0,200}$", 30)))
    with pytest.raises(FormatTooComplex, match=LENGTHS):
        check_cost(StructuredOutput(alternatives=first.alternatives, trigger="x", otherwise=second))


@each_case("piece", ["(", "\\", "a|", "((a?)?)", "/"])
@each_case("kind", ["regex", "grammar"])
def test_check_of_odd_long_text_takes_linear_time(kind: str, piece: str) -> None:
    began = time.process_time()
    try:
        check_cost(formatted(kind, piece * (20_000 // len(piece))))
    except FormatTooComplex:
        pass
    assert time.process_time() - began < 5  # 0.1 s if it is linear, minutes if it is not


def test_documentation_then_it_lists_each_limit_with_its_value() -> None:
    page = Path("docs/request-limits.md").read_text(encoding="utf-8")
    section = page.partition("## Formats with vllm and trtllm\n")[2].partition("\n\n| part")[0]
    rows = dict(re.findall(r"^\| (.+?) \| ([\d,]+) \|", section, re.MULTILINE))
    assert {name: f"{most:,}" for name, most in LIMITS.items()} == rows
