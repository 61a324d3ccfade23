"""The anthropic package. It needs /v1/messages: its steps are skipped on a server without it."""

import anthropic
from steps import DESCRIPTION, QUESTION, STATUS, check, run

HELLO = {"max_tokens": 400, "messages": [{"role": "user", "content": "Hello"}]}


def plain(base_url: str, model: str) -> str:
    # docs: anthropic
    client = anthropic.Anthropic(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": "Hello"}]
    answer = client.messages.create(model=model, max_tokens=400, messages=messages)
    text = "".join(block.text for block in answer.content if block.type == "text")
    # docs: end
    check(text, answer)
    return text


def _client(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)


def stream(base_url: str, model: str) -> str:
    with _client(base_url).messages.stream(model=model, **HELLO) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    check(text and final.stop_reason == "end_turn", text, final)
    return text


def tools(base_url: str, model: str) -> str:
    """Send back the content blocks themselves, thinking included."""
    client = _client(base_url)
    tool = {"name": "get_system_health", "description": DESCRIPTION}
    tool["input_schema"] = {"type": "object", "properties": {}}
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": model, "max_tokens": 400, "messages": messages, "tools": [tool]}
    first = client.messages.create(**asked)
    check(first.stop_reason == "tool_use", first)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": STATUS}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**asked)
    texts = [block.text for block in second.content if block.type == "text"]
    check(texts, second)
    return texts[0]


def count_tokens(base_url: str, model: str) -> int:
    asked = {"model": model, "messages": HELLO["messages"]}
    count = _client(base_url).messages.count_tokens(**asked).input_tokens
    check(count > 0)
    return count


if __name__ == "__main__":
    run(plain, stream, tools, count_tokens)
