"""Adapt `/v1/responses`: resolve references to stored responses, and store the responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

from dynamo_trtllm.api.request_model import MAX_TEXT
from dynamo_trtllm.api.responses import InputItem, ItemReference, ResponseRequest
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.generation.api_adapter import Aggregator, PreparedRequest, SseEncoder
from dynamo_trtllm.frontend.generation.preprocess import GenerationPlan, RequestContext
from dynamo_trtllm.frontend.generation.responses.items import Item, characters, normalized
from dynamo_trtllm.frontend.generation.responses.response_builder import (
    ResponseAggregator,
    ResponseBuilder,
    ResponseSseEncoder,
    prepare_turn,
)
from dynamo_trtllm.frontend.generation.responses.response_store import References, ResponseStore
from dynamo_trtllm.tokenization.base import ServedModel

THREAD_CHARS: Final = 16 << 10  # longer conversations are rendered in a thread, so that they delay no other stream


class ResponsesAdapter:
    """The adapter of `/v1/responses`. `builders` has the responses in progress, by id, until their requests end."""

    endpoint = "responses"
    body = ResponseRequest
    prompt = frozenset({"input"})

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self.id_prefix = store.id_prefix
        self.builders: WeakValueDictionary[str, ResponseBuilder] = WeakValueDictionary()

    async def plan(
        self, body: ResponseRequest, served: ServedModel, context: RequestContext, *, off_loop: bool
    ) -> GenerationPlan:
        """Plan the request with all items that it refers to.

        Raises:
            ResponseNotFound: the request refers to a response that is not stored.
            InvalidRequest: the conversation is too long.
        """
        items: list[Item] = []
        references = References(self._store)
        if body.previous_response_id is not None:
            items += await references.conversation(body.previous_response_id, "previous_response_id")
        items += await _own(body.input, references)
        size = characters(items)
        if size > MAX_TEXT:
            raise InvalidRequest(
                f"the conversation, with all referenced items, has {size} characters; at most {MAX_TEXT} are allowed",
                field="input",
            )
        if body.store and size + len(body.instructions or "") > self._store.max_bytes:
            raise InvalidRequest(
                f"the conversation has {size} characters; a stored response may have at most {self._store.max_bytes} "
                "bytes of conversation (--response-store-entry-bytes); set store to false",
                field="store",
            )
        if off_loop or size > THREAD_CHARS:
            return await in_thread(prepare_turn, body, items, served, context)
        return prepare_turn(body, items, served, context)

    def encoder(self, prepared: PreparedRequest[ResponseRequest]) -> ResponseSseEncoder:
        return ResponseSseEncoder(self._builder(prepared))

    def aggregator(self, prepared: PreparedRequest[ResponseRequest]) -> ResponseAggregator:
        return ResponseAggregator(self._builder(prepared))

    async def on_complete(self, prepared: PreparedRequest[ResponseRequest], output: SseEncoder | Aggregator) -> None:
        assert isinstance(output, ResponseSseEncoder | ResponseAggregator)
        builder = output.builder
        if builder.packed is not None:
            await self._store.put(builder.id, builder.packed, builder.client)

    def _builder(self, prepared: PreparedRequest[ResponseRequest]) -> ResponseBuilder:
        builder = self.builders[prepared.meta.id] = ResponseBuilder(prepared, self._store.max_bytes)
        return builder


async def _own(given: Sequence[InputItem], references: References) -> list[Item]:
    """Return the request's items with references resolved."""
    return [
        await references.item(item.id, f"input[{index}].id") if isinstance(item, ItemReference) else normalized(item)
        for index, item in enumerate(given)
    ]
