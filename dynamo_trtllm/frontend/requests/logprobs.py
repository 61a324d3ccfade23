"""Build the log-probabilities of a choice in the forms of OpenAI's APIs and of vLLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

from dynamo_trtllm.frontend.tokenization.renderer import Renderer
from dynamo_trtllm.protocol.messages import TokenLogprob, token_ids

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
    text = renderer.decode(token_ids((token_id,)))
    # In the response, null in place of the bytes means that the token is only part of a character.
    octets = None if HALF_CHARACTER in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": octets}


def text_logprobs(
    logprobs: Sequence[TokenLogprob], renderer: Renderer, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the `logprobs` object and the offset after its tokens.

    Offsets are in characters from the start of the response. The first token of a prompt has null
    in place of a log-probability, as with OpenAI.
    """

    @functools.cache
    def text_of(token_id: int) -> str:
        return renderer.decode(token_ids((token_id,)))

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
        found["tokens"].append(text)
        found["token_logprobs"].append(value)
        found["top_logprobs"].append(top)
        found["text_offset"].append(offset)
        offset += len(text)
    return found, offset


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], renderer: Renderer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: an entry for each token of the prompt.

    An entry has the token and its alternatives, by token id. The entry of the first token is None.
    A token has a rank if it is one of the alternatives.
    """

    @functools.cache
    def text_of(token_id: int) -> str:
        return renderer.decode(token_ids((token_id,)))

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
