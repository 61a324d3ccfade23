"""Generated answers of models without Harmony: any cut gives the same, whatever the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_trtllm.frontend.tokenization.chat_output_parser import ChatOutputParser
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.answer_parts import Characters, Seen, calls_of, cut, fold

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
CALLS = st.tuples(
    st.from_regex(r"[A-Za-z0-9_.\-]{1,12}", fullmatch=True), OBJECTS, st.sampled_from([None, 1, 2])
)
STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<",
    "</",
    "<tool_",
    " ",
    "\n",
    "word",
    "é",
]
JSON_WORDS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "null",
    '"parameters"',
    '{"name": "f"',
    ', "arguments": ',
]
PIECES = st.sampled_from([*WORDS, *JSON_WORDS, '{"name": "f", "arguments": {}}'])
READERS = ("none", "hermes", "json")
FIXED = settings()  # as many as tests/conftest.py says, the same in every run


def make(reasoning: str, calls: str) -> ChatOutputParser:
    return ChatOutputParser(
        Characters(), reasoning_parser=reasoning, tool_call_parser=calls, forced_ids=token_ids()
    )


def seen(reasoning: str, calls: str, text: str, steps: list[int]) -> Seen:
    return fold(make(reasoning, calls), cut([ord(char) for char in text], steps))


def written(name: str, arguments: object, indent: int | None) -> tuple[str, str]:
    raw = json.dumps(arguments, indent=indent, ensure_ascii=False)
    return f'{{"name": "{name}", "arguments": {raw}}}', raw


@FIXED
@given(st.lists(CALLS, min_size=1, max_size=3), st.text("abc <{", max_size=20), STEPS)
def test_hermes_calls_come_back_as_written(
    calls: list[tuple[str, dict[str, object], int | None]], lead: str, steps: list[int]
) -> None:
    made = [(name, *written(name, arguments, indent)) for name, arguments, indent in calls]
    text = lead + "\n".join(f"<tool_call>\n{whole}\n</tool_call>" for _, whole, _ in made)
    found = seen("none", "hermes", text, steps)
    assert found.calls == [[name, raw] for name, _, raw in made]
    assert found.content == ("" if not lead.strip() else lead)


@FIXED
@given(st.lists(CALLS, min_size=1, max_size=3), st.booleans(), STEPS)
def test_json_calls_come_back_as_written(
    calls: list[tuple[str, dict[str, object], int | None]], as_list: bool, steps: list[int]
) -> None:
    made = [(name, *written(name, arguments, indent)) for name, arguments, indent in calls]
    if len(made) == 1 and not as_list:
        text = made[0][1]
    else:
        text = f"[{', '.join(whole for _, whole, _ in made)}]"
    assert seen("none", "json", text, steps) == Seen("", "", [[name, raw] for name, _, raw in made])


@FIXED
@given(CALLS.filter(lambda call: len(call[1]) > 0), STEPS)
def test_calls_stream_first_arguments_early(
    call: tuple[str, dict[str, object], int | None], steps: list[int]
) -> None:
    whole, raw = written(*call)
    for calls, text in (("hermes", f"<tool_call>{whole}</tool_call>"), ("json", whole)):
        parser = make("none", calls)
        early = parser.push(token_ids(map(ord, text[: text.index(raw) + 1])))
        assert [(delta.name, delta.text) for delta in calls_of(early)] == [(call[0], "{")]


@pytest.mark.parametrize("calls", READERS)
@pytest.mark.parametrize("reasoning", ["none", "basic", "deepseek_r1"])
@FIXED
@given(text=st.lists(PIECES, max_size=14).map("".join), steps=STEPS)
def test_push_when_text_is_anything_then_the_cut_changes_nothing(
    reasoning: str, calls: str, text: str, steps: list[int]
) -> None:
    assert seen(reasoning, calls, text, steps) == seen(reasoning, calls, text, [len(text) + 1])


@FIXED
@given(text=st.lists(PIECES, max_size=14).map("".join), steps=STEPS)
def test_push_when_no_call_is_read_then_content_is_the_text(text: str, steps: list[int]) -> None:
    for calls in READERS:
        found = seen("none", calls, text, steps)
        if not found.calls:
            assert found.content == text
