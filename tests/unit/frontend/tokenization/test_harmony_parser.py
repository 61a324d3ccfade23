"""Output streams as gpt-oss writes them, and as a broken model might."""

from __future__ import annotations

import functools
import random
import time
import tracemalloc
from collections.abc import Sequence

import openai_harmony as oh
import pytest

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.conversation import Tool
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.models import vocabulary
from dynamo_trtllm.protocol.errors import InvalidRequest
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.answer_parts import Seen, calls_of, content_of, cut, fold
from tests.kit.cases import each_case

START = 200006
END = 200007
MESSAGE = 200008
CHANNEL = 200005
CALL = 200012
RETURN = 200002
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL_F = " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
PYTHON_CALL = Seen("", "", [["python", '{"input":""}']])


@pytest.fixture(scope="module")
def renderer() -> HarmonyRenderer:
    return HarmonyRenderer()


# which checks the file at each call
harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)


def ids_of(text: str) -> list[int]:
    return harmony().encode(text, allowed_special="all")


def parse(parser: OutputParser, ids: Sequence[int], step: int = 1) -> Seen:
    return fold(parser, cut(ids, [step]))


STREAMS = {
    "answer": (
        f"{ANALYSIS}Think.{NEXT}{FINAL}It is 4.<|return|>",
        Seen("It is 4.", "Think.", [], 2),
    ),
    "answer without reasoning": (f"{FINAL}Hi<|return|>", Seen("Hi")),
    "tool call with analysis": (
        f'{ANALYSIS}Need the weather.{NEXT}{CALL_F}{{"place": "Łódź"}}<|call|>',
        Seen("", "Need the weather.", [["get_weather", '{"place": "Łódź"}']], 4),
    ),
    "tool call, recipient after the channel": (
        (
            "<|channel|>commentary to=functions.get_weather"
            ' <|constrain|>json<|message|>{"a":1}<|call|>'
        ),
        Seen("", "", [["get_weather", '{"a":1}']]),
    ),
    "preamble and two calls": (
        (
            "<|channel|>commentary<|message|>Let me"
            f" look.{NEXT}{CALL_F}{{}}<|call|><|start|>assistant{CALL_F}[]<|call|>"
        ),
        Seen("Let me look.", "", [["get_weather", "{}"], ["get_weather", "[]"]]),
    ),
    "call from the analysis channel": (
        " to=functions.f<|channel|>analysis code<|message|>{}<|call|>",
        Seen("", "", [["f", "{}"]]),
    ),
    "call with no arguments": (f"{CALL_F}<|call|>", Seen("", "", [["get_weather", ""]])),
    "split characters": (f"{ANALYSIS}𒀀🧑‍🚀{NEXT}{FINAL}日𒀁本🏳️‍🌈<|return|>", None),
    "cut in a body": (f"{ANALYSIS}Think", Seen("", "Think", [], 1)),
    "cut in a header": (f"{ANALYSIS}Think{NEXT}<|channel|>fin", Seen("", "Think", [], 1)),
    "no start after an end": (
        f"{ANALYSIS}Think<|end|>{FINAL}4<|return|>",
        Seen("4", "Think", [], 1),
    ),
    "no end before a start": (
        f"{ANALYSIS}Think<|start|>assistant{FINAL}4<|return|>",
        Seen("4", "Think", [], 1),
    ),
    "text between messages": (
        f"{ANALYSIS}Think<|end|>loose{NEXT}{FINAL}4<|return|>",
        Seen("loose4", "Think", [], 1),
    ),
    "no harmony at all": ("Hello there, how are you?<|return|>", Seen("Hello there, how are you?")),
    "body with no header": ("<|message|>Hello<|return|>", Seen("Hello")),
    "stray markers in a body": (
        f"{FINAL}a<|constrain|>b<|message|>c<|endoftext|>d<|return|>",
        Seen("abcd"),
    ),
    "markers as text": (f"{FINAL}write <|end|> like that", Seen("write  like that")),
    "unknown channel": ("<|channel|>musing<|message|>x<|return|>", Seen("x")),
    "second final": (f"{FINAL}a{NEXT}{FINAL}b<|return|>", Seen("ab")),
    "call without a name": (
        " to=functions.<|channel|>commentary json<|message|>{}<|call|>",
        Seen("{}"),
    ),
    "call without a recipient": ("<|channel|>commentary to= json<|message|>{}<|call|>", Seen("{}")),
    "call with an impossible name": (
        "<|channel|>commentary to=functions.a/b<|message|>{}<|call|>",
        Seen("{}"),
    ),
    "call with no namespace": (
        "<|channel|>commentary to=f<|message|>{}<|call|>",
        Seen("", "", [["f", "{}"]]),
    ),
    "call with no to=": (
        "<|channel|>commentary functions.f json<|message|>{}<|call|>",
        Seen("", "", [["f", "{}"]]),
    ),
    "call on no channel": (" to=functions.f<|message|>{}<|call|>", Seen("", "", [["f", "{}"]])),
    "call on the final channel": (
        " to=functions.f<|channel|>final<|message|>{}<|call|>",
        Seen("", "", [["f", "{}"]]),
    ),
    "recipient said twice": (
        " to=functions.f<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        Seen("", "", [["f", "{}"]]),
    ),
    "arguments that are no JSON": (
        "<|channel|>commentary to=functions.f <|constrain|>python<|message|>f(1)<|call|>",
        Seen("", "", [["f", "f(1)"]]),
    ),
    "own python": (
        (
            f"{ANALYSIS}Sum.{NEXT}<|channel|>analysis to=python"
            ' code<|message|>print("é𒀀\\n")\n1<|call|>'
        ),
        Seen("", "Sum.", [["python", '{"input":"print(\\"é𒀀\\\\n\\")\\n1"}']], 2),
    ),
    "own python without code": (" to=python<|channel|>analysis<|message|><|call|>", PYTHON_CALL),
    "own python cut off": (
        "<|channel|>commentary to=python <|constrain|>code<|message|>",
        PYTHON_CALL,
    ),
    "own python with JSON": (
        "<|channel|>commentary to=python <|constrain|>json<|message|>{}<|call|>",
        Seen("", "", [["python", "{}"]]),
    ),
    "own browser, and text after it": (
        f"<|channel|>analysis to=browser.search code<|message|>{{}}{NEXT}{FINAL}x<|return|>",
        Seen("x", "", [["browser.search", "{}"]]),
    ),
    "own container": (
        " to=container.exec<|channel|>analysis<|message|>{}<|call|>",
        Seen("", "", [["container.exec", "{}"]]),
    ),
    "a function of such a name": (
        " to=functions.python<|channel|>commentary<|message|>{}<|call|>",
        Seen("", "", [["python", "{}"]]),
    ),
    "message to a person": (
        "<|channel|>analysis to=all<|message|>hm<|end|>",
        Seen("", "hm", [], 1),
    ),
    "two recipients": (
        " to=functions.f<|channel|>commentary to=functions.g<|message|>{}<|call|>",
        Seen(" to=functions.fcommentary to=functions.g{}"),
    ),
    "words in the header": (
        "<|channel|>final and then more<|message|>x<|return|>",
        Seen("final and then morex"),
    ),
    "two channels": (
        "<|channel|>final<|channel|>analysis<|message|>x<|return|>",
        Seen("finalanalysisx"),
    ),
    "header ended early": (
        "<|channel|>commentary to=functions.f<|call|>",
        Seen("commentary to=functions.f"),
    ),
    "header with a line break": ("<|channel|>Sure:\nHello<|return|>", Seen("Sure:\nHello")),
    "start twice": (f"<|start|>assistant<|start|>assistant{FINAL}x<|return|>", Seen("x")),
    "another role": (
        f"{FINAL}x<|end|><|start|>user<|channel|>analysis<|message|>y<|end|>",
        Seen("xy"),
    ),
    "unknown role": (f"<|start|>unknown{FINAL}x<|return|>", Seen("x")),
    "no role": ("<|start|><|message|>x<|return|>", Seen("x")),
    "call header cut off": (f"{ANALYSIS}Think{NEXT} to=functions.get_w", Seen("", "Think", [], 1)),
    "late call header cut off": ("<|channel|>commentary to=functions.get_w", Seen()),
    "wrong header cut off": ("<|channel|>no channel at all", Seen("no channel at all")),
    "only stop": ("<|return|>", Seen()),
    "nothing": ("", Seen()),
}


