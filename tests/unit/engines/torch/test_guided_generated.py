"""Generated schemas under random wishes: whatever the model would like, what ends is JSON of the
schema.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trtllm.engines.torch.format_compiler import FormatCompiler
from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput
from tests.kit.small_tokenizer import CONTROL, spell, write_tokenizer

END = CONTROL["<|end|>"]
SIZE = 304
MOST = 300  # tokens; a model with random wishes seldom ends a list of its own accord
NAMES = st.sampled_from(["city", "a b", "ü", 'quo"te', "true"])
LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.tuples(st.integers(-5, 5), st.integers(0, 9)).map(
        lambda edge: {"type": "integer", "minimum": edge[0], "maximum": edge[0] + edge[1]}
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.lists(
        st.one_of(st.integers(0, 99), st.text(max_size=4), st.none()), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
)
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3).map(
            lambda members: {
                "type": "object",
                "properties": members,
                "required": sorted(members),
                "additionalProperties": False,
            }
        ),
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {
                "type": "array",
                "items": pair[0],
                "minItems": pair[1],
                "maxItems": pair[1] + 1,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda forms: {"anyOf": forms}),
    ),
    max_leaves=5,
)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema, as far as `SCHEMAS` uses it."""
    if "anyOf" in schema:
        return any(is_valid(value, form) for form in schema["anyOf"])
    if "enum" in schema:
        return any(value == allowed and type(value) is type(allowed) for allowed in schema["enum"])
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            fits = (
                isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            )
            return fits and all(is_valid(item, schema["items"]) for item in value)
        case _:
            fits = isinstance(value, dict) and set(value) == set(schema["properties"])
            return fits and all(
                is_valid(value[name], form) for name, form in schema["properties"].items()
            )


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> FormatCompiler:
    return FormatCompiler(
        write_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab_size=SIZE, eos_token_ids=(END,)
    )


def check_output(compiler: FormatCompiler, schema: dict[str, Any], seed: int) -> None:
    alternative = OutputFormat(
        json_schema=json.dumps(schema | {"title": "made"}), prefix="<|message|>"
    )
    parts = compiler.compile(compiler.to_lark(StructuredOutput(alternatives=(alternative,))))
    grammar_matcher = GrammarMatcher(parts, (END,), (), SIZE, on_failure=lambda: None)
    wishes = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while END not in ids and len(ids) < MOST:
        logits = torch.randn(SIZE, generator=wishes)
        grammar_matcher.apply_mask(logits)
        assert torch.isfinite(logits).any(), f"nothing may follow {spell(ids)!r}"
        ids.append(int(logits.argmax()))
        grammar_matcher.accept_token(ids[-1])
        assert grammar_matcher.failure is None
    if ids[-1] == END:
        assert is_valid(json.loads(spell(ids[1:-1])), schema), spell(ids)


def _examples(count: int) -> settings:
    return settings(max_examples=count, derandomize=True, deadline=None, database=None)


@_examples(30)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_generated_schema_then_what_ends_is_json_of_it(
    compiler: FormatCompiler, schema: dict[str, Any], seed: int
) -> None:
    check_output(compiler, schema, seed)


@pytest.mark.long
@pytest.mark.timeout(300)
@_examples(2000)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_generated_schemas_give_valid_json(
    compiler: FormatCompiler, schema: dict[str, Any], seed: int
) -> None:
    check_output(compiler, schema, seed)
