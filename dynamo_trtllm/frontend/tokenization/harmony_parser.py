"""Parse Harmony output into deltas: reasoning, commentary, the final text and function calls.

The parser accepts any output of a model without an error, omits all markers, and withholds at most
one message header.
"""

from __future__ import annotations

from collections.abc import Mapping
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder
from enum import StrEnum, auto
from typing import Final, NamedTuple

from dynamo_trtllm.frontend.tokenization import text_input
from dynamo_trtllm.frontend.tokenization.conversation import TOOL_NAME
from dynamo_trtllm.frontend.tokenization.harmony_builtins import PYTHON
from dynamo_trtllm.frontend.tokenization.output import Channel, DeltaBuilder, StepOutput
from dynamo_trtllm.frontend.tokenization.renderer import NO_FORCED_IDS
from dynamo_trtllm.frontend.tokenization.text_parsers import TokenTextCache
from dynamo_trtllm.models.vocabulary import FIRST_SPECIAL, NAMED_SPECIALS
from dynamo_trtllm.protocol.messages import TokenIds

ASSISTANT: Final = "assistant"
CHANNELS: Final = ("analysis", "commentary", "final")
_FUNCTIONS: Final = "functions."
_TO: Final = "to="
_NO_TOOLS: Final = frozenset(("", "all", "user", ASSISTANT))  # recipients that are not tools


class Header(NamedTuple):
    """The parts of a message header. A missing part is "", but a missing role is the assistant."""

    role: str = ASSISTANT
    channel: str = ""
    recipient: str = ""
    content_type: str = ""

    @property
    def call(self) -> str | None:
        """Return the name of the called tool, or None. Calls with an invalid name do not count."""
        if self.role != ASSISTANT or self.recipient in _NO_TOOLS:
            return None
        name = self.recipient.removeprefix(_FUNCTIONS)
        return name if TOOL_NAME.match(name) else None

    @property
    def is_text_call(self) -> bool:
        """Return whether the body of a call is a text, not JSON: gpt-oss was trained to send code
        to `python`.
        """
        return self.recipient == PYTHON and self.content_type != "json"

    @property
    def is_commentary(self) -> bool:
        """Return whether the text is not the answer, but a preamble or a text for a tool."""
        is_for_tool = self.recipient not in _NO_TOOLS
        return self.role == ASSISTANT and (self.channel == "commentary" or is_for_tool)

    @property
    def is_reasoning(self) -> bool:
        return self.role == ASSISTANT and self.channel == "analysis" and self.recipient in _NO_TOOLS


def _is_recipient(word: str) -> bool:
    # The model may omit `to=` before the name of a function.
    return word.startswith((_TO, _FUNCTIONS))


RETURN: Final = NAMED_SPECIALS["<|return|>"]
CONSTRAIN: Final = NAMED_SPECIALS["<|constrain|>"]
CHANNEL: Final = NAMED_SPECIALS["<|channel|>"]
START: Final = NAMED_SPECIALS["<|start|>"]
END: Final = NAMED_SPECIALS["<|end|>"]
MESSAGE: Final = NAMED_SPECIALS["<|message|>"]
CALL: Final = NAMED_SPECIALS["<|call|>"]
STOPS: Final[tuple[int, ...]] = (RETURN, CALL)  # tokens that end an answer or a call
_ENDS: Final = frozenset((*STOPS, END))
# Longer text is not a header. Names of tools have at most 256 characters.
_MAX_HEADER_TOKENS: Final = 288
_MAX_HEADER_BLANKS: Final = 12  # Text with more words is not a header either.
_RECIPIENT: Final = b" to="  # the only text that may come before the first control token of a turn


class _Position(StrEnum):
    """Position of the next token: in a header, between messages, or in a part of the output."""

    HEADER = auto()
    BETWEEN = auto()  # the position after the end of a message
    FINAL = auto()
    COMMENTARY = auto()
    REASONING = auto()
    ARGUMENTS = auto()


_OUTSIDE: Final = (_Position.HEADER, _Position.BETWEEN)  # positions outside of a body
_CHANNELS: Final = {
    _Position.FINAL: Channel.FINAL,
    _Position.COMMENTARY: Channel.COMMENTARY,
    _Position.REASONING: Channel.REASONING,
}