@each_case("name", STREAMS)
def test_push_of_recorded_stream_finds_parts_at_any_cut(
    renderer: HarmonyRenderer, name: str
) -> None:
    text, expected = STREAMS[name]
    if expected is None:
        expected = Seen("日𒀁本🏳️‍🌈", "𒀀🧑‍🚀", [], len(ids_of("𒀀🧑‍🚀")))
    ids = ids_of(text)
    steps = (1, 2, 3, 7, 10_000)
    seen = {step: parse(renderer.chat_parser(), ids, step) for step in steps}
    assert seen == dict.fromkeys(steps, expected)


@pytest.mark.parametrize(
    "name", ["answer", "tool call with analysis", "preamble and two calls", "split characters"]
)
def test_push_of_well_formed_stream_equals_openai_harmony(
    renderer: HarmonyRenderer, name: str
) -> None:
    ids = ids_of(STREAMS[name][0])
    expected = Seen()
    for message in harmony().parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT):
        body = "".join(part.text for part in message.content if isinstance(part, oh.TextContent))
        if message.recipient is not None:
            expected.calls.append([message.recipient.removeprefix("functions."), body])
        elif message.channel == "analysis":
            expected.reasoning += body
        else:
            expected.content += body
    seen = parse(renderer.chat_parser(), ids)
    assert (seen.content, seen.reasoning, seen.calls) == (
        expected.content,
        expected.reasoning,
        expected.calls,
    )


