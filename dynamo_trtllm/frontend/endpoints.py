"""The dialects that keep nothing between requests."""

from __future__ import annotations

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.frontend.aggregators import ChatAggregator, TextAggregator
from dynamo_trtllm.frontend.api_adapter import StatelessAdapter
from dynamo_trtllm.frontend.preprocess import prepare_chat, prepare_text
from dynamo_trtllm.frontend.sse import ChatSseEncoder, TextSseEncoder

CHAT = StatelessAdapter(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prompt=frozenset({"messages", "tools"}),
    prepare=prepare_chat,
    events=ChatSseEncoder,
    fold=ChatAggregator,
)
TEXT = StatelessAdapter(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prompt=frozenset({"prompt"}),
    prepare=prepare_text,
    events=TextSseEncoder,
    fold=TextAggregator,
)
