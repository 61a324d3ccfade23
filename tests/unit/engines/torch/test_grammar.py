"""Output under a guide is always of the form asked for, whatever the model would like."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dynamo_trtllm.engines.torch import closed_schemas
from dynamo_trtllm.engines.torch.closed_schemas import closed
from dynamo_trtllm.engines.torch.format_compiler import FormatCompiler
from dynamo_trtllm.engines.torch.grammar import GrammarMatcher
from dynamo_trtllm.engines.torch.schema_annotations import without_annotations
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import OutputFormat, StructuredOutput, token_ids
from tests.kit.cases import each_case
from tests.kit.small_tokenizer import CONTROL, spell, write_tokenizer

SIZE = 320  # some ids more than the tokenizer has, as models have
END, CHANNEL, MESSAGE, CALL = CONTROL.values()
STOPS = (END, CALL)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["city", "ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> FormatCompiler:
    path = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return FormatCompiler(path, vocab_size=SIZE, eos_token_ids=(END,))


def matcher_of(
    compiler: FormatCompiler, wanted: StructuredOutput, stop_ids: tuple[int, ...]
) -> GrammarMatcher:
    parts = compiler.compile(compiler.to_lark(wanted))
    return GrammarMatcher(parts, stop_ids, wanted.unfinished_ids, SIZE, on_failure=lambda: None)


def guided(
    schema: Any = SCHEMA, literal: str = "", after: tuple[int, ...] = ()
) -> StructuredOutput:
    alternative = OutputFormat(json_schema=json.dumps(schema), prefix=literal)
    return StructuredOutput(
        alternatives=(alternative,), trigger=spell(list(after)), trigger_ids=token_ids(after)
    )


def allowed(grammar_matcher: GrammarMatcher) -> set[int]:
    logits = torch.zeros(SIZE)
    grammar_matcher.apply_mask(logits)
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


def write(grammar_matcher: GrammarMatcher, seed: int, most: int = 400) -> list[int]:
    """What a model with random wishes writes, up to its stop token."""
    wishes = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    while len(ids) < most:
        logits = torch.randn(SIZE, generator=wishes)
        grammar_matcher.apply_mask(logits)
        ids.append(int(logits.argmax()))
        if ids[-1] in STOPS:
            return ids
        grammar_matcher.accept_token(ids[-1])
    raise AssertionError(f"no end after {most} tokens: {spell(ids)}")


@each_case("seed", range(20))
def test_random_output_is_valid_json_of_the_schema(compiler: FormatCompiler, seed: int) -> None:
    ids = write(matcher_of(compiler, guided(), STOPS), seed)
    value = json.loads(spell(ids[:-1]))
    assert set(value) == {"city", "ok", "kind"}
    assert len(value["city"]) <= 5
    assert isinstance(value["ok"], bool)
    assert value["kind"] in ("a", "b")


def test_empty_schema_then_an_object(compiler: FormatCompiler) -> None:
    assert allowed(matcher_of(compiler, guided({}), STOPS)) == {ord("{"), 256}


def test_alternatives_combine_literal_and_its_json(compiler: FormatCompiler) -> None:
    forms = (
        OutputFormat(prefix="first<|message|>", json_schema='{"const": 1}'),
        OutputFormat(prefix="second<|channel|>x<|message|>", json_schema='{"const": 2}'),
    )
    seen = {
        spell(write(matcher_of(compiler, StructuredOutput(alternatives=forms), (END,)), seed))
        for seed in range(12)
    }
    assert seen == {"first<|message|>1<|end|>", "second<|channel|>x<|message|>2<|end|>"}


def test_literal_with_control_token_excludes_its_text(compiler: FormatCompiler) -> None:
    grammar_matcher = matcher_of(compiler, guided(literal="<|message|>"), STOPS)
    assert allowed(grammar_matcher) == {MESSAGE}


def test_after_then_free_until_it_was_written_whole(compiler: FormatCompiler) -> None:
    grammar_matcher = matcher_of(
        compiler, guided({"const": True}, literal="<|message|>", after=(CHANNEL, 262)), STOPS
    )
    everything = set(range(SIZE))
    for token_id in (5, CHANNEL, 7, CHANNEL, CHANNEL):
        assert allowed(grammar_matcher) == everything
        grammar_matcher.accept_token(token_id)
    assert allowed(grammar_matcher) == everything
    grammar_matcher.accept_token(262)
    assert allowed(grammar_matcher) == {MESSAGE}


def test_end_then_stop_tokens_and_nothing_else(compiler: FormatCompiler) -> None:
    grammar_matcher = matcher_of(compiler, guided({"const": 12}), STOPS)
    assert END not in allowed(grammar_matcher)
    grammar_matcher.accept_token(256 + 8)  # "12"
    assert allowed(grammar_matcher) == set(STOPS)


def test_state_when_built_anew_from_the_tokens_then_the_same(compiler: FormatCompiler) -> None:
    form = guided(literal="<|message|>", after=(CHANNEL,))
    whole = matcher_of(compiler, form, STOPS)
    ids = [9, CHANNEL, MESSAGE, 256, *b"city", *b'":"x"']
    for count, token_id in enumerate(ids):
        anew = matcher_of(compiler, form, STOPS)
        for earlier in ids[:count]:
            anew.accept_token(earlier)
        assert allowed(anew) == allowed(whole)
        whole.accept_token(token_id)
    assert whole.failure is None


def test_disallowed_token_fails_the_guide(compiler: FormatCompiler) -> None:
    grammar_matcher = matcher_of(compiler, guided(), STOPS)
    grammar_matcher.accept_token(ord("x"))
    assert grammar_matcher.failure
    assert allowed(grammar_matcher) == set(STOPS)


def formatted(prefix: str = "", **content: str) -> StructuredOutput:
    return StructuredOutput(alternatives=(OutputFormat(json_schema="", prefix=prefix, **content),))


@each_case("prefix", ["", "<|message|>"])
@each_case(
    ("content", "texts"),
    [
        ({"regex": "(yes|no)!{2}"}, {"yes!!", "no!!"}),
        ({"regex": r"a/b\.c"}, {"a/b.c"}),
        ({"grammar": 'root ::= "a" mid\nmid ::= "b" | "c"'}, {"ab", "ac"}),
        ({"grammar": 'start: "a" ("b" | "c")'}, {"ab", "ac"}),
    ],
)
def test_output_matches_regex_or_grammar(
    compiler: FormatCompiler, prefix: str, content: dict[str, str], texts: set[str]
) -> None:
    found = set()
    for seed in range(12):
        matcher = matcher_of(compiler, formatted(prefix, **content), STOPS)
        *output, _ = write(matcher, seed)
        found.add(spell(output))
    assert found == {prefix + text for text in texts}


@pytest.mark.parametrize(
    "content",
    [{"regex": "(a"}, {"grammar": "(("}, {"grammar": 'no_root ::= "a"'}, {"grammar": "start: FOO"}],
)
def test_format_that_cannot_be_read_then_refused_with_the_reason(
    compiler: FormatCompiler, content: dict[str, str]
) -> None:
    with pytest.raises(RequestRejected, match="the output format is") as refused:
        matcher_of(compiler, formatted(**content), STOPS)
    assert refused.value.field == "guided"
    assert not re.search(r"content0|at \d+\(", refused.value.message)


@each_case(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "string", "pattern": "(?=x)"}, "regex parse error"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable schema"),
        ([1], "must be an object"),
    ],
)
def test_impossible_schema_is_rejected_with_reason(
    compiler: FormatCompiler, schema: Any, reason: str
) -> None:
    with pytest.raises(RequestRejected, match=reason) as refused:
        matcher_of(compiler, guided(schema), STOPS)
    assert "\n" not in refused.value.message
    assert "form0" not in refused.value.message
    assert refused.value.field == "guided"


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {"vocab": {}}, "decoder": null}'])
def test_tokenizer_that_cannot_be_read_then_refused_and_named(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestRejected, match=r"can't read the tokenizer .*tokenizer\.json"):
        FormatCompiler(path, vocab_size=SIZE, eos_token_ids=(END,))


def test_tokens_of_byte_level_vocabulary_are_read_as_bytes(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    file = json.loads(path.read_text())
    # The characters of "é " and of byte 0, then some that stand for no byte.
    added = {"ÃĠ": b"\xc3 ", "Ā": b"\0", "a\n😀b": b"a??b"}
    first = max(file["model"]["vocab"].values()) + 1
    file["model"]["vocab"] |= {text: first + at for at, text in enumerate(added)}
    path.write_text(json.dumps(file))
    compiler = FormatCompiler(path, vocab_size=SIZE, eos_token_ids=(END,))
    for at, content in enumerate(added.values()):
        assert compiler.tokenizer.decode_bytes([first + at]) == content


@pytest.mark.parametrize("model", ["BPE", "Unigram"])
def test_vocabulary_that_is_not_byte_level_is_read(tmp_path: Path, model: str) -> None:
    path = write_tokenizer(tmp_path)
    file = json.loads(path.read_text())
    pieces = [
        "<unk>",
        "▁",
        "{",
        "}",
        '"',
        ":",
        ",",
        "▁a",
        "a",
        "1",
        "2",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    pieces += [f"filler{at}" for at in range(len(pieces), END)]
    if model == "BPE":
        file["model"] = {
            "vocab": {piece: at for at, piece in enumerate(pieces)},
            "merges": [],
            "unk_token": "<unk>",
        }
    else:
        file["model"] = {"vocab": [(piece, -1.0) for piece in pieces], "unk_id": 0}
    file["model"] |= {"type": model, "byte_fallback": True}
    file["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    path.write_text(json.dumps(file))
    grammar_matcher = matcher_of(
        FormatCompiler(path, vocab_size=SIZE, eos_token_ids=(END,)),
        guided({"const": {"a": 12}}),
        (END,),
    )
    ids = write(grammar_matcher, 1)
    text = "".join(pieces[i] if i < 11 else chr(i - 11) for i in ids[:-1]).replace("▁", " ")
    assert json.loads(text) == {"a": 12}


@each_case("seed", range(20))
def test_output_never_ends_without_the_answer(compiler: FormatCompiler, seed: int) -> None:
    wanted = msgspec.structs.replace(guided(after=(CHANNEL,)), unfinished_ids=STOPS)
    ids = write(matcher_of(compiler, wanted, STOPS), seed, most=5000)
    answer = spell(ids[ids.index(CHANNEL) + 1 : -1])
    assert set(json.loads(answer)) == {"city", "ok", "kind"}


def test_free_text_ended_by_a_call_has_its_stop_token_only(compiler: FormatCompiler) -> None:
    wanted = msgspec.structs.replace(guided(after=(CHANNEL,)), unfinished_ids=(END,))
    assert set(STOPS) & allowed(matcher_of(compiler, wanted, STOPS)) == {CALL}


@pytest.mark.parametrize(("trigger", "value"), [(CHANNEL, 1), (MESSAGE, 2)])
def test_two_triggers_then_the_form_of_the_one_that_comes_first(
    compiler: FormatCompiler, trigger: int, value: int
) -> None:
    second = guided({"const": 2}, after=(MESSAGE,))
    wanted = msgspec.structs.replace(guided({"const": 1}, after=(CHANNEL,)), otherwise=second)
    matcher = matcher_of(compiler, wanted, STOPS)
    for token_id in (ord("x"), trigger):
        matcher.accept_token(token_id)
    assert allowed(matcher) == {ord(str(value))}


@each_case(
    ("schema", "is_closed"),
    [
        ({"properties": {"a": {}}}, True),
        ({"properties": {"a": {}}, "additionalProperties": True}, False),
        ({"properties": {"a": {}}, "patternProperties": {"^b": {}}}, False),
        ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, False),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, False),
        ({"type": "object"}, False),
    ],
)
def test_schema_with_properties_allows_no_others(schema: Any, is_closed: bool) -> None:
    assert (closed(schema).get("additionalProperties") is False) == is_closed
    inner = closed({"items": schema, "anyOf": [schema], "$defs": {"x": schema}})
    for place in (inner["items"], inner["anyOf"][0], inner["$defs"]["x"]):
        assert (place.get("additionalProperties") is False) == is_closed


A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}
BASE = {"$defs": {"Base/~1A": A}}
TO_BASE = {"$ref": "#/$defs/Base~1~01A"}


@each_case(
    "schema",
    [
        {"allOf": [TO_BASE, B], **BASE},
        {**TO_BASE, **B, **BASE},
        {"allOf": [{"allOf": [TO_BASE]}, B], **BASE},
        {**A, "anyOf": [B, {"properties": {"c": {}}, "required": ["c", "b"]}]},
        {**A, "oneOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": {"$ref": "#/$defs/C"}, "C": B}},
        {"allOf": [{"$ref": "#/$defs/X/anyOf/0"}, B], "$defs": {"X": {"anyOf": [A]}}},
        {"$ref": "#/$defs/Both", "$defs": {"Both": {"allOf": [{"$ref": "#/$defs/A"}, B]}, "A": A}},
    ],
)
def test_properties_of_several_schemas_are_combined(
    compiler: FormatCompiler, schema: dict[str, Any]
) -> None:
    """A closed part would forbid the properties of the other parts."""
    matcher = matcher_of(compiler, guided(schema), STOPS)
    for token_id in b'{"a":1,"b":2':
        assert token_id in allowed(matcher)
        matcher.accept_token(token_id)


def test_definition_is_closed_unless_it_is_a_part() -> None:
    both = closed({"properties": {"x": TO_BASE, "y": {"allOf": [TO_BASE, B]}}, **BASE})
    assert both["$defs"]["Base/~1A"] == A
    for alone in ({"description": "x", **TO_BASE}, {"description": "x", "allOf": [TO_BASE]}):
        definitions = closed({"properties": {"x": alone}, **BASE})["$defs"]
        assert definitions["Base/~1A"] == {**A, "additionalProperties": False}
    for reference in ("#/$defs/none", "#/$defs/Base~1~01A/type/x", "#", "#name", "#/allOf/9", 7):
        assert closed({"$ref": reference, "properties": {}, "allOf": [{}]})


def test_definition_named_by_an_anchor_is_not_the_root() -> None:
    schema = {**A, "$defs": {"B": {"allOf": [{"$ref": "#a"}, B]}}}
    assert closed(schema)["additionalProperties"] is False


def test_time_to_close_a_schema_is_in_proportion_to_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each definition is within another one, and all are parts."""
    num_visited = 0
    members = closed_schemas._members

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_visited
        num_visited += 1
        return members(*args, **options)

    monkeypatch.setattr(closed_schemas, "_members", counted)
    depth = 40
    schema: dict[str, Any] = {"properties": {str(n): {"type": "string"} for n in range(100)}}
    for _ in range(depth):
        schema = {"$defs": {"a": schema}}
    schema["allOf"] = [{"$ref": "#" + "/$defs/a" * level} for level in range(1, depth + 1)]
    closed(schema)
    assert num_visited <= 2 * (100 + 2 * depth + 1)


