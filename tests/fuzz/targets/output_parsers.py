"""Fuzz the parsers of what models generate, which their users can make generate anything.

Any cut of the tokens into steps gives the same answer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence

from dynamo_trtllm.frontend.tokenization.chat_output_parser import ChatOutputParser
from dynamo_trtllm.frontend.tokenization.harmony import HarmonyRenderer
from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.text_parsers import (
    BytesTextParser,
    TokenTextCache,
    WindowTextParser,
)
from dynamo_trtllm.models.vocabulary import FIRST_SPECIAL, HARMONY_VOCAB_SIZE, NAMED_SPECIALS
from dynamo_trtllm.protocol.messages import TokenIds, token_ids
from tests.fuzz.target import Target, cut, random_of
from tests.kit.answer_parts import Seen, fold

_SPECIALS = {text.encode(): number for text, number in NAMED_SPECIALS.items()}
_SPECIAL = re.compile(b"(" + b"|".join(map(re.escape, _SPECIALS)) + b")")
# The first byte of an input says how it is read.
_TEXT = b"t"  # a text with control tokens
_IDS = b"i"  # token ids, of three bytes each
_FORCED = b"f"  # a text whose first message follows the prompt
_REASONING = ("none", "basic", "deepseek_r1")
_CALLS = ("none", "hermes", "json")


# --- Harmony ----------------------------------------------------------------------------------------


@functools.cache
def _renderers() -> tuple[HarmonyRenderer, ...]:
    """Return a renderer for each choice of parsers. All have one vocabulary."""
    return tuple(
        HarmonyRenderer(reasoning_parser=reasoning, tool_call_parser=calls)
        for reasoning in ("gpt_oss", "none")
        for calls in ("harmony", "none")
    )


def _harmony_ids(data: bytes) -> TokenIds:
    """Return the token ids of an input."""
    if data.startswith(_IDS):
        # Each three bytes are a token.
        ids = token_ids()
        for begin in range(1, len(data), 3):
            number = int.from_bytes(data[begin : begin + 3], "big")
            ids.append(number % HARMONY_VOCAB_SIZE)
        return ids
    ids = token_ids()
    for part in _SPECIAL.split(data[1:]):
        special = _SPECIALS.get(part)
        if special is None:
            ids.extend(_renderers()[0].encode(part.decode("utf-8", "replace")))
        else:
            ids.append(special)
    return ids


def check_harmony(data: bytes) -> None:
    """Parse tokens of gpt-oss: any cut gives the same, and markers are never text."""
    ids = _harmony_ids(data)
    forced = token_ids()
    if data.startswith(_FORCED):
        at = ids.index(NAMED_SPECIALS["<|message|>"]) + 1 if _has_message(ids) else 0
        forced = ids[:at]
        ids = ids[at:]
    for renderer in _renderers():
        seen = _check_cuts(lambda r=renderer: r.chat_parser(forced_ids=forced), ids, data)
        has_text = seen.content or seen.reasoning or seen.calls
        if all(token_id >= FIRST_SPECIAL for token_id in ids) and not forced:
            assert not has_text
        if renderer is _renderers()[0]:
            _check_text_calls(seen)
    _check_cuts(lambda: _renderers()[0].text_parser(), ids, data)


def _has_message(ids: TokenIds) -> bool:
    return NAMED_SPECIALS["<|message|>"] in ids


def _check_text_calls(seen: Seen) -> None:
    """Check that the arguments of a call whose body is code are JSON."""
    for name, arguments in seen.calls:
        if name == "python" and arguments.startswith('{"input":"'):
            json.loads(arguments, strict=False)


def _check_cuts(make: Callable[[], OutputParser], ids: TokenIds, data: bytes) -> Seen:
    """Check that three cuts of the tokens give the same answer, and return it."""
    draw = random_of(data)
    whole = fold(make(), [ids])
    single = fold(make(), [ids[at : at + 1] for at in range(len(ids))])
    pieces = fold(make(), cut(ids, draw))
    assert single == whole, f"{single} when the tokens come one by one, {whole} when at once"
    assert pieces == whole, f"{pieces} in pieces, {whole} at once"
    return whole


def _harmony_texts() -> Iterator[bytes]:
    analysis = b"<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    final = b"<|channel|>final<|message|>It is 4.<|return|>"
    call = b'<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    early = b' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    python = b"<|channel|>analysis to=python code<|message|>print(1)\n<|call|>"
    preamble = b"<|channel|>commentary<|message|>I look. <|end|>"
    for text in (final, analysis + final, call, early, python, preamble + call, b"no header"):
        yield _TEXT + text
        yield _FORCED + text
    yield _IDS + bytes(range(30))
    yield _IDS + b"\x03\x0d\x45\x00\x00\x50\x03\x0d\x48\x00\x01\x00"


# --- chat templates ---------------------------------------------------------------------------------


def check_template_output(data: bytes) -> None:
    """Parse the output of a model with a chat template, by all its parsers."""
    seen = {}
    ids = token_ids(list(data))  # a token for each byte
    for reasoning in _REASONING:
        for calls in _CALLS:
            make = functools.partial(_template_parser, reasoning, calls)
            seen[reasoning, calls] = _check_cuts(make, ids, data)
    text = data.decode("utf-8", "replace")
    assert seen["none", "none"].content == text
    for calls in _CALLS:
        found = seen["none", calls]
        assert found.calls or found.content == text
    for reasoning in _REASONING:
        found = seen[reasoning, "none"]
        assert not found.calls
        assert len(found.content) + len(found.reasoning) <= len(text)
    _check_window(text, data)


def _template_parser(reasoning: str, calls: str) -> ChatOutputParser:
    return ChatOutputParser(
        BytesTextParser(_byte_texts()),
        reasoning_parser=reasoning,
        tool_call_parser=calls,
        forced_ids=token_ids(),
    )


@functools.cache
def _byte_texts() -> TokenTextCache:
    """Return a vocabulary with a token for each byte."""
    return TokenTextCache(lambda token_id: bytes([token_id]))


def _check_window(text: str, data: bytes) -> None:
    """Decode a vocabulary whose first word loses its blank, as SentencePiece's does."""

    def decode(ids: Sequence[int]) -> str:
        decoded = bytes(ids).decode("utf-8", "replace")
        return decoded[1:] if decoded.startswith(" ") else decoded

    seen = _check_cuts(lambda: WindowTextParser(decode, frozenset()), token_ids(list(data)), data)
    if "\ufffd" not in text:
        assert seen.content == (text[1:] if text.startswith(" ") else text)


