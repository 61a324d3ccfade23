"""The parsers of a model with a tokenizer.json: markers as tokens, forced calls, and which parsers
a card may name.
"""

from __future__ import annotations

import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dynamo_trtllm.frontend.tokenization.conversation import Tool
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.frontend.tokenization.renderer_registry import renderer_for
from dynamo_trtllm.protocol.errors import ConfigError, InvalidRequest
from dynamo_trtllm.protocol.messages import ModelDeploymentCard, token_ids
from tests.kit.answer_parts import Seen, fold
from tests.kit.cases import each_case

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CARD = ModelDeploymentCard(
    name="m", context_length=10, vocab_size=300, eos_token_ids=(0,), renderer="chat_template"
)
ANSWER = (
    '<think>hm</think>\n\nSee.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>'
)
CALLED = [["f", '{"a": 1}']]


def files(*, special: bool) -> dict[str, bytes]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken(marker, special=special) for marker in MARKERS])
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": b"{}"}


def renderer(reasoning: str = "none", calls: str = "none", *, special: bool = True) -> Renderer:
    card = msgspec.structs.replace(CARD, reasoning_parser=reasoning, tool_call_parser=calls)
    return renderer_for(card, files(special=special))


def ids_of(text: str) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_buffer(files(special=True)["tokenizer.json"])
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@each_case("special", [True, False])
@each_case("step", [1, 5, 1000])
def test_chat_parser_finds_markers_of_either_token_kind(special: bool, step: int) -> None:
    ids = ids_of(ANSWER)
    made = renderer("basic", "hermes", special=special).chat_parser()
    seen = fold(made, [ids[at : at + step] for at in range(0, len(ids), step)])
    assert seen == Seen("See.", "hm", CALLED, 2)


def test_chat_parser_without_parsers_is_all_content() -> None:
    text = ANSWER.removesuffix("<|im_end|>")
    assert fold(renderer(special=False).chat_parser(), [ids_of(ANSWER)]) == Seen(text)


def test_text_parser_ignores_named_parsers() -> None:
    made = renderer("basic", "hermes", special=False)
    assert fold(made.text_parser(), [ids_of("<think>hm</think>See.")]) == Seen(
        "<think>hm</think>See."
    )


@pytest.mark.parametrize("step", [1, 1000])
def test_parsers_hide_only_the_chosen_tokens(step: int) -> None:
    ids = ids_of(f"<|im_start|>{ANSWER}")
    pushes = [ids[at : at + step] for at in range(0, len(ids), step)]
    hidden = frozenset(ids[-1:])
    assert fold(renderer().text_parser(hidden), pushes) == Seen(
        "<|im_start|>" + ANSWER.removesuffix("<|im_end|>")
    )
    seen = fold(renderer("none", "hermes").chat_parser(hidden=hidden), pushes)
    assert seen == Seen("<|im_start|><think>hm</think>\n\nSee.", "", CALLED)


@pytest.mark.parametrize(("calls", "end"), [("hermes", "}\n</tool_call>"), ("json", "}")])
def test_call_header_of_named_tool_precedes_arguments(calls: str, end: str) -> None:
    made = renderer("none", calls)
    header = made.call_header(Tool(name="f"))
    assert header is not None
    assert fold(made.chat_parser(forced_ids=header), [ids_of(' {"a": 1}' + end)]) == Seen(
        "", "", CALLED
    )


@pytest.mark.parametrize(
    ("reasoning", "calls", "tool"),
    [
        ("none", "none", Tool(name="f")),
        ("none", "hermes", None),
        ("deepseek_r1", "hermes", Tool(name="f")),
        ("none", "json", None),
    ],
)
def test_call_header_of_unforceable_format_is_absent(
    reasoning: str, calls: str, tool: Tool | None
) -> None:
    assert renderer(reasoning, calls).call_header(tool) is None


def test_call_header_that_breaks_json_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="can't be forced"):
        renderer("none", "json").call_header(Tool(name='f"'))


def test_answer_header_ends_the_reasoning() -> None:
    made = renderer("deepseek_r1")
    assert made.answer_header() == ("</think>", token_ids(ids_of("</think>")))
    for other in ("basic", "none"):
        assert renderer(other).answer_header() == ("", token_ids())


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("chat_template", "reasoning_parser", "gpt_oss"),
        ("chat_template", "tool_call_parser", "xml"),
        ("harmony", "reasoning_parser", "basic"),
        ("harmony", "tool_call_parser", "json"),
    ],
)
def test_renderer_for_parser_of_another_format_names_it(kind: str, field: str, value: str) -> None:
    card = msgspec.structs.replace(CARD, renderer=kind, **{field: value})
    with pytest.raises(ConfigError, match=f"{field} '{value}'.*none") as caught:
        renderer_for(card, files(special=True))
    assert caught.value.field == field
