"""LlamaIndex with OpenAILike."""

import asyncio

import pydantic
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from steps import QUESTION, STATUS, check, run


class Ready(pydantic.BaseModel):
    """The answer."""

    is_ready: bool


def plain(base_url: str, model: str) -> str:
    # docs: llama-index
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    llm = OpenAILike(
        model=model,
        api_base=f"{base_url}/v1",
        api_key="none",
        **options,
    )
    text = llm.complete("Hello").text
    # docs: end
    check(text)
    return text


def _llm(base_url: str, model: str) -> OpenAILike:
    options = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    options |= {"max_retries": 0}
    return OpenAILike(model=model, api_base=f"{base_url}/v1", api_key="none", **options)


def stream(base_url: str, model: str) -> str:
    parts = [part.delta for part in _llm(base_url, model).stream_complete("Hello")]
    check(len(parts) > 3, parts)
    return "".join(parts)


def tools(base_url: str, model: str) -> str:
    called = []

    def get_system_health() -> str:
        """Returns the current health status of the LLM runtime."""
        called.append(True)
        return STATUS

    async def ask() -> str:
        llm = _llm(base_url, model)
        agent = FunctionAgent(tools=[get_system_health], llm=llm, name="ops_agent")
        context = Context(agent)
        first = await agent.run(QUESTION, ctx=context)
        await agent.run("Thanks", ctx=context)
        return str(first)

    text = asyncio.run(ask())
    check(called and text, called, text)
    return text


def structured(base_url: str, model: str) -> str:
    """Demand a call of a function that is the format (R4)."""
    answer = _llm(base_url, model).as_structured_llm(Ready).complete("Hello")
    check(isinstance(answer.raw, Ready), answer)
    return answer.text


if __name__ == "__main__":
    run(plain, stream, tools, structured)