@each_case(
    "schema",
    [
        {"type": "string", "format": "path"},
        {"type": ["string", "null"], "format": "password", "maxLength": 5},
        {"allOf": [{"type": "string", "format": "int32"}]},
        {"type": "object", "properties": {"format": {"type": "string", "format": "byte"}}},
        {"type": "array", "items": {"format": "binary"}, "uniqueItems": False},
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": True},
        {"type": "object", "properties": {"enum": {"type": "string", "format": "path"}}},
        {"$ref": "#/x/format", "x": {"format": {"type": "string", "format": "uri-reference"}}},
    ],
)
def test_annotation_has_no_effect(compiler: FormatCompiler, schema: dict[str, Any]) -> None:
    assert allowed(matcher_of(compiler, guided(schema), STOPS))


def test_known_format_and_data_stay_as_they_are() -> None:
    data = {"enum": [{"format": "path"}], "default": {"format": "path", "uniqueItems": False}}
    schema = {"type": "string", "format": "date", **data}
    assert without_annotations({"properties": {"format": schema}, "uniqueItems": True}) == {
        "properties": {"format": schema},
        "uniqueItems": True,
    }


@each_case("seed", range(10))
def test_output_has_no_additional_properties(compiler: FormatCompiler, seed: int) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    ids = write(matcher_of(compiler, guided(schema), STOPS), seed)
    assert set(json.loads(spell(ids[:-1]))) == {"ok"}
