"""Reasoning and tool calls of models without Harmony: what is distinguished, what is held back,
what stays content.
"""

from __future__ import annotations

from dynamo_trtllm.frontend.tokenization.chat_output_parser import ChatOutputParser
from dynamo_trtllm.frontend.tokenization.output import StepOutput
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.answer_parts import (
    Characters,
    Seen,
    calls_of,
    content_of,
    cut,
    fold,
)
from tests.kit.cases import each_case

STEPS = ((1,), (2,), (3, 1), (7,), (100_000,))


def parser(reasoning: str = "none", calls: str = "none") -> ChatOutputParser:
    return ChatOutputParser(
        Characters(), reasoning_parser=reasoning, tool_call_parser=calls, forced_ids=token_ids()
    )


def check(expected: Seen, text: str, reasoning: str = "none", calls: str = "none") -> None:
    """Check what a parser makes of a text, in steps of any sizes."""
    seen = {}
    for steps in STEPS:
        found = fold(parser(reasoning, calls), cut([ord(char) for char in text], steps))
        found.reasoning_tokens = 0
        seen[steps] = found
    assert seen == dict.fromkeys(STEPS, expected)


def each_step(made: ChatOutputParser, text: str) -> list[StepOutput]:
    return [made.push(token_ids([ord(char)])) for char in text]


@each_case(
    ("reasoning", "text", "expected"),
    [
        ("none", "<think>a</think>b", Seen("<think>a</think>b")),
        ("basic", "<think>\nLet me see.</think>\n\nFour.", Seen("Four.", "Let me see.")),
        ("basic", "  \n<think>a</think>b", Seen("b", "a")),
        ("basic", "No thought. <think> is a word", Seen("No thought. <think> is a word")),
        ("basic", " <thin air", Seen(" <thin air")),
        ("basic", "<thi", Seen("<thi")),
        ("basic", "", Seen()),
        ("basic", "<think>", Seen()),
        ("basic", "<think>cut off </thin", Seen("", "cut off </thin")),
        ("basic", "<think>a</think>b</think>c<think>d", Seen("b</think>c<think>d", "a")),
        ("basic", "<think></think>b", Seen("b")),
        ("basic", "<think>1 < 2 </ 3</think>b", Seen("b", "1 < 2 </ 3")),
        ("deepseek_r1", "Let me see.</think>\n\nFour. ", Seen("Four. ", "Let me see.")),
        ("deepseek_r1", "<think>\nLet me see.</think>Four.", Seen("Four.", "Let me see.")),
        ("deepseek_r1", "\n<thinner</think>b", Seen("b", "<thinner")),
        ("deepseek_r1", "all of it", Seen("", "all of it")),
        ("deepseek_r1", "<thi", Seen("", "<thi")),
        ("deepseek_r1", "</think>b", Seen("b")),
    ],
)
def test_push_separates_reasoning_from_the_answer(
    reasoning: str, text: str, expected: Seen
) -> None:
    check(expected, text, reasoning)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
HERMES = {
    "one call": (CALL, Seen("", "", [["f", '{"a": [1, "}"]}']])),
    "text and two calls": (
        f'Let me look.\n{CALL}\n<tool_call>{{"name":"g","arguments":{{}}}}</tool_call>\n',
        Seen("Let me look.\n", "", [["f", '{"a": [1, "}"]}'], ["g", "{}"]]),
    ),
    "text after a call": (f"{CALL}\n done", Seen("\n done", "", [["f", '{"a": [1, "}"]}']])),
    "parameters": (
        '<tool_call>{"name":"f","parameters":{"x":1}}</tool_call>',
        Seen("", "", [["f", '{"x":1}']]),
    ),
    "arguments first": (
        '<tool_call>{"arguments": {"x": "\\"}"} , "name": "f"}</tool_call>',
        Seen("", "", [["f", '{"x": "\\"}"}']]),
    ),
    "id and type": (
        (
            '<tool_call>{"id": "c\\u0031", "type": "function", "name": "f", "arguments":'
            " null}</tool_call>"
        ),
        Seen("", "", [["f", "null"]]),
    ),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Seen("", "", [["f", '"{\\"a\\": 1}"']]),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', Seen("", "", [["f", "{}"]])),
    "no end marker": ('<tool_call>{"name": "f", "arguments": {}}', Seen("", "", [["f", "{}"]])),
    "half an end marker": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_',
        Seen("", "", [["f", "{}"]]),
    ),
    "text for an end marker": (
        '<tool_call>{"name": "f", "arguments": {}} and so on',
        Seen("and so on", "", [["f", "{}"]]),
    ),
    "cut in the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        Seen("", "", [["f", '{"a": "b']]),
    ),
    "cut before the name": ('<tool_call>{"na', Seen('<tool_call>{"na')),
    "cut at the marker": ("<tool_call>", Seen("<tool_call>")),
    "half a marker": ("a <tool_", Seen("a <tool_")),
    "nothing but blanks": (" \n", Seen(" \n")),
    "no JSON": ("<tool_call>f(1)</tool_call>", Seen("<tool_call>f(1)</tool_call>")),
    "no name": (
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        Seen('<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ),
    "bad name": (
        '<tool_call>{"name": "a b"}</tool_call>',
        Seen('<tool_call>{"name": "a b"}</tool_call>'),
    ),
    "surrogate name": ('<tool_call>{"name": "\\ud800"}x', Seen('<tool_call>{"name": "\\ud800"}x')),
    "unknown key": (
        '<tool_call>{"tool": "f"}</tool_call>',
        Seen('<tool_call>{"tool": "f"}</tool_call>'),
    ),
    "broken after the name": (
        '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        Seen(', "args": {"a": 1}}</tool_call>', "", [["f", ""]]),
    ),
    "brackets that do not match": (
        '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>',
        Seen("]}</tool_call>", "", [["f", '{"a": 1']]),
    ),
    "a call after a broken one": (
        f"<tool_call>f(){CALL}",
        Seen("<tool_call>f()", "", [["f", '{"a": [1, "}"]}']]),
    ),
}


