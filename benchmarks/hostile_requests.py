"""Define deliberately expensive requests, by case, and send them."""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from dynamo_trtllm.frontend.api.request_model import MAX_KEYS
from dynamo_trtllm.support.network.addresses import LOOPBACK

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
MAX_BODY: Final = 8 << 20
_ADDRESS: Final = "127.0.0.2"  # of the expensive requests; the other clients have 127.0.0.1
TIMEOUT_S: Final = 120.0  # for a response


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `body` is sent unchanged."""

    path: str
    body: bytes
    head: str = ""  # replaces the Content-Length header
    sent: float = 1.0  # the part of the body that is sent; then the client waits
    leaves: bool = False  # the client closes the connection when it has sent the request

    @property
    def num_sent(self) -> int:
        """The bytes of the body that are sent."""
        return int(len(self.body) * self.sent)


def chat(**fields: Any) -> Request:
    """Return a chat request with these fields."""
    whole = {
        "model": "mock",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    } | fields
    return Request(CHAT, orjson.dumps(whole))


def repeat_text(text: str, size: int = MAX_BODY) -> Request:
    """Return a chat request of about `size` bytes with one message that repeats the text."""
    count = (size - 200) // len(orjson.dumps(text)[1:-1])
    return chat(messages=[{"role": "user", "content": text * count}])


def letters(seed: int) -> Request:
    """Return a chat request of 47 KB, whose text is slow to tokenize.

    It asks for too many tokens, so that no worker gets it.
    """
    text = "".join(random.Random(seed).choices(string.ascii_lowercase, k=47_000))
    return chat(messages=[{"role": "user", "content": text}], max_tokens=1 << 20)


def _tools(count: int, description: str, **properties: Any) -> Request:
    parameters = {"type": "object", "properties": properties}
    function = {"description": description, "parameters": parameters}
    return chat(
        tools=[{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(count)]
    )


def repeat_item(item: str, count: int, path: str = CHAT) -> Request:
    """Return a request whose messages or input repeat the item."""
    field = "input" if path == RESPONSES else "messages"
    items = ",".join([item] * count)
    return Request(path, f'{{"model":"mock","{field}":[{items}]}}'.encode())


def _calls(arguments: str, count: int = 1) -> Request:
    calls = [
        {"id": f"c{i}", "function": {"name": f"f{i}", "arguments": arguments}} for i in range(count)
    ]
    return chat(messages=[{"role": "assistant", "tool_calls": calls}])


def message(path: str = MESSAGES, **fields: Any) -> Request:
    """Return a request of Anthropic's API with these fields."""
    whole = {
        "model": "mock",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
    } | fields
    return Request(path, orjson.dumps(whole))


def _blocks(role: str, blocks: Sequence[Any]) -> Request:
    """Return a request of Anthropic's API whose first turn has these blocks."""
    last = {"role": "user", "content": "hi"}
    return message(messages=[{"role": role, "content": blocks}, last])


def _uses(count: int, **fields: Any) -> Request:
    uses = [
        {"type": "tool_use", "id": f"c{i}", "name": "f", "input": {}} | fields for i in range(count)
    ]
    return _blocks("assistant", uses)


