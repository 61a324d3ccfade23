"""Generated conversations through our parser and through openai-harmony's own parser of whole
messages: the same.

The reference is given the whole text at once; ours gets it cut in two at every token, and in random
pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import openai_harmony as oh
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynamo_trtllm.frontend.tokenization import o200k_tokenizer
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.protocol.messages import token_ids
from tests.kit.answer_parts import Seen, cut, fold

RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012
ENDS = (RETURN, END, CALL)
CONTROL = [RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL, 199998, 199999, 200018, 201087]
TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(
        ["Hello there.", '{"a": 1}', "🧑‍🚀 𒀀 日本語", "<|end|> <|channel|>", "to=functions.f"]
    ),
    st.sampled_from(["", " ", "\n\n"]),
    st.integers(20, 400).map(lambda size: "a long text, naïve and wide " * (size // 10)),
)
NAMES = st.from_regex(r"[A-Za-z0-9_\-]{1,20}", fullmatch=True)
TYPES = st.sampled_from([None, "<|constrain|>json", "json", "code"])


harmony = functools.cache(lambda: o200k_tokenizer.load_tokenizer().harmony)
plain = functools.cache(o200k_tokenizer.load_tokenizer)


def said(
    text: str, channel: str, recipient: str | None = None, kind: str | None = None
) -> oh.Message:
    message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, text).with_channel(channel)
    message.recipient = recipient
    message.content_type = kind
    return message


REASONING = st.builds(said, TEXTS, st.just("analysis"))
PREAMBLES = st.builds(said, TEXTS, st.just("commentary"))
# a content type alone is a recipient to openai-harmony 0.0.8
ANSWERS = st.builds(said, TEXTS, st.just("final"))
CALLS = st.builds(
    said,
    TEXTS,
    st.sampled_from(["commentary", "commentary", "analysis"]),
    NAMES.map("functions.{}".format),
    TYPES,
)
TURNS = st.lists(st.one_of(REASONING, PREAMBLES, CALLS, ANSWERS), min_size=1, max_size=5)
STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def completion(turn: Sequence[oh.Message], *, addressed_late: bool) -> list[int]:
    """The ids a model writes for these messages: all but `<|start|>assistant` of the first."""
    ids = [
        token_id for message in turn for token_id in written(message, addressed_late=addressed_late)
    ]
    ids[-1] = CALL if turn[-1].recipient else RETURN
    return ids[2:]


def written(message: oh.Message, *, addressed_late: bool) -> list[int]:
    """The recipient before or after the channel.

    The library reads both and writes one, and which depends on it.
    """
    encoding = harmony()
    address = f" to={message.recipient}" if message.recipient else ""
    before, behind = ("", address) if addressed_late else (address, "")
    kind = f" {message.content_type}" if message.content_type else ""
    head = f"<|start|>assistant{before}<|channel|>{message.channel}{behind}{kind}<|message|>"
    body = message.content[0]
    assert isinstance(body, oh.TextContent)
    end = CALL if message.recipient else END
    return [
        *encoding.encode(head, allowed_special="all"),
        *encoding.encode(body.text, disallowed_special=()),
        end,
    ]


def reference(ids: list[int]) -> Seen:
    seen = Seen()
    for message in harmony().parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT):
        body = "".join(part.text for part in message.content if isinstance(part, oh.TextContent))
        if message.recipient is not None:
            seen.calls.append([message.recipient.removeprefix("functions."), body])
        elif message.channel == "analysis":
            seen.reasoning += body
        else:
            seen.content += body
    return seen


def ours(renderer: HarmonyRenderer, pushes: object) -> Seen:
    seen = fold(renderer.chat_parser(), pushes)  # type: ignore[arg-type]
    seen.reasoning_tokens = 0
    return seen


def check_same(
    renderer: HarmonyRenderer, turn: list[oh.Message], late: bool, steps: list[int], cuts: int
) -> None:
    """Cut in two at `cuts` places (all when there are fewer), token by token, and in pieces of
    `steps`.
    """
    ids = completion(turn, addressed_late=late)
    expected = reference(ids)
    assert ours(renderer, [[i] for i in ids]) == expected
    assert ours(renderer, cut(ids, steps)) == expected
    for at in range(1, len(ids), max(1, len(ids) // cuts)):
        assert ours(renderer, [ids[:at], ids[at:]]) == expected


@pytest.fixture(scope="module")
def renderer() -> HarmonyRenderer:
    return HarmonyRenderer()


def fixed(examples: int) -> Callable[..., object]:
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


@fixed(30)
@given(turn=TURNS, late=st.booleans(), steps=STEPS)
@example(turn=[said("a", "final"), said("b", "final")], late=False, steps=[1])
def test_push_of_well_formed_turn_equals_openai_harmony(
    renderer: HarmonyRenderer, turn: list[oh.Message], late: bool, steps: list[int]
) -> None:
    check_same(renderer, turn, late, steps, cuts=30)


@pytest.mark.long
@pytest.mark.timeout(600)
@fixed(2000)
@given(turn=TURNS, late=st.booleans(), steps=STEPS)
def test_push_of_cut_turn_equals_openai_harmony(
    renderer: HarmonyRenderer, turn: list[oh.Message], late: bool, steps: list[int]
) -> None:
    check_same(renderer, turn, late, steps, cuts=1_000_000)


HEADER_WORDS = [
    "analysis",
    "final",
    "commentary",
    " to",
    "=",
    "functions",
    ".f",
    "assistant",
    "user",
    " ",
    "json",
]
TOKENS = st.one_of(
    st.sampled_from(CONTROL),
    st.sampled_from(HEADER_WORDS).map(lambda word: plain().encode(word)[0]),
    st.integers(0, 199_997),
)


@fixed(150)
@given(ids=st.lists(TOKENS | st.integers(199_998, 2**32 - 1), max_size=60), steps=STEPS)
def test_push_of_any_ids_shows_no_marker(
    renderer: HarmonyRenderer, ids: list[int], steps: list[int]
) -> None:
    seen = fold(renderer.chat_parser(), cut(ids, steps))
    assert seen == fold(renderer.chat_parser(), [ids])
    # by ordinary tokens, which is text
    as_text = plain().decode(token_ids(i for i in ids if i < 199_998))
    shown = " ".join(
        (seen.content, seen.reasoning, *(part for call in seen.calls for part in call))
    )
    assert not [
        marker
        for i in CONTROL
        if (marker := harmony().decode([i])) in shown and marker not in as_text
    ]


@fixed(150)
@given(
    ids=st.lists(
        TOKENS.filter(lambda i: "\ufffd" not in plain().decode(token_ids([i]))), max_size=60
    ),
    steps=STEPS,
)
def test_push_of_any_ids_loses_no_text_outside_headers(
    renderer: HarmonyRenderer, ids: list[int], steps: list[int]
) -> None:
    seen = fold(renderer.chat_parser(), cut(ids, steps))
    shown = [seen.content, seen.reasoning, *(arguments for _, arguments in seen.calls)]
    for body in bodies(ids):
        text = plain().decode(token_ids(body))
        assert any(text in part for part in shown), text


def bodies(ids: list[int]) -> list[list[int]]:
    """Ordinary tokens that no header can hold: after `<|message|>`, and after an end with no
    start.
    """
    found: list[list[int]] = []
    is_inside = False
    for token_id in ids:
        if token_id in (MESSAGE, *ENDS):
            is_inside = True
            found.append([])
        elif token_id in (START, CHANNEL):
            is_inside = False
        elif is_inside and token_id < 199_998:
            found[-1].append(token_id)
    return found
