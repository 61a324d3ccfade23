"""OpenAI's Agents SDK, by chat completions and by responses."""

import asyncio

import agents
import pydantic
from openai import AsyncOpenAI
from steps import QUESTION, STATUS, check, run


class Ready(pydantic.BaseModel):
    """The answer of an agent."""

    is_ready: bool


@agents.function_tool
def get_system_health() -> str:
    """Returns the current health status of the LLM runtime."""
    return STATUS


def plain(base_url: str, model: str) -> str:
    # docs: openai-agents
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none")
    agents.set_tracing_disabled(True)
    chosen = agents.OpenAIResponsesModel(model, client)
    agent = agents.Agent(name="helper", model=chosen)
    text = agents.Runner.run_sync(agent, "Hello").final_output
    # docs: end
    check(text)
    return text


def _agent(base_url: str, model: str, api: str, **more: object) -> agents.Agent:
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    return agents.Agent(name="helper", model=kinds[api](model, client), **more)


def _stream(base_url: str, model: str, api: str) -> str:
    async def read() -> str:
        result = agents.Runner.run_streamed(_agent(base_url, model, api), "Hello")
        kinds = [event.type async for event in result.stream_events()]
        check(kinds.count("raw_response_event") > 3, kinds)
        return result.final_output

    return asyncio.run(read())


def _loop(base_url: str, model: str, api: str, **more: object) -> agents.RunResult:
    agent = _agent(base_url, model, api, tools=[get_system_health], **more)
    first = agents.Runner.run_sync(agent, QUESTION)
    check(any(item.type == "tool_call_output_item" for item in first.new_items), first)
    # A second question with all items that the SDK keeps of the first one.
    history = [*first.to_input_list(), {"role": "user", "content": "Thanks"}]
    second = agents.Runner.run_sync(agent, history)
    check(second.final_output is not None, second)
    return first


def chat(base_url: str, model: str) -> str:
    return agents.Runner.run_sync(_agent(base_url, model, "chat"), "Hello").final_output


def chat_stream(base_url: str, model: str) -> str:
    return _stream(base_url, model, "chat")


def stream(base_url: str, model: str) -> str:
    return _stream(base_url, model, "responses")


def chat_tools(base_url: str, model: str) -> str:
    return _loop(base_url, model, "chat").final_output


def tools(base_url: str, model: str) -> str:
    return _loop(base_url, model, "responses").final_output


def chat_structured(base_url: str, model: str) -> str:
    agent = _agent(base_url, model, "chat", output_type=Ready)
    return agents.Runner.run_sync(agent, "Hello").final_output


def structured(base_url: str, model: str) -> str:
    agent = _agent(base_url, model, "responses", output_type=Ready)
    return agents.Runner.run_sync(agent, "Hello").final_output


def chat_tools_structured(base_url: str, model: str) -> str:
    """Combine a strict tool, which is the default, and an output type (R3)."""
    result = _loop(base_url, model, "chat", output_type=Ready).final_output
    check(isinstance(result, Ready), result)
    return result


def tools_structured(base_url: str, model: str) -> str:
    result = _loop(base_url, model, "responses", output_type=Ready).final_output
    check(isinstance(result, Ready), result)
    return result


if __name__ == "__main__":
    run(
        *(plain, stream, tools, structured, tools_structured),
        *(chat, chat_stream, chat_tools, chat_structured, chat_tools_structured),
    )