@each_case("name", HERMES)
def test_push_reads_calls_between_markers(name: str) -> None:
    text, expected = HERMES[name]
    check(expected, text, calls="hermes")


JSON = {
    "one call": (' {"name": "f", "parameters": {"a": 1}}\n', Seen("", "", [["f", '{"a": 1}']])),
    "a list": (
        '[{"name": "f", "arguments": {}}, {"arguments": [1], "name": "g"}] ',
        Seen("", "", [["f", "{}"], ["g", "[1]"]]),
    ),
    "plain text": ("Hello {you}", Seen("Hello {you}")),
    "text after a call": ('{"name": "f", "arguments": {}} so', Seen(" so", "", [["f", "{}"]])),
    "another object": ('{"name": "Ann", "age": 3}', Seen('{"name": "Ann", "age": 3}')),
    "a name alone": ('{"name": "Ann"}', Seen('{"name": "Ann"}')),
    "empty object": ("{}", Seen("{}")),
    "empty list": (" []", Seen(" []")),
    "list of numbers": ("[1, 2]", Seen("[1, 2]")),
    "list with one call": (
        '[{"name": "f", "arguments": {}}, 7]',
        Seen(", 7]", "", [["f", "{}"]]),
    ),
    "second call broken": (
        '[{"name": "f", "arguments": {}}, {"x": 1}]',
        Seen(', {"x": 1}]', "", [["f", "{}"]]),
    ),
    "cut in a list": ('[{"name": "f", "arguments": {}},', Seen("", "", [["f", "{}"]])),
    "cut in the arguments": ('{"name": "f", "arguments": {"a', Seen("", "", [["f", '{"a']])),
    "cut before it is certain": ('[{"name": "f", "ar', Seen('[{"name": "f", "ar')),
    "blanks": ("  ", Seen("  ")),
}


@each_case("name", JSON)
def test_push_reads_an_answer_that_is_a_call(name: str) -> None:
    text, expected = JSON[name]
    check(expected, text, calls="json")


def test_push_ignores_calls_in_the_reasoning() -> None:
    text = f"I could write {CALL} here.</think>\n\n{CALL}"
    expected = Seen("", f"I could write {CALL} here.", [["f", '{"a": [1, "}"]}']])
    check(expected, text, "deepseek_r1", "hermes")


def test_push_streams_call_name_and_arguments_early() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'
    made = parser(calls="hermes")
    steps = each_step(made, text)
    first_name = next(
        i for i, step in enumerate(steps) if any(call.name == "f" for call in calls_of(step))
    )
    assert first_name == text.index('f"') + 1
    written = {i: call.text for i, step in enumerate(steps) for call in calls_of(step)}
    written.pop(first_name)
    begins = text.index('{"city')
    assert written == {begins + i: char for i, char in enumerate('{"city": "Rome"}')}


def test_push_holds_back_only_a_possible_marker() -> None:
    steps = each_step(parser(calls="hermes"), "x < y <tool!")
    assert [content_of(step) for step in steps] == [
        "x",
        " ",
        "",
        "< ",
        "y",
        " ",
        *[""] * 5,
        "<tool!",
    ]


def test_push_streams_json_that_is_no_call() -> None:
    steps = each_step(parser(calls="json"), '{"age": 3}')
    assert [content_of(step) for step in steps] == [*[""] * 5, '{"age"', ":", " ", "3", "}"]


def test_push_counts_reasoning_without_markers() -> None:
    made = parser("basic")
    assert (
        fold(made, [[ord(char)] for char in "<think>abc</think>de"]).reasoning_tokens
        == 3 + len("</think>") - 1
    )


def test_push_of_forced_call_has_name_in_the_first_delta() -> None:
    forced_ids = token_ids(map(ord, '<tool_call>\n{"name": "f", "arguments":'))
    made = ChatOutputParser(
        Characters(), reasoning_parser="none", tool_call_parser="hermes", forced_ids=forced_ids
    )
    first = made.push(token_ids(map(ord, " {")))
    assert [(call.name, call.text) for call in calls_of(first)] == [("f", "{")]
    assert not content_of(first)
