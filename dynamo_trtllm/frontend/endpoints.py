"""The dialects that keep nothing between requests."""

from __future__ import annotations

from dynamo_trtllm.api.chat import ChatRequest
from dynamo_trtllm.api.completions import CompletionRequest
from dynamo_trtllm.frontend.aggregators import ChatFold, TextFold
from dynamo_trtllm.frontend.api_adapter import Direct
from dynamo_trtllm.frontend.preprocess import prepare_chat, prepare_text
from dynamo_trtllm.frontend.sse import ChatEvents, TextEvents

CHAT = Direct(
    endpoint="chat_completions",
    id_prefix="chatcmpl-",
    body=ChatRequest,
    prompt=frozenset({"messages", "tools"}),
    prepare=prepare_chat,
    events=ChatEvents,
    fold=ChatFold,
)
TEXT = Direct(
    endpoint="completions",
    id_prefix="cmpl-",
    body=CompletionRequest,
    prompt=frozenset({"prompt"}),
    prepare=prepare_text,
    events=TextEvents,
    fold=TextFold,
)