def _template_texts() -> Iterator[bytes]:
    call = b'{"name": "f", "arguments": {"x": [1, "}"], "y": "\\""}}'
    yield b"<think>Hm. </think> Hello"
    yield b"<tool_call>\n" + call + b"\n</tool_call>"
    yield b"<think>Hm.</think>\n\n<tool_call>" + call + b"</tool_call><tool_call>" + call
    yield b"[" + call + b", " + call + b"]"
    yield b'{"type": "function", "id": "1", "parameters": {}, "name": "g"}'
    yield "é𒀀 <tool_".encode()
    yield b" \xff\xfe text"


TARGETS = {
    "harmony": Target(
        summary="output of gpt-oss in any cut of tokens",
        check=check_harmony,
        files=(
            "frontend/tokenization/harmony_parser.py",
            "frontend/tokenization/output.py",
            "frontend/tokenization/text_input.py",
        ),
        seeds=_harmony_texts,
        words=(
            *_SPECIALS,
            *(b"analysis", b"commentary", b"final", b" to=functions.", b" to=python", b" code"),
            *(b"json", b"assistant", b"browser.search", b"all"),
        ),
        max_bytes=400,
    ),
    "template-output": Target(
        summary="output of models with a chat template in any cut of tokens",
        check=check_template_output,
        files=(
            "frontend/tokenization/chat_output_parser.py",
            "frontend/tokenization/text_parsers.py",
        ),
        seeds=_template_texts,
        words=(
            *(b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b'"name"', b'"arguments"'),
            *(b'"parameters"', b'"id"', b'"type"', b'{"name": "f", "arguments": {}}', b"\\", b"["),
        ),
        max_bytes=300,
    ),
}