def test_push_streams_call_name_before_arguments(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser()
    pieces = [
        call
        for i in ids_of(f'{CALL_F}{{"place": "Rome"}}')
        for call in calls_of(parser.push(token_ids([i])))
    ]
    assert (pieces[0].name, pieces[0].text) == ("get_weather", "")
    assert all(piece.name is None and piece.text and piece.call_index == 0 for piece in pieces[1:])
    assert len(pieces) > 3


def test_push_of_content_holds_only_half_characters(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser()
    parser.push(token_ids(ids_of(FINAL)))
    assert [content_of(parser.push(token_ids([i]))) for i in ids_of("Hello there 𒀀!")] == [
        "Hello",
        " there",
        " ",
        *[""] * (len(ids_of("Hello there 𒀀!")) - 5),
        "𒀀",
        "!",
    ]


def test_push_when_output_is_no_harmony_then_text_is_not_held(renderer: HarmonyRenderer) -> None:
    assert content_of(renderer.chat_parser().push(token_ids(ids_of("Hello")))) == "Hello"


def test_push_when_header_never_ends_then_it_becomes_content(renderer: HarmonyRenderer) -> None:
    words = ids_of("<|channel|>" + "word " * 200)
    seen = parse(renderer.chat_parser(), words)
    assert seen.content == "word " * 200


def test_push_does_not_hold_words_of_a_long_header(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser()
    deltas = [content_of(parser.push(token_ids([i]))) for i in ids_of("<|channel|>" + "word " * 30)]
    assert next(i for i, text in enumerate(deltas) if text) < 16


def test_push_when_bytes_are_no_utf8_then_the_rest_still_comes(renderer: HarmonyRenderer) -> None:
    lone = vocabulary.mergeable_ranks()[b"\xff"]
    parser = renderer.chat_parser()
    parser.push(token_ids(ids_of(FINAL)))
    assert (
        content_of(parser.push(token_ids([lone, *ids_of("on")]))) == "\N{REPLACEMENT CHARACTER}on"
    )


def test_push_replaces_a_character_cut_by_the_end(renderer: HarmonyRenderer) -> None:
    half = ids_of("𒀀")[:-1]
    seen = parse(
        renderer.chat_parser(),
        [*ids_of(ANALYSIS), *half, END, *ids_of(f"<|start|>assistant{FINAL}b")],
    )
    assert seen.reasoning == "\N{REPLACEMENT CHARACTER}"
    assert seen.content == "b"


@each_case("seed", range(30))
def test_push_of_random_ids_is_independent_of_the_cut(renderer: HarmonyRenderer, seed: int) -> None:
    chance = random.Random(seed)
    control = [
        START,
        END,
        MESSAGE,
        CHANNEL,
        CALL,
        RETURN,
        200003,
        199999,
        201087,
        201088,
        4_000_000_000,
    ]
    words = ids_of("analysis final commentary to=functions.f assistant json user")
    ids = [
        (
            chance.choice(control)
            if kind < 0.2
            else chance.choice(words)
            if kind < 0.6
            else chance.randrange(199_998)
        )
        for kind in (chance.random() for _ in range(400))
    ]
    seen = parse(renderer.chat_parser(), ids)
    assert seen == parse(renderer.chat_parser(), ids, 400) == parse(renderer.chat_parser(), ids, 13)
    assert "<|" not in seen.content.replace("<|", "", ids.count(27))
    assert seen.content or seen.reasoning or seen.calls


def test_push_when_output_is_long_then_nothing_of_it_is_stored(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser()
    text = renderer.decode(token_ids([1000]))
    parser.push(token_ids([*ids_of(FINAL), 1000]))

    def push(tokens: int, at_once: int) -> None:
        for _ in range(tokens // at_once):
            assert content_of(parser.push(token_ids([1000] * at_once))) == text * at_once

    push(200, 1)
    push(200, 100)
    tracemalloc.start()
    try:
        push(10_000, 1)
        push(10_000, 100)
        # so a token costs the same after any number of others
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("marker", ["<|end|>", "<|call|>", "<|start|>"])
def test_push_shows_a_marker_written_as_text(renderer: HarmonyRenderer, marker: str) -> None:
    text_ids = renderer.encode(f"write {marker} like that").tolist()
    assert (
        parse(renderer.chat_parser(), [*ids_of(FINAL), *text_ids, RETURN]).content
        == f"write {marker} like that"
    )


def test_push_of_forced_named_call_reads_arguments(renderer: HarmonyRenderer) -> None:
    header = renderer.call_header(Tool(name="get_weather"))
    assert header is not None
    seen = parse(renderer.chat_parser(forced_ids=header), ids_of('{"place": "Rome"}<|call|>'))
    assert seen == Seen("", "", [["get_weather", '{"place": "Rome"}']])


def test_push_of_forced_call_gives_the_name_first(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser(forced_ids=renderer.call_header(Tool(name="f")) or token_ids())
    first = parser.push(token_ids(ids_of('{"')))
    assert [(call.name, call.text) for call in calls_of(first)] == [("f", '{"')]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_push_of_some_forced_call_continues_with_the_name(
    renderer: HarmonyRenderer, step: int
) -> None:
    header = renderer.call_header(None)
    assert header is not None
    assert renderer.decode(header) == "<|channel|>commentary to=functions."
    seen = parse(
        renderer.chat_parser(forced_ids=header),
        ids_of("get_weather <|constrain|>json<|message|>{}<|call|>"),
        step,
    )
    assert seen == Seen("", "", [["get_weather", "{}"]])


def test_push_of_incomplete_forced_header_shows_output_only(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser(forced_ids=renderer.call_header(None) or token_ids())
    assert parse(parser, ids_of("I would rather not.\n")) == Seen("I would rather not.\n")


def test_push_after_forced_text_that_is_no_header(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser(forced_ids=token_ids(ids_of("no\nheader")))
    assert parse(parser, ids_of(" 4")).content.endswith(" 4")


def test_push_when_reasoning_is_forced_then_only_output_counts(renderer: HarmonyRenderer) -> None:
    seen = parse(
        renderer.chat_parser(forced_ids=token_ids(ids_of(ANALYSIS))),
        ids_of(f"Think.{NEXT}{FINAL}4<|return|>"),
    )
    assert seen == Seen("4", "Think.", [], 2)


def test_call_header_of_unrenderable_name_is_rejected(renderer: HarmonyRenderer) -> None:
    with pytest.raises(InvalidRequest, match="tool name 'a b'"):
        renderer.call_header(Tool(name="a b"))


def test_answer_header_of_harmony_opens_the_final_channel(renderer: HarmonyRenderer) -> None:
    text, ids = renderer.answer_header()
    assert text == "<|channel|>final<|message|>"
    assert renderer.decode(ids) == text
    assert len(ids) == 3


@pytest.mark.parametrize("step", [1, 5, 10_000])
def test_push_without_reasoning_parser_is_content(step: int) -> None:
    made = HarmonyRenderer(reasoning_parser="none")
    ids = ids_of(f"{ANALYSIS}Think.{NEXT}{CALL_F}{{}}<|call|>")
    assert parse(made.chat_parser(), ids, step) == Seen("Think.", "", [["get_weather", "{}"]])


@pytest.mark.parametrize("step", [1, 5, 10_000])
def test_push_without_tool_call_parser_is_content(step: int) -> None:
    made = HarmonyRenderer(tool_call_parser="none")
    ids = ids_of(f"{ANALYSIS}Think.{NEXT}{CALL_F}{{}}<|call|>")
    assert parse(made.chat_parser(), ids, step) == Seen("{}", "Think.", [], 2)
    assert made.call_header(Tool(name="get_weather")) is None


def test_push_streams_first_arguments_early(renderer: HarmonyRenderer) -> None:
    parser = renderer.chat_parser()
    parser.push(token_ids(ids_of(CALL_F)))
    arguments = ids_of('{"place": "Rome"}')
    first = parser.push(token_ids(arguments[:1]))
    assert [call.text for call in calls_of(first)] == ['{"']


def test_push_reads_the_call_of_the_longest_tool_name(renderer: HarmonyRenderer) -> None:
    name = "aZ_9" * 64
    ids = ids_of(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"
    )
    assert parse(renderer.chat_parser(), ids).calls == [[name, "{}"]]


def test_push_of_one_token_takes_less_than_a_millisecond(renderer: HarmonyRenderer) -> None:
    pushes = [
        token_ids([i]) for i in ids_of(f"{ANALYSIS}Think.{NEXT}{CALL_F}" + '{"place": "Rome"}' * 50)
    ]
    parser = renderer.chat_parser()
    times_s = []
    for ids in pushes:
        began = time.thread_time()
        parser.push(ids)
        times_s.append(time.thread_time() - began)
    assert sorted(times_s)[int(len(times_s) * 0.99)] < 1e-3
