"""Define the endpoints that only tokenize. They use the same tokenizers as generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from dynamo_trtllm.frontend.api.messages import CountTokensRequest
from dynamo_trtllm.frontend.api.response_schemas import (
    DetokenizationObject,
    InputTokensObject,
    MessageTokensObject,
    TokenizationObject,
)
from dynamo_trtllm.frontend.api.responses import ResponseRequest
from dynamo_trtllm.frontend.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.frontend.messages_api.message_builder import messages_prompt
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.conversation import chat_conversation, chat_options
from dynamo_trtllm.frontend.requests.preprocess import (
    MAX_PROMPT_TOKENS,
    checked_ids,
    conversation_prompt,
)
from dynamo_trtllm.frontend.requests.serve_request import handle_request
from dynamo_trtllm.frontend.requests.serve_tokenization import (
    R,
    Resolve,
    TokenizationApi,
    serve_tokenization,
)
from dynamo_trtllm.frontend.responses_api.response_builder import ResponsesAdapter
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import ContextTooLong, InvalidRequest
from dynamo_trtllm.protocol.messages import TokenIds
from dynamo_trtllm.support.http_server.server import Route

# The work of a request is returned with the number of characters of stored responses that it
# renders. Only `/v1/responses/input_tokens` has stored responses.
_NO_STORED_CHARS = 0


def tokenization_routes(app_state: AppState, responses: ResponsesAdapter) -> list[Route]:
    """Return the routes of this module. `responses` resolves the references of `/v1/responses`."""
    tokenize = TokenizationApi("tokenize", TokenizeRequest, _tokenization)
    detokenize = TokenizationApi("detokenize", DetokenizeRequest, _detokenization)
    count = TokenizationApi("input_tokens", ResponseRequest, _input_tokens(responses))
    count_message = TokenizationApi("count_tokens", CountTokensRequest, _message_tokens)
    return [
        _route("/tokenize", tokenize, app_state),
        _route("/detokenize", detokenize, app_state),
        _route("/v1/responses/input_tokens", count, app_state),
        _route("/v1/messages/count_tokens", count_message, app_state),
    ]


def _route(path: str, api: TokenizationApi[R], app_state: AppState) -> Route:
    serve = partial(serve_tokenization, api, app_state)
    return Route("POST", path, partial(handle_request, api.endpoint, serve, app_state))


async def _tokenization(
    body: TokenizeRequest, served: ServedModel, owner: str
) -> tuple[Callable[[], TokenizationObject], int]:
    """Return the work that answers `/tokenize`."""
    return partial(_tokenized, body, served), _NO_STORED_CHARS


def _tokenized(body: TokenizeRequest, served: ServedModel) -> TokenizationObject:
    """Return the response of `/tokenize`, to a plain prompt or to messages."""
    if body.prompt is not None:
        # None means the default, which is true.
        adds_special_tokens = body.add_special_tokens is not False
        ids = served.renderer.encode(body.prompt, is_prompt=adds_special_tokens)
    else:
        conversation = chat_conversation(body)
        if not body.add_generation_prompt:
            conversation = msgspec.structs.replace(conversation, opens_answer=False)
        ids = conversation_prompt(conversation, chat_options(body, served.card), served).ids
    _check_count(ids, "messages" if body.prompt is None else "prompt")
    return {
        "count": len(ids),
        "max_model_len": served.card.context_length,
        "tokens": ids.tolist(),
        "token_strs": served.renderer.token_texts(ids) if body.return_token_strs else None,
    }


def _check_count(ids: TokenIds, field: str) -> None:
    """Raise InvalidRequest for a text with more tokens than all prompts of a request may have."""
    if len(ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"{field} has {len(ids)} tokens; at most {MAX_PROMPT_TOKENS} are allowed, send a part",
            field=field,
        )


async def _detokenization(
    body: DetokenizeRequest, served: ServedModel, owner: str
) -> tuple[Callable[[], DetokenizationObject], int]:
    """Return the work that answers `/detokenize`. Raises ContextTooLong."""
    context_length = served.card.context_length
    # The text of a token can be longer than its id, so the limit of bodies does not limit the text.
    if len(body.tokens) > context_length:
        raise ContextTooLong(
            f"tokens has {len(body.tokens)} token ids; the context length of {served.card.name} is "
            f"{context_length}, send a part",
            field="tokens",
        )

    def detokenize() -> DetokenizationObject:
        ids = checked_ids(body.tokens, served, "tokens")
        try:
            return {"prompt": served.renderer.decode(ids)}
        except InvalidRequest as exc:
            raise InvalidRequest(exc.message, field="tokens") from exc

    return detokenize, _NO_STORED_CHARS


def _input_tokens(adapter: ResponsesAdapter) -> Resolve[ResponseRequest]:
    """Return the function that returns the work of a request of `/v1/responses/input_tokens`."""

    async def resolve(
        body: ResponseRequest, served: ServedModel, owner: str
    ) -> tuple[Callable[[], InputTokensObject], int]:
        prompt_ids, stored_chars = await adapter.resolve_prompt(body, served, owner)

        def count() -> InputTokensObject:
            return {"object": "response.input_tokens", "input_tokens": len(prompt_ids())}

        return count, stored_chars

    return resolve


async def _message_tokens(
    body: CountTokensRequest, served: ServedModel, owner: str
) -> tuple[Callable[[], MessageTokensObject], int]:
    """Return the work that answers `/v1/messages/count_tokens`."""

    def count() -> MessageTokensObject:
        return {"input_tokens": len(messages_prompt(body, served))}

    return count, _NO_STORED_CHARS
