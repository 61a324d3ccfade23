"""Build the log-probabilities of a choice in the forms of OpenAI's APIs and of vLLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from dynamo_trtllm.frontend.tokenization.output import OutputParser
from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.protocol.messages import TokenIds, TokenLogprob, token_ids

LOWEST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON does not have
HALF_CHARACTER: Final = "\ufffd"  # the text of a token that is only part of a character


def chat_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer) -> dict[str, Any]:
    """Return the `logprobs` object of a choice of a chat completion."""
    content = []
    for scored in logprobs:
        top = [_token(token_id, logprob, renderer) for token_id, logprob in scored.top]
        token = _token(scored.token_id, scored.logprob, renderer)
        content.append(token | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, renderer: Renderer) -> dict[str, Any]:
    text = renderer.token_text(token_id)
    # In the response, null in place of the bytes means that the token is only part of a character.
    octets = None if HALF_CHARACTER in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": octets}


class TextOffsets:
    """Counts the characters of a choice's text before each of its tokens.

    The text of a token may depend on the tokens around it, and special tokens may have none. So the
    tokens are parsed one by one, as the text was.

    Args:
        parser: a new parser of the generated text.
        prompt: the offsets of the prompt's tokens, if the choice echoes their log-probabilities.
        echo: the text of the prompt, with which the choice begins.
    """

    def __init__(self, parser: OutputParser, prompt: Iterable[int], echo: str) -> None:
        self._parser = parser
        self._prompt = iter(prompt)
        self._num_chars = len(echo)

    def of_next(self, token_id: int) -> int:
        """Return the offset of the next token of the choice."""
        in_prompt = next(self._prompt, None)
        if in_prompt is not None:
            return in_prompt
        offset = self._num_chars
        self._num_chars += _num_chars(self._parser, token_id)
        return offset


def prompt_offsets(ids: TokenIds, echo: str, renderer: Renderer) -> Iterator[int]:
    """Yield the offset of each token of a prompt in `echo`, its text."""
    # The tokens of a string may begin with a special one, which the string does not have.
    hidden = frozenset[int]() if renderer.decode(ids) == echo else None
    parser = renderer.text_parser(hidden)
    offset = 0
    for token_id in ids:
        yield offset
        offset += _num_chars(parser, token_id)


def _num_chars(parser: OutputParser, token_id: int) -> int:
    """Return how many characters a token adds to the text."""
    deltas = parser.push(token_ids((token_id,))).deltas
    # All text is content, so it is one delta.
    return len(deltas[0].text) if deltas else 0


def text_logprobs(
    logprobs: Sequence[TokenLogprob], renderer: Renderer, offsets: TextOffsets
) -> dict[str, Any]:
    """Return the `logprobs` object of a part of a choice of a text completion.

    As with OpenAI, offsets are in characters from the start of the text, the alternatives of a
    token include the token itself, and the first token of a prompt has null in place of a
    log-probability.
    """

    text_of = functools.cache(renderer.token_text)

    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for scored in logprobs:
        text = text_of(scored.token_id)
        value: float | None = None
        top: dict[str, float] | None = None
        if not math.isnan(scored.logprob):
            value = _finite(scored.logprob)
            top = {text_of(token_id): _finite(logprob) for token_id, logprob in scored.top}
            # A token that was sampled may be none of the likeliest ones.
            top.setdefault(text, value)
        found["tokens"].append(text)
        found["token_logprobs"].append(value)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offsets.of_next(scored.token_id))
    return found


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], renderer: Renderer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: an entry for each token of the prompt.

    An entry has the token and its alternatives, by token id. The entry of the first token is None.
    A token has a rank if it is one of the alternatives.
    """

    text_of = functools.cache(renderer.token_text)

    found: list[dict[str, Any] | None] = []
    for scored in logprobs:
        if math.isnan(scored.logprob):
            found.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(scored.top, start=1)}
        values = {scored.token_id: scored.logprob} | dict(scored.top)
        entries: dict[str, Any] = {
            str(token_id): {
                "logprob": _finite(value),
                "rank": ranks.get(token_id),
                "decoded_token": text_of(token_id),
            }
            for token_id, value in values.items()
        }
        found.append(entries)
    return found


def _finite(logprob: float) -> float:
    """Return a log-probability that JSON can express."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
