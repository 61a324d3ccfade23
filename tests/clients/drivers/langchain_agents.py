"""LangChain's ChatOpenAI, and agents of LangChain that LangGraph runs."""

import pydantic
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from steps import QUESTION, STATUS, check, run


class Ready(pydantic.BaseModel):
    """The answer of an agent."""

    is_ready: bool


@tool
def get_system_health() -> str:
    """Returns the current health status of the LLM runtime."""
    return STATUS


def plain(base_url: str, model: str) -> str:
    # docs: langchain
    llm = ChatOpenAI(base_url=f"{base_url}/v1", api_key="none", model=model)
    text = llm.invoke("Hello").content
    # docs: end
    check(text)
    return text


def _llm(base_url: str, model: str, **more: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{base_url}/v1", api_key="none", model=model, max_retries=0, **more)


def stream(base_url: str, model: str) -> str:
    chunks = [chunk.content for chunk in _llm(base_url, model).stream("Hello")]
    check(len(chunks) > 3 and "".join(chunks), chunks)
    return "".join(chunks)


def tools(base_url: str, model: str) -> str:
    """Send back the message object itself."""
    llm = _llm(base_url, model).bind_tools([get_system_health])
    history = [("user", QUESTION)]
    message = llm.invoke(history)
    check(message.tool_calls, message)
    history += [message, get_system_health.invoke(message.tool_calls[0])]
    return llm.invoke(history).content


def structured(base_url: str, model: str) -> str:
    answer = _llm(base_url, model).with_structured_output(Ready).invoke("Hello")
    check(isinstance(answer, Ready), answer)
    return answer


def structured_by_function(base_url: str, model: str) -> str:
    """Demand a call of a function that is the format (R4)."""
    llm = _llm(base_url, model).with_structured_output(Ready, method="function_calling")
    answer = llm.invoke("Hello")
    check(isinstance(answer, Ready), answer)
    return answer


def _agent(base_url: str, model: str, **more: object) -> str:
    """Ask an agent with a name twice: its second question has the messages with that name (R6)."""
    llm = _llm(base_url, model)
    saver = InMemorySaver()
    agent = create_agent(llm, [get_system_health], name="ops_agent", checkpointer=saver, **more)
    config = {"configurable": {"thread_id": "1"}}
    first = agent.invoke({"messages": [("user", QUESTION)]}, config)
    check(any(message.type == "tool" for message in first["messages"]), first)
    second = agent.invoke({"messages": [("user", "Thanks")]}, config)
    if more:
        check(isinstance(first["structured_response"], Ready), first)
        return first["structured_response"]
    return second["messages"][-1].content


def agent(base_url: str, model: str) -> str:
    return _agent(base_url, model)


def agent_provider_strategy(base_url: str, model: str) -> str:
    """Offer strict tools beside an answer format (R3)."""
    return _agent(base_url, model, response_format=ProviderStrategy(Ready))


def agent_tool_strategy(base_url: str, model: str) -> str:
    return _agent(base_url, model, response_format=ToolStrategy(Ready))


def agent_stream(base_url: str, model: str) -> str:
    agent = create_agent(_llm(base_url, model), [get_system_health], name="ops_agent")
    asked = {"messages": [("user", QUESTION)]}
    seen = [part for part, _ in agent.stream(asked, stream_mode="messages")]
    check(any(part.type == "tool" for part in seen), seen)
    return seen[-1].content or "".join(part.content for part in seen if part.type != "tool")


def responses_agent(base_url: str, model: str) -> str:
    llm = _llm(base_url, model, use_responses_api=True, output_version="responses/v1")
    agent = create_agent(llm, [get_system_health], name="ops_agent")
    first = agent.invoke({"messages": [("user", QUESTION)]})
    check(any(message.type == "tool" for message in first["messages"]), first)
    second = agent.invoke({"messages": [*first["messages"], ("user", "Thanks")]})
    return second["messages"][-1].text


if __name__ == "__main__":
    run(
        *(plain, stream, tools, structured, structured_by_function, agent, agent_provider_strategy),
        *(agent_tool_strategy, agent_stream, responses_agent),
    )
