"""Open WebUI's backend before the server, driven by the API that its pages use."""

import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steps import check, free_port, run, until_alive

# docs: open-webui
CONFIG = """
export OPENAI_API_BASE_URL=http://localhost:8000/v1 OPENAI_API_KEY=none ENABLE_OLLAMA_API=False
open-webui serve --port 8080
"""
# docs: end


class _Backend:
    """Calls the API of the backend.

    Args:
        url: address of the backend.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}

    def sign_up(self) -> None:
        """Create the first account, which is the administrator's, and sign in with it."""
        account = {"name": "Ada", "email": "ada@example.com", "password": secrets.token_hex(16)}
        token = json.loads(self.call("/api/v1/auths/signup", account))["token"]
        self._headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, body: dict | None = None) -> str:
        """Return the text of an answer. Without a body, the method is GET."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, self._headers)
        with urllib.request.urlopen(request) as answer:
            return answer.read().decode()


@contextmanager
def _backend(base_url: str) -> Iterator[_Backend]:
    """Start the backend with the lines of the documentation, and sign up."""
    port = free_port()
    script = CONFIG.replace("http://localhost:8000", base_url).replace("8080", str(port))
    Path("serve.sh").write_text(script.replace("open-webui", "exec open-webui"))
    Path("data").mkdir()
    env = os.environ | {
        "DATA_DIR": str(Path("data").absolute()),
        "WEBUI_SECRET_KEY": secrets.token_hex(32),
        # No model for the search in documents is fetched from another host.
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    log = Path("backend.log")
    with log.open("w") as output:
        command = ["bash", "serve.sh"]
        child = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        until_alive(child, f"http://127.0.0.1:{port}/health", log)
        backend = _Backend(f"http://127.0.0.1:{port}")
        backend.sign_up()
        yield backend
    finally:
        child.terminate()
        child.wait()


def chat(base_url: str, model: str) -> str:
    """List the models, ask once, and once as a stream: a start of the backend takes long."""
    hello = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    with _backend(base_url) as backend:
        models = json.loads(backend.call("/api/models"))["data"]
        check(model in [listed["id"] for listed in models], models)
        answer = json.loads(backend.call("/api/chat/completions", hello))
        text = answer["choices"][0]["message"]["content"]
        events = backend.call("/api/chat/completions", hello | {"stream": True})
    check(text, answer)
    check(events.count("data: {") > 3 and "data: [DONE]" in events, events)
    return text


if __name__ == "__main__":
    run(chat)