class HarmonyParser:
    """OutputParser of one assistant turn, which begins after `<|start|>assistant`.

    Text that is not valid Harmony becomes final text, without control tokens. This applies to
    invalid, overlong and unfinished headers, and to text between messages. Calls without a valid
    name are text, too. The code of a call of `python` becomes JSON arguments (see `text_input`).
    A header that the end of the output cuts off is dropped if it may be the beginning of a valid
    header.

    Args:
        texts: a cache for each channel: token id -> output of a step with only this token. The
            output is None for control tokens.
        forced_ids: ids that follow the prompt. They are not output.
        is_reasoning_split: if False, reasoning is final text.
        is_call_split: if False, the arguments of calls are text of their message's channel.
    """

    def __init__(
        self,
        texts: Mapping[Channel, TokenTextCache],
        *,
        forced_ids: TokenIds = NO_FORCED_IDS,
        is_reasoning_split: bool = True,
        is_call_split: bool = True,
    ) -> None:
        self._texts = texts
        self._token_bytes = texts[Channel.FINAL].token_bytes
        self._reasoning_position = _Position.REASONING if is_reasoning_split else _Position.FINAL
        self._is_call_split = is_call_split
        self._decoder = Utf8Decoder(errors="replace")
        # The cache of the channel of the current body. None: outside of bodies, and in arguments.
        self._token_steps: TokenTextCache | None = None
        self._position = _Position.HEADER
        self._header: list[int] = []
        self._blanks = 0  # number of blanks in the header
        self._num_calls = 0
        self._is_text_call = False  # the current body is a text, and becomes arguments
        self._out = DeltaBuilder()
        # Number of tokens at the start of the header that were forced. These are not output. While
        # the forced ids are parsed, this is the number of all forced ids. The header can't have
        # more tokens, so nothing of it is output.
        self._num_forced_in_header = len(forced_ids)
        self._parse(forced_ids)
        self._num_forced_in_header = len(self._header)

    def push(self, token_ids: TokenIds) -> StepOutput:
        if self._token_steps is not None and len(token_ids) == 1 and not self._decoder.buffer:
            step = self._token_steps[token_ids[0]]
            if step is not None:
                return step
        self._parse(token_ids)
        self._select_cache()
        return self._out.take()

    def finish(self) -> StepOutput:
        if self._position is _Position.HEADER and self._header and not self._is_cut_header():
            self._emit_header_as_text()
        self._flush()
        return self._out.take()

    def _select_cache(self) -> None:
        """Select the cache for the next token."""
        channel = _CHANNELS.get(self._position)
        self._token_steps = None if channel is None else self._texts[channel]

    def _parse(self, token_ids: TokenIds) -> None:
        body_ids: list[int] = []  # tokens of the body that are not decoded yet
        for token_id in token_ids:
            if token_id < FIRST_SPECIAL and self._position not in _OUTSIDE:
                body_ids.append(token_id)
                continue
            if body_ids:
                self._body(body_ids)
                body_ids = []
            if token_id >= FIRST_SPECIAL:
                self._control(token_id)
            else:
                self._text(token_id)
        if body_ids:
            self._body(body_ids)

    def _text(self, token_id: int) -> None:
        """Process an ordinary token outside a body."""
        if self._position is _Position.BETWEEN:
            self._position = _Position.FINAL
            self._body([token_id])
            return
        self._header.append(token_id)
        if self._token_bytes(token_id).startswith(b" "):
            self._blanks += 1
        if not self._can_be_header():
            self._emit_header_as_text()

    def _control(self, token_id: int) -> None:
        """Process a control token."""
        if self._position is _Position.HEADER and token_id == MESSAGE:
            self._end_header()
        elif self._position is _Position.HEADER and token_id in (CHANNEL, CONSTRAIN):
            self._header.append(token_id)
        elif token_id in (START, CHANNEL):
            # A new message. The model may omit the end marker or the start marker.
            self._end_message()
            self._position = _Position.HEADER
            self._header = [token_id]
        elif token_id in _ENDS:
            self._end_message()

    def _can_be_header(self) -> bool:
        """Return whether the tokens so far may become a header.

        Before the first control token, only a recipient may come. Text with a new line, too many
        words or too many tokens is not a header.
        """
        newest = self._token_bytes(self._header[-1])
        is_too_long = len(self._header) > _MAX_HEADER_TOKENS or self._blanks > _MAX_HEADER_BLANKS
        if is_too_long or b"\n" in newest:
            return False
        if self._header[0] >= FIRST_SPECIAL:
            return True
        # Each token has at least one byte, so an earlier call has compared all of `_RECIPIENT`.
        if len(self._header) > len(_RECIPIENT):
            return True
        text = self._bytes(self._header)
        return text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text)

    def _end_header(self) -> None:
        """Begin the body that the withheld header announces."""
        header = self._read_header()
        if header is None:
            self._emit_header_as_text()
            return
        self._clear_header()
        if self._is_call_split and header.call is not None:
            self._position = _Position.ARGUMENTS
            self._out.begin_call(self._num_calls, header.call)
            self._is_text_call = header.is_text_call
            if self._is_text_call:
                self._out.add_arguments(self._num_calls, text_input.OPENING)
            self._num_calls += 1
        elif header.is_reasoning:
            self._position = self._reasoning_position
        else:
            self._position = _Position.COMMENTARY if header.is_commentary else _Position.FINAL

    def _read_header(self) -> Header | None:
        """Parse the withheld tokens, `sender<|channel|>channel<|constrain|>content_type`.

        The sender begins with the role if `<|start|>` precedes it. None: the tokens are no header.
        """
        control = START
        parts: dict[int, list[int]] = {control: []}
        for token_id in self._header:
            if token_id < FIRST_SPECIAL:
                parts[control].append(token_id)
                continue
            # `parts` has the sender's part from the beginning, because START may be missing.
            if token_id == START:
                continue
            if token_id in parts:
                return None
            control = token_id
            parts[token_id] = []
        words = {
            control: self._bytes(ids).decode(errors="replace").split()
            for control, ids in parts.items()
        }
        sender_words = words.get(START, [])
        channel_words = words.get(CHANNEL, [])
        type_words = words.get(CONSTRAIN, [])
        role = ASSISTANT
        if sender_words and self._header[0] == START:
            role = sender_words.pop(0)
        channel = ""
        if channel_words:
            channel = channel_words.pop(0)
        recipients = {
            word.removeprefix(_TO)
            for word in (*sender_words, *channel_words)
            if _is_recipient(word)
        }
        # A content type may follow the channel without `<|constrain|>`.
        bare_types = [word for word in channel_words if not _is_recipient(word)]
        # Only recipients may follow the role, and the channel comes before a recipient.
        if not all(map(_is_recipient, sender_words)) or _is_recipient(channel):
            return None
        if len(recipients) > 1 or len(bare_types) > 1 or len(type_words) > 1:
            return None
        # There is at most one recipient. At most one content type follows `<|constrain|>`, and at
        # most one follows the channel.
        recipient = next(iter(recipients), "")
        content_types = [*type_words, *bare_types]
        content_type = content_types[0] if content_types else ""
        return Header(role=role, channel=channel, recipient=recipient, content_type=content_type)

    def _is_cut_header(self) -> bool:
        """Return True if the withheld tokens are the beginning of a header that the end of the
        output cut off.
        """
        header = self._read_header()
        # The role may be cut off, too.
        if header is None or not ASSISTANT.startswith(header.role):
            return False
        has_control_token = self._header[0] >= FIRST_SPECIAL
        if not has_control_token and not header.recipient:
            return False
        return any(channel.startswith(header.channel) for channel in CHANNELS)

    def _emit_header_as_text(self) -> None:
        """Emit the withheld header as final text, which may continue until a control token."""
        shown = self._header[self._num_forced_in_header :]
        self._clear_header()
        self._position = _Position.FINAL
        self._body(shown)

    def _clear_header(self) -> None:
        self._header = []
        self._blanks = 0
        self._num_forced_in_header = 0

    def _end_message(self) -> None:
        """End the current body, or a header without one."""
        if self._position is _Position.HEADER and self._header:
            # A header of only the role is dropped: it has nothing to show.
            is_bare = self._read_header() == Header()
            if not is_bare:
                self._emit_header_as_text()
        self._flush()
        self._clear_header()
        self._position = _Position.BETWEEN

    def _body(self, ids: list[int]) -> None:
        if self._position is _Position.REASONING:
            self._out.reasoning_tokens += len(ids)
        self._put(self._decoder.decode(self._bytes(ids)))

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(map(self._token_bytes, ids))

    def _flush(self) -> None:
        self._put(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        if self._is_text_call:
            self._out.add_arguments(self._num_calls - 1, text_input.CLOSING)
            self._is_text_call = False

    def _put(self, text: str) -> None:
        channel = _CHANNELS.get(self._position)
        if channel is not None:
            self._out.add(channel, text)
        elif self._position is _Position.ARGUMENTS:
            arguments = text_input.escaped(text) if self._is_text_call else text
            self._out.add_arguments(self._num_calls - 1, arguments)
