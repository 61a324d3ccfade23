"""Smolagents: the model, and an agent that calls tools."""

from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool
from steps import QUESTION, STATUS, check, run

HELLO = [ChatMessage(role="user", content="Hello")]


@tool
def get_system_health() -> str:
    """Returns the current health status of the LLM runtime."""
    return STATUS


def plain(base_url: str, model: str) -> str:
    # docs: smolagents
    llm = OpenAIModel(model_id=model, api_base=f"{base_url}/v1", api_key="none")
    text = llm([ChatMessage(role="user", content="Hello")]).content
    # docs: end
    check(text)
    return text


def stream(base_url: str, model: str) -> str:
    llm = OpenAIModel(model_id=model, api_base=f"{base_url}/v1", api_key="none")
    parts = [part.content or "" for part in llm.generate_stream(HELLO)]
    check(len(parts) > 3, parts)
    return "".join(parts)


def tools(base_url: str, model: str) -> str:
    """Let the agent call a tool, and end with its own tool final_answer."""
    llm = OpenAIModel(model_id=model, api_base=f"{base_url}/v1", api_key="none")
    agent = ToolCallingAgent(tools=[get_system_health], model=llm, max_steps=3, verbosity_level=0)
    text = agent.run(QUESTION)
    called = [getattr(step, "tool_calls", None) or [] for step in agent.memory.steps]
    calls = [call.name for calls_of_step in called for call in calls_of_step]
    check(calls == ["get_system_health", "final_answer"], calls, text)
    return text


if __name__ == "__main__":
    run(plain, stream, tools)
