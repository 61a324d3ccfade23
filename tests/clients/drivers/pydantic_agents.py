"""Pydantic AI, by chat completions and by responses."""

import asyncio

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import QUESTION, STATUS, check, run


class Ready(pydantic.BaseModel):
    """The answer of an agent."""

    is_ready: bool


def plain(base_url: str, model: str) -> str:
    # docs: pydantic-ai
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(model, provider=provider))
    text = agent.run_sync("Hello").output
    # docs: end
    check(text)
    return text


def _agent(base_url: str, model: str, kind: type = OpenAIChatModel, **more: object) -> Agent:
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="none")
    return Agent(kind(model, provider=provider), retries=0, **more)


def stream(base_url: str, model: str) -> str:
    async def read() -> str:
        async with _agent(base_url, model).run_stream("Hello") as result:
            parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
        check(len(parts) > 3, parts)
        return "".join(parts)

    return asyncio.run(read())


def _loop(base_url: str, model: str, kind: type = OpenAIChatModel, **more: object) -> object:
    agent = _agent(base_url, model, kind, **more)
    called = []

    @agent.tool_plain
    def get_system_health() -> str:
        """Returns the current health status of the LLM runtime."""
        called.append(True)
        return STATUS

    first = agent.run_sync(QUESTION)
    check(called, first)
    agent.run_sync("Thanks", message_history=first.all_messages())
    return first.output


def tools(base_url: str, model: str) -> str:
    return _loop(base_url, model)


def responses_tools(base_url: str, model: str) -> str:
    return _loop(base_url, model, OpenAIResponsesModel)


def structured(base_url: str, model: str) -> Ready:
    answer = _agent(base_url, model, output_type=NativeOutput(Ready)).run_sync("Hello").output
    check(isinstance(answer, Ready), answer)
    return answer


def structured_by_tool(base_url: str, model: str) -> Ready:
    """Demand a call of the output's tool, which is the default of the client (R4)."""
    answer = _agent(base_url, model, output_type=Ready).run_sync("Hello").output
    check(isinstance(answer, Ready), answer)
    return answer


def tools_structured(base_url: str, model: str) -> Ready:
    answer = _loop(base_url, model, output_type=NativeOutput(Ready))
    check(isinstance(answer, Ready), answer)
    return answer


if __name__ == "__main__":
    run(plain, stream, tools, responses_tools, structured, structured_by_tool, tools_structured)
