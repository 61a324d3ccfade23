"""The openai package for Python: chat completions and responses."""

from typing import Literal

import openai
import pydantic
from steps import DESCRIPTION, QUESTION, STATUS, ask_with_tool, check, run


class Health(pydantic.BaseModel):
    """An answer, and the arguments of a tool, without free text, which may never end."""

    state: Literal["healthy", "failing"]
    is_ready: bool


def plain(base_url: str, model: str) -> str:
    # docs: openai
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model=model, messages=messages)
    text = answer.choices[0].message.content
    # docs: end
    check(text, answer)
    return text


def _client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def stream(base_url: str, model: str) -> str:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    with _client(base_url).chat.completions.stream(**asked) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    check(text and final.choices[0].message.content == text, text, final)
    return text


def tools(base_url: str, model: str) -> str:
    return ask_with_tool(_client(base_url), model)


def structured(base_url: str, model: str) -> str:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    answer = _client(base_url).chat.completions.parse(**asked, response_format=Health)
    check(isinstance(answer.choices[0].message.parsed, Health), answer)
    return answer.choices[0].message.content


def named_tool(base_url: str, model: str) -> str:
    """Demand a call: its arguments fit the schema, without `strict` too (R4)."""
    tool = openai.pydantic_function_tool(Health)
    del tool["function"]["strict"]
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "tools": [tool]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "Health"}}
    answer = _client(base_url).chat.completions.create(**asked).choices[0].message
    arguments = answer.tool_calls[0].function.arguments
    Health.model_validate_json(arguments)
    return arguments


def strict_tool_and_format(base_url: str, model: str) -> str:
    """Offer a strict tool beside an answer format (R3)."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    tool = openai.pydantic_function_tool(Health, name="report")
    answer = _client(base_url).chat.completions.parse(**asked, tools=[tool], response_format=Health)
    message = answer.choices[0].message
    check(isinstance(message.parsed, Health) or message.tool_calls, answer)
    return message.content or message.tool_calls[0].function.arguments


def responses(base_url: str, model: str) -> str:
    client = _client(base_url)
    first = client.responses.create(model=model, input="Hello")
    check(first.output_text, first)
    second = client.responses.create(model=model, input="Hello", previous_response_id=first.id)
    check(second.output_text, second)
    with client.responses.stream(model=model, input="Hello") as events:
        kind = "response.output_text.delta"
        text = "".join(event.delta for event in events if event.type == kind)
        check(text == events.get_final_response().output_text, text)
    return text


def responses_tools(base_url: str, model: str) -> str:
    """Send back the output items themselves, reasoning included."""
    tool = {"type": "function", "name": "get_system_health", "description": DESCRIPTION}
    tool["parameters"] = {"type": "object", "properties": {}}
    items = [{"role": "user", "content": QUESTION}]
    client = _client(base_url)
    first = client.responses.create(model=model, input=items, tools=[tool], store=False)
    calls = [item for item in first.output if item.type == "function_call"]
    check(calls, first)
    items += [
        *first.output,
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": STATUS},
    ]
    second = client.responses.create(model=model, input=items, tools=[tool], store=False)
    check(second.output_text, second)
    return second.output_text


def responses_structured(base_url: str, model: str) -> str:
    answer = _client(base_url).responses.parse(model=model, input="Hello", text_format=Health)
    check(isinstance(answer.output_parsed, Health), answer)
    return answer.output_text


if __name__ == "__main__":
    run(
        *(plain, stream, tools, structured, named_tool, strict_tool_and_format),
        *(responses, responses_tools, responses_structured),
    )
