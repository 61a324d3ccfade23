"""Fuzz the limits of output formats, and the cache of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import orjson

from dynamo_trtllm.frontend.requests.format_limits import check_formats
from dynamo_trtllm.frontend.tokenization.text_cache import TextCache
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.fuzz.target import Form, Target

_FORMATS = {
    "schema": lambda text: OutputFormat(json_schema=text),
    "regex": lambda text: OutputFormat(json_schema="", regex=text),
    "grammar": lambda text: OutputFormat(json_schema="", grammar=text),
}


def check_limits(data: bytes) -> None:
    """Check the limits of schemas, regular expressions and grammars: an object with one of them."""
    try:
        given = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    if not isinstance(given, dict):
        return
    alternatives = []
    for name, make in _FORMATS.items():
        value = given.get(name)
        if name == "schema" and value is not None:
            alternatives.append(make(orjson.dumps(value).decode()))
        elif isinstance(value, str) and value:  # an empty one means another form
            alternatives.append(make(value))
    for alternative in (*alternatives, None):
        chosen = tuple(alternatives) if alternative is None else (alternative,)
        try:
            check_formats(StructuredOutput(alternatives=chosen), "response_format")
        except InvalidRequest as exc:
            assert len(exc.message) < 1_000


def _formats() -> Iterator[bytes]:
    schema = {
        "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}}},
        "allOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 1.5, "maxItems": 5}],
        "patternProperties": {"^a+$": {"pattern": "(ab){2,5}"}},
    }
    lark = 'start: "a" b{1,3}\nb: /[a-z]+/i | %json {"type": "object"}\n%import common.INT\n'
    gbnf = 'root ::= ("a" | b){2,3} [a-z]* # comment\nb ::= "\\"" root?\n'
    for given in (
        {"schema": schema},
        {"regex": "a(b|[c-e]{2,3})*?\\d+(?x) # c\n"},
        {"grammar": gbnf},
        {"grammar": lark},
        {"grammar": f"{gbnf}{lark}", "regex": "(?:a)", "schema": True},
    ):
        yield json.dumps(given).encode()


# --- the cache of texts -----------------------------------------------------------------------------

_MAX_BYTES = 2_000
_MIN_CHARS = 3


def check_cache(data: bytes) -> None:
    """Look texts up, one a line. The cache returns what is made of them, within its limit."""
    made: list[str] = []

    def make(text: str) -> bytes:
        made.append(text)
        return text.encode("utf-8", "surrogatepass")

    cache = TextCache(make, max_bytes=_MAX_BYTES, min_chars=_MIN_CHARS)
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        assert cache.get(line) == line.encode("utf-8", "surrogatepass")
        assert 0 <= cache.num_bytes <= _MAX_BYTES
    made.clear()
    for text in list(cache._cached):
        cache.get(text)
    assert not made
    assert all(len(text) >= _MIN_CHARS for text in cache._cached)


def _lines() -> Iterator[bytes]:
    yield b"aaaa\nbbbb\naaaa\n\na\n" + "é\U0001f9d1xx\n".encode() * 3
    yield b"\n".join(b"%d" % number * 300 for number in range(9))


TARGETS = {
    "formats": Target(
        summary="limits of JSON Schemas, regular expressions and grammars",
        check=check_limits,
        files=(
            "frontend/requests/format_limits.py",
            "frontend/requests/format_graph.py",
            "frontend/requests/format_syntax.py",
        ),
        seeds=_formats,
        form=Form.JSON,
        words=(
            *(b"schema", b"regex", b"grammar", b"$ref", b"#/$defs/a", b"$defs", b"properties"),
            *(
                b"allOf",
                b"anyOf",
                b"items",
                b"multipleOf",
                b"pattern",
                b"patternProperties",
                b"{2,",
            ),
            *(
                b"minItems",
                b"maxProperties",
                b"root ::= ",
                b"(?x)",
                b"[^]",
                b"\\",
                b"(?:",
                b"%json",
            ),
            *(b"start: ", b"/a/i", b'"', b"'", b"#", b"//", b"\n", b"|", b"#/", b"~1"),
        ),
    ),
    "text-cache": Target(
        summary="the cache of what is made of texts",
        check=check_cache,
        files=("frontend/tokenization/text_cache.py",),
        seeds=_lines,
        max_bytes=1000,
    ),
}
