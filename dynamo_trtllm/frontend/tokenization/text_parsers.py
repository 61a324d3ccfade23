"""Decode tokens to plain text, incrementally: in complete UTF-8 characters and in linear time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from typing import Final

from dynamo_trtllm.frontend.tokenization.output import NO_OUTPUT, Channel, Delta, StepOutput
from dynamo_trtllm.protocol.messages import TokenIds

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_TOKENS: Final = 4  # a UTF-8 character has at most four bytes


class TokenTextCache(dict[int, StepOutput | None]):
    """The output of each token that is complete UTF-8 by itself; None for any other token.

    Entries are added at first use, so the cache grows up to the size of the vocabulary. All
    requests of a model share it.

    Args:
        token_bytes: returns the bytes of a token.
        channel: the channel of the texts.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], channel: Channel = Channel.CONTENT
    ) -> None:
        self.token_bytes = token_bytes
        self._channel = channel

    def __missing__(self, token_id: int) -> StepOutput | None:
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        deltas = (Delta(channel=self._channel, text=text),)
        step = StepOutput(deltas=deltas, reasoning_tokens=int(self._channel is Channel.REASONING))
        return self.setdefault(token_id, step if text else None)


def text_output(text: str) -> StepOutput:
    """Return output that is only content."""
    return StepOutput(deltas=(Delta(channel=Channel.CONTENT, text=text),)) if text else NO_OUTPUT


class BytesTextParser:
    """OutputParser for vocabularies whose tokens are byte strings, b"" if hidden; all text is
    content.
    """

    def __init__(self, token_texts: TokenTextCache) -> None:
        self._token_texts = token_texts
        self._decoder = Utf8Decoder(errors="replace")

    def push(self, token_ids: TokenIds) -> StepOutput:
        if len(token_ids) == 1 and not self._decoder.buffer:
            step = self._token_texts[token_ids[0]]
            if step is not None:
                return step
        data = b"".join(map(self._token_texts.token_bytes, token_ids))
        return text_output(self._decoder.decode(data))

    def finish(self) -> StepOutput:
        return text_output(self._decoder.decode(b"", final=True))


class WindowTextParser:
    """OutputParser for vocabularies in which a token's text depends on the tokens before it.

    Examples are leading spaces and byte fallback. The parser decodes a short window: the tokens of
    the last emitted text, as context, and the tokens after them.

    Args:
        decode: returns the text of tokens.
        hidden: special tokens, which are omitted.
        context: the last tokens before the output. MAX_CHARACTER_TOKENS are enough.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        hidden: frozenset[int],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        # The tokens of the last emitted text, or before the output.
        self._context = _last_text(context, decode)
        self._held: list[int] = []  # the tokens after them, whose text is not emitted yet

    def push(self, token_ids: TokenIds) -> StepOutput:
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._held.append(token_id)
            text = self._new_text()
            if text.endswith(_REPLACEMENT) and len(self._held) < MAX_CHARACTER_TOKENS:
                continue
            parts.append(text)
            self._context = self._held
            self._held = []
        return text_output("".join(parts))

    def finish(self) -> StepOutput:
        return text_output(self._new_text() if self._held else "")

    def _new_text(self) -> str:
        context_chars = len(self._decode(self._context))
        return self._decode([*self._context, *self._held])[context_chars:]


def _last_text(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the last tokens, as few as end with a complete character; [] if there are none."""
    for size in range(1, len(tokens) + 1):
        last = list(tokens[-size:])
        if not decode(last).endswith(_REPLACEMENT):
            return last
    return []
