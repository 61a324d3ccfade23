"""Serve the endpoints that tokenize and generate nothing, with the tokenizer of generations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import orjson

from dynamo_trtllm.api.messages import CountTokensRequest
from dynamo_trtllm.api.response_schemas import (
    DetokenizationObject,
    InputTokensObject,
    MessageTokensObject,
    TokenizationObject,
)
from dynamo_trtllm.api.responses import ResponseRequest
from dynamo_trtllm.api.tokenization import DetokenizeRequest, TokenizeRequest
from dynamo_trtllm.api.unknown_fields import collector
from dynamo_trtllm.errors import ContextTooLong, InvalidRequest
from dynamo_trtllm.frontend.generation.conversation import chat_conversation, chat_options
from dynamo_trtllm.frontend.generation.messages.message_builder import messages_prompt
from dynamo_trtllm.frontend.generation.preprocess import (
    MAX_PROMPT_TOKENS,
    checked_ids,
    conversation_prompt,
)
from dynamo_trtllm.frontend.generation.responses.response_builder import ResponsesAdapter
from dynamo_trtllm.frontend.http.endpoint import Endpoint, is_large_body
from dynamo_trtllm.frontend.http.request_context import AppState, RequestContext
from dynamo_trtllm.frontend.requests.admission import check_json
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.http_server.server import Route
from dynamo_trtllm.messages import TokenIds
from dynamo_trtllm.tokenization.served_model import ServedModel

R = TypeVar("R", TokenizeRequest, DetokenizeRequest, ResponseRequest, CountTokensRequest)

# Reads what a request refers to. Returns the work that makes the response, which may take long and
# is safe in a thread, and the characters of stored text that it renders.
Resolve: TypeAlias = Callable[
    [R, ServedModel], Awaitable[tuple[Callable[[], Mapping[str, Any]], int]]
]


class TokenizationEndpoint(Endpoint, Generic[R]):
    """The handler of requests that are answered with the tokenizer, without a worker."""

    def __init__(self, name: str, body: type[R], resolve: Resolve[R], app_state: AppState) -> None:
        super().__init__(name, app_state)
        self._body: type[R] = body
        self._resolve: Resolve[R] = resolve

    async def _serve(
        self, context: RequestContext, request: HttpRequest, response: HttpResponse
    ) -> None:
        check_json(request)
        raw_body = await context.read_body(request)
        unknown_fields = self._app_state.config.unknown_fields
        ignored = collector(unknown_fields)
        is_large = is_large_body(raw_body)
        async with self._slot(is_large=is_large):
            context.enter("tokenize")
            body = await self._parse(self._body, raw_body, ignored, is_large=is_large)
            served = self._app_state.models.get(body.model)
            prepare, stored_chars = await self._resolve(body, served)
            size = max(len(raw_body), stored_chars)

            def encode() -> bytes:
                return orjson.dumps(prepare())

            data = await self._tokenize(context, served, encode, size, is_large=is_large)
        if ignored is not None and unknown_fields != "ignore":
            context.report_ignored(ignored, request)
        response.send(200, data, headers=context.served_by())


def tokenization_routes(app_state: AppState, responses: ResponsesAdapter) -> list[Route]:
    """Return the routes of this module. `responses` resolves the references of `/v1/responses`."""
    tokenize = TokenizationEndpoint("tokenize", TokenizeRequest, _tokenization, app_state)
    detokenize = TokenizationEndpoint("detokenize", DetokenizeRequest, _detokenization, app_state)
    resolve = _input_tokens(responses)
    count = TokenizationEndpoint("input_tokens", ResponseRequest, resolve, app_state)
    count_tokens = TokenizationEndpoint(
        "count_tokens",
        CountTokensRequest,
        _message_tokens,
        app_state,
    )
    return [
        Route("POST", "/tokenize", tokenize),
        Route("POST", "/detokenize", detokenize),
        Route("POST", "/v1/responses/input_tokens", count),
        Route("POST", "/v1/messages/count_tokens", count_tokens),
    ]


async def _tokenization(
    body: TokenizeRequest, served: ServedModel
) -> tuple[Callable[[], TokenizationObject], int]:
    """Return the work that answers `/tokenize`."""
    return partial(_tokenized, body, served), 0


def _tokenized(body: TokenizeRequest, served: ServedModel) -> TokenizationObject:
    if body.prompt is not None:
        ids = served.renderer.encode(body.prompt, is_prompt=body.add_special_tokens is not False)
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
    body: DetokenizeRequest, served: ServedModel
) -> tuple[Callable[[], DetokenizationObject], int]:
    """Return the work that answers `/detokenize`. Raises ContextTooLong."""
    context_length = served.card.context_length
    if len(body.tokens) > context_length:  # a token can have more characters than its id
        raise ContextTooLong(
            f"tokens has {len(body.tokens)} token ids; the context length of {served.card.name} is "
            f"{context_length}, send a part",
            field="tokens",
        )

    def prepare() -> DetokenizationObject:
        ids = checked_ids(body.tokens, served, "tokens")
        try:
            return {"prompt": served.renderer.decode(ids)}
        except InvalidRequest as exc:
            raise InvalidRequest(exc.message, field="tokens") from exc

    return prepare, 0


def _input_tokens(adapter: ResponsesAdapter) -> Resolve[ResponseRequest]:
    """Return what resolves requests of `/v1/responses/input_tokens`."""

    async def resolve(
        body: ResponseRequest, served: ServedModel
    ) -> tuple[Callable[[], InputTokensObject], int]:
        prompt, size = await adapter.resolve_prompt(body, served)

        def count() -> InputTokensObject:
            return {"object": "response.input_tokens", "input_tokens": len(prompt())}

        return count, size

    return resolve


async def _message_tokens(
    body: CountTokensRequest, served: ServedModel
) -> tuple[Callable[[], MessageTokensObject], int]:
    """Return the work that answers `/v1/messages/count_tokens`."""

    def count() -> MessageTokensObject:
        return {"input_tokens": len(messages_prompt(body, served))}

    return count, 0