def _results(count: int) -> Request:
    """Return a request of Anthropic's API with calls, and as many results."""
    uses = [{"type": "tool_use", "id": f"c{i}", "name": "f"} for i in range(count)]
    results = [
        {"type": "tool_result", "tool_use_id": f"c{i}", "content": "x"} for i in range(count)
    ]
    return message(
        messages=[{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    )


def _message_tools(count: int, **fields: Any) -> Request:
    """Return a request of Anthropic's API with so many tools."""
    return message(
        tools=[{"name": f"f{i}", "input_schema": {"type": "object"}} | fields for i in range(count)]
    )


def _deep_input(levels: int) -> Request:
    body = _uses(1, input="NESTED").body
    return Request(MESSAGES, body.replace(b'"NESTED"', b'{"a":' * levels + b"0" + b"}" * levels))


def _chunked(*parts: bytes) -> Request:
    return Request(CHAT, b"".join(parts), head="Transfer-Encoding: chunked")


CASES: Final[dict[str, Callable[[], Sequence[Request]]]] = {
    "letter": lambda: [repeat_text("a")],
    "alternating": lambda: [repeat_text("aA")],
    "blanks": lambda: [repeat_text(" ")],
    "newlines": lambda: [repeat_text("\n")],
    "digits": lambda: [repeat_text("7")],
    "punctuation": lambda: [repeat_text("!")],
    "CJK": lambda: [repeat_text("漢")],
    "emoji": lambda: [repeat_text("😀")],
    "marks": lambda: [repeat_text("\u0301")],
    "wide": lambda: [repeat_text("a" * 10_000 + "😀")],  # four bytes per character in memory
    "tool-words": lambda: [_tools(1, " ".join(["a" * 16_000] * 15))],
    "many-tools": lambda: [
        _tools(512, "word " * 40, place={"type": "string", "description": "x" * 200})
    ],
    "tools-too-large": lambda: [_tools(32, " ".join(["a" * 16_000] * 15))],
    "wrong-messages": lambda: [repeat_item("0", 400_000)],
    "wrong-items": lambda: [repeat_item("0", 400_000, path=RESPONSES)],
    "zeros": lambda: [repeat_item("0", (MAX_BODY - 100) // 2)],
    "zeros-15M": lambda: [repeat_item("0", 7_500_000)],
    "empty-lists": lambda: [repeat_item("[]", (MAX_BODY - 100) // 3)],
    "messages": lambda: [chat(messages=[{"role": "user", "content": "hi"}] * 20_000)],
    "names": lambda: [
        chat(messages=[{"role": "user", "name": f"n{i}", "content": "hi"} for i in range(20_000)])
    ],
    "calls": lambda: [_calls("{}", 20_000)],
    "deep-arguments": lambda: [_calls("[" * 1_000_000)],
    "deep": lambda: [Request(CHAT, b'{"model":' + b"[" * 4_000_000)],
    "stops": lambda: [chat(stop=["a" * 1_000_000] * 4)],
    "schema": lambda: [
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"title": "a" * 8_000_000}},
            }
        )
    ],
    "message-letter": lambda: [
        message(messages=[{"role": "user", "content": "a" * (MAX_BODY - 200)}])
    ],
    "message-counted": lambda: [message(COUNT_TOKENS, system="hello world, " * 600_000)],
    "message-turns": lambda: [message(messages=[{"role": "user", "content": "hi"}] * 20_000)],
    "message-blocks": lambda: [_blocks("user", [{"type": "text", "text": "hi"}] * 20_000)],
    "message-system": lambda: [
        message(system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}] * 20_000)
    ],
    "message-wrong-turns": lambda: [repeat_item("0", 400_000, path=MESSAGES)],
    "message-wrong-blocks": lambda: [_blocks("user", [0] * 20_000), _blocks("user", [0] * 400_000)],
    "message-odd-types": lambda: [
        _blocks("user", [{"type": "t" * 7_000_000}]),
        _blocks("user", [{"type": ["text"]}] * 20_000),
        _blocks("assistant", [{"type": "redacted_thinking", "data": "d" * 300}] * 20_000),
    ],
    "message-uses": lambda: [_uses(20_000)],
    "message-results": lambda: [_results(20_000)],
    "message-input": lambda: [
        _uses(1, input={f"k{i}": i for i in range(MAX_KEYS - 20)}),
        _uses(512, input={"a": "x" * 9_000}),
    ],
    "message-deep-input": lambda: [_deep_input(250), _deep_input(1_000), _deep_input(90_000)],
    "message-tools": lambda: [_message_tools(512, description="word " * 40)],
    "message-tool-words": lambda: [_message_tools(1, description=" ".join(["a" * 16_000] * 15))],
    "message-hosted": lambda: [
        _message_tools(512, type="web_search_20250305"),
        message(tools=[{"type": f"{'custom' * 7}{i}"} for i in range(512)]),
        message(tools=[{"type": f"t{i}"} for i in range(150_000)]),
    ],
    "message-unknown-fields": lambda: [
        message(MESSAGES, **{f"field_{i}": i for i in range(MAX_KEYS - 10)}),
        message(MESSAGES, **{f"field_{i}": i for i in range(300_000)}),
        _blocks(
            "user",
            [{"type": "text", "text": "x", f"max_token{i}": 1, f"y{i}": {}} for i in range(20_000)],
        ),
    ],
    "message-names": lambda: [
        message(tools=[{"name": "n" * 7_000_000, "input_schema": {}}]),
        message(tools=[{"type": "t" * 7_000_000}]),
        _uses(1, name="n" * 7_000_000),
        message(tool_choice={"type": "tool", "name": "n" * 7_000_000}),
        message(MESSAGES, **{"n" * 7_000_000: 1}),
    ],
    "message-stops": lambda: [message(stop_sequences=["a" * 400_000] * 16)],
    "message-schema": lambda: [
        message(
            output_config={"format": {"type": "json_schema", "schema": {"title": "a" * 8_000_000}}}
        ),
        _message_tools(1, input_schema={"title": "a" * 8_000_000}),
    ],
    "ids": lambda: [Request(TEXT, orjson.dumps({"model": "mock", "prompt": [7] * 1_200_000}))],
    "long-ids-n": lambda: [
        Request(TEXT, orjson.dumps({"model": "mock", "prompt": [7] * 131_000, "n": 128}))
    ],
    "echo-n": lambda: [
        Request(
            TEXT,
            orjson.dumps(
                {"model": "mock", "prompt": " " * 60_000, "echo": True, "n": 128, "max_tokens": 4}
            ),
        )
    ],
    "echo-n-large": lambda: [
        Request(
            TEXT, orjson.dumps({"model": "mock", "prompt": " " * 900_000, "echo": True, "n": 128})
        )
    ],
    "choices": lambda: [chat(n=128)] * 250,
    "choices-left": lambda: [replace(chat(n=128), leaves=True)] * 250,
    "answers": lambda: [chat(n=128, max_tokens=16_000)] * 64,
    "user": lambda: (
        [
            Request(
                RESPONSES, orjson.dumps({"model": "mock", "input": "x", "user": "u" * 30_000_000})
            )
        ]
        * 9
    ),
    "user-8M": lambda: (
        [Request(RESPONSES, orjson.dumps({"model": "mock", "input": "x", "user": "u" * 8_000_000}))]
        * 9
    ),
    "bodies": lambda: [repeat_text("hello world, ")] * 64,
    "medium-bodies": lambda: [letters(seed) for seed in range(256)],
    "stalled-bodies": lambda: [Request(CHAT, b" " * MAX_BODY, sent=0.5)] * 64,
    "slow-bodies": lambda: [Request(CHAT, b" " * (128 << 10), sent=0.99)] * 2100,
    "tiny-chunks": lambda: [_chunked(b"1\r\n \r\n" * 8_000)] * 1500,
    "small-chunks": lambda: [_chunked(b"8\r\n        \r\n" * 5_000 + b"0\r\n\r\n")] * 1500,
    "pipelined": lambda: (
        [Request("/none", b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n" * 400, head="X: y")] * 300
    ),
    "chunk-extension": lambda: [_chunked(b"1;x=", b"x" * 4_000_000, b"\r\n{\r\n0\r\n\r\n")],
    "trailer": lambda: [_chunked(b"1\r\n{\r\n0\r\nx: ", b"x" * 4_000_000, b"\r\n\r\n")],
}


async def exchange(port: int, data: bytes, address: str = LOOPBACK) -> str:
    """Send the data from a local address. Return the status code, or the name of the error."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(address, 0))
            try:
                writer.write(data)
                head = await reader.readuntil(b"\r\n\r\n")
                _, _, rest = head.lower().partition(b"content-length: ")
                length, _, _ = rest.partition(b"\r\n")
                await reader.readexactly(int(length))
            finally:
                writer.transport.abort()
    except TimeoutError:
        return "silent"
    except (OSError, asyncio.IncompleteReadError) as exc:
        return type(exc).__name__
    _, status, *_ = head.decode().split()
    return status


async def send(port: int, request: Request) -> str:
    """Send the request. Return the status code, or the name of the error."""
    length = request.head or f"Content-Length: {len(request.body)}"
    head = f"POST {request.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}"
    body = request.body[: request.num_sent]
    data = head.encode() + b"\r\n\r\n" + body
    return await _leave(port, data) if request.leaves else await exchange(port, data, _ADDRESS)


async def _leave(port: int, data: bytes) -> str:
    """Send the data, and close the connection at once."""
    _, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(_ADDRESS, 0))
    writer.write(data)
    writer.close()
    await writer.wait_closed()
    return "left"
