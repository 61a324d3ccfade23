"""LiteLLM's SDK, with the prefix for servers that speak OpenAI's API."""

import litellm
import pydantic
from steps import DESCRIPTION, QUESTION, STATUS, check, run

FUNCTION = {"name": "get_system_health", "description": DESCRIPTION}
TOOL = {
    "type": "function",
    "function": FUNCTION | {"parameters": {"type": "object", "properties": {}}},
}


class Ready(pydantic.BaseModel):
    """An answer without free text, which a tiny model may never end."""

    is_ready: bool


def plain(base_url: str, model: str) -> str:
    # docs: litellm
    messages = [{"role": "user", "content": "Hello"}]
    options = {"api_base": f"{base_url}/v1", "api_key": "none"}
    answer = litellm.completion(model=f"hosted_vllm/{model}", messages=messages, **options)
    text = answer.choices[0].message.content
    # docs: end
    check(text, answer)
    return text


def _ask(base_url: str, model: str, messages: list, **more: object) -> object:
    prefix = more.pop("prefix", "hosted_vllm")
    options = {"api_base": f"{base_url}/v1", "api_key": "none", "max_retries": 0}
    return litellm.completion(model=f"{prefix}/{model}", messages=messages, **options, **more)


def stream(base_url: str, model: str) -> str:
    chunks = list(_ask(base_url, model, [{"role": "user", "content": "Hello"}], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    rebuilt = litellm.stream_chunk_builder(chunks)
    check(text and rebuilt.choices[0].message.content == text, text, rebuilt)
    return text


def _loop(base_url: str, model: str, prefix: str) -> str:
    """Send back the message object itself, with the fields that LiteLLM adds to it (R2)."""
    messages = [{"role": "user", "content": QUESTION}]
    message = _ask(base_url, model, messages, prefix=prefix, tools=[TOOL]).choices[0].message
    check(message.tool_calls, message)
    messages += [
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": STATUS},
    ]
    answer = _ask(base_url, model, messages, prefix=prefix, tools=[TOOL]).choices[0].message
    check(answer.content, answer)
    return answer.content


def tools(base_url: str, model: str) -> str:
    return _loop(base_url, model, "hosted_vllm")


def tools_openai(base_url: str, model: str) -> str:
    return _loop(base_url, model, "openai")


def structured(base_url: str, model: str) -> str:
    answer = _ask(base_url, model, [{"role": "user", "content": "Hello"}], response_format=Ready)
    Ready.model_validate_json(answer.choices[0].message.content)
    return answer.choices[0].message.content


def messages(base_url: str, model: str) -> str:
    """Serve Anthropic's API in the client: it translates to chat completions."""
    asked = {"model": f"hosted_vllm/{model}", "max_tokens": 200, "api_base": f"{base_url}/v1"}
    asked |= {"messages": [{"role": "user", "content": "Hello"}], "api_key": "none"}
    answer = litellm.anthropic.messages.create(**asked)
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    check(texts and texts[0], answer)
    return texts[0]


if __name__ == "__main__":
    run(plain, stream, tools, tools_openai, structured, messages)
