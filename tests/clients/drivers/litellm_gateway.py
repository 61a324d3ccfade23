"""LiteLLM's proxy before the server, and the openai package before the proxy."""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from steps import ask_with_tool, check, free_port, run, until_alive

# docs: litellm-proxy
CONFIG = """
model_list:
  - model_name: MODEL
    litellm_params:
      model: hosted_vllm/MODEL
      api_base: http://localhost:8000/v1
"""
# docs: end


@contextmanager
def _proxy(base_url: str, model: str) -> Iterator[openai.OpenAI]:
    """Start the proxy with the configuration of the documentation."""
    port = free_port()
    text = CONFIG.replace("MODEL", model).replace("http://localhost:8000", base_url)
    Path("config.yaml").write_text(text)
    command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    key = f"sk-{secrets.token_hex(32)}"  # the proxy does not start without one
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    log = Path("proxy.log")
    with log.open("w") as output:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        until_alive(child, f"http://127.0.0.1:{port}/health/liveliness", log)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
    finally:
        child.terminate()
        child.wait()


def chat(base_url: str, model: str) -> str:
    """Ask once, once as a stream, and with a tool in two turns: a start of the proxy takes long."""
    with _proxy(base_url, model) as client:
        hello = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
        check(client.chat.completions.create(**hello).choices[0].message.content)
        chunks = list(client.chat.completions.create(**hello, stream=True))
        check(len(chunks) > 3, chunks)
        return ask_with_tool(client, model)


def responses(base_url: str, model: str) -> str:
    with _proxy(base_url, model) as client:
        text = client.responses.create(model=model, input="Hello").output_text
    check(text)
    return text


if __name__ == "__main__":
    run(chat, responses)
