"""A model with a chat template, by a worker and a frontend of this process: the worker's parser
settings, and tool calls in answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dynamo_trtllm import Frontend, FrontendConfig, Worker, WorkerConfig
from tests.kit.cluster import PLAIN, START_TIMEOUT_S, command, events
from tests.kit.tiny_models import write_tiny_llama

NAME = "template-model"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
PARAMETERS = {
    "type": "object",
    "properties": {"is_warm": {"type": "boolean"}},
    "required": ["is_warm"],
    "additionalProperties": False,
}


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "strict": True, "parameters": PARAMETERS},
    }


def body(choice: Any, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Is it warm?"}
    tools = [tool("look"), tool("ask")]
    return {
        "model": NAME,
        "messages": [message],
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 100,
        **fields,
    }


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a vocabulary of bytes, which has the markers of calls as special
    tokens.
    """
    made = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    words = ["<pad>", "<|end|>", "<|stop|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*words[:3], "<tool_call>", "</tool_call>"])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return made


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a frontend whose worker has other parsers than the default."""
    servers: dict[str, Any] = {"nats_server": "inproc://", "etcd_endpoints": "memory://"}
    worker = Worker(
        WorkerConfig(
            model_path=str(folder),
            served_model_name=NAME,
            engine="torch",
            dyn_tool_call_parser="hermes",
            dyn_reasoning_parser="basic",
            **servers,
        )
    )
    frontend = Frontend(FrontendConfig(http_host="127.0.0.1", http_port=0, **servers))
    async with (
        worker,
        frontend,
        httpx.AsyncClient(base_url=frontend.url, timeout=START_TIMEOUT_S, **PLAIN) as client,
    ):
        yield client


async def test_required_calls_use_the_parser_of_the_worker(client: httpx.AsyncClient) -> None:
    for choice, names in ((NAMED, {"look"}), ("required", {"look", "ask"})):
        answer = (await client.post("/v1/chat/completions", json=body(choice))).json()
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in names
        assert set(json.loads(call["function"]["arguments"])) == {"is_warm"}
        assert not message["content"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
    streamed = await client.post("/v1/chat/completions", json=body(NAMED, stream=True))
    deltas = [c["delta"] for e in events(iter(streamed.text.split("\n"))) for c in e["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls[0]["function"]["name"] == "look"
    assert len(calls) > 3
    assert set(json.loads("".join(call["function"]["arguments"] for call in calls))) == {"is_warm"}


def test_worker_with_parser_of_another_format_ends_early(folder: Path) -> None:
    argv = ["--engine", "torch", "--model", str(folder), "--dyn-reasoning-parser", "gpt_oss"]
    status, said = command(["dynamo_trtllm", *argv], os.environ)
    assert status == 2
    assert said[-1].endswith("or leave the flag out")
    assert (
        "--dyn-reasoning-parser gpt_oss does not fit this model, which uses a chat template"
        in said[-1]
    )
