"""Instructor: an object as the answer, in the modes that its users choose from."""

from typing import Literal

import instructor
import openai
import pydantic
from steps import check, run


class Health(pydantic.BaseModel):
    """The answer. It has no free text, which a tiny model may never end."""

    state: Literal["healthy", "failing"]


def _client(base_url: str, mode: instructor.Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def _create(base_url: str, model: str, mode: instructor.Mode) -> Health:
    messages = [{"role": "user", "content": "Is the system healthy?"}]
    asked = {"model": model, "messages": messages, "max_retries": 0}
    answer = _client(base_url, mode).create(response_model=Health, **asked)
    check(isinstance(answer, Health), answer)
    return answer


def json_schema(base_url: str, model: str) -> Health:
    # docs: instructor
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none")
    asker = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": "Is the system healthy?"}]
    answer = asker.create(response_model=Health, model=model, messages=messages)
    # docs: end
    check(isinstance(answer, Health), answer)
    return answer


def tools(base_url: str, model: str) -> Health:
    return _create(base_url, model, instructor.Mode.TOOLS)


def tools_strict(base_url: str, model: str) -> Health:
    return _create(base_url, model, instructor.Mode.TOOLS_STRICT)


def json_mode(base_url: str, model: str) -> Health:
    return _create(base_url, model, instructor.Mode.JSON)


def responses_tools(base_url: str, model: str) -> Health:
    return _create(base_url, model, instructor.Mode.RESPONSES_TOOLS)


def partial(base_url: str, model: str) -> Health:
    messages = [{"role": "user", "content": "Is the system healthy?"}]
    asked = {"model": model, "messages": messages, "max_retries": 0}
    client = _client(base_url, instructor.Mode.TOOLS)
    parts = list(client.create_partial(response_model=Health, **asked))
    check(parts and parts[-1].state in ("healthy", "failing"), parts)
    return parts[-1]


if __name__ == "__main__":
    run(json_schema, tools, tools_strict, json_mode, responses_tools, partial)
