"""Runs one step of a driver: `python DRIVER.py BASE_URL MODEL STEP`. Needs nothing but Python.

A driver has one function per step.
A step uses the client as its users do, and checks what the client returns.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "Hey, quick check: is everything up and running?"
DESCRIPTION = "Returns the current health status of the LLM runtime."
STATUS = "All systems are up."
START_S = 300.0  # a server with 20 s of CPU in its imports needs minutes on a busy machine


def run(*steps: Callable[[str, str], object]) -> None:
    """Run the step that the command line names, and print what it returns as a line of JSON."""
    warnings.simplefilter("ignore")  # of the client's own packages
    base_url, model, name = sys.argv[1:]
    (step,) = [candidate for candidate in steps if candidate.__name__ == name]
    print(json.dumps({"step": name, "shown": str(step(base_url, model))[:200]}))


def check(condition: object, *shown: object) -> None:
    """Fail with what was seen, also where Python runs without assertions."""
    if not condition:
        raise SystemExit(f"not as expected: {shown!r}")


def ask_with_tool(client: Any, model: str) -> str:
    """Ask with a tool and return the answer to its result, with the message object itself, as
    OpenAI documents it.

    Args:
        client: an `openai.OpenAI`.
        model: the model.
    """
    function = {"name": "get_system_health", "description": DESCRIPTION}
    function["parameters"] = {"type": "object", "properties": {}}
    messages = [{"role": "user", "content": QUESTION}]
    asked = {
        "model": model,
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }
    message = client.chat.completions.create(**asked).choices[0].message
    check(message.tool_calls, message)
    messages += [
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": STATUS},
    ]
    answer = client.chat.completions.create(**asked).choices[0].message
    check(answer.content, answer)
    return answer.content


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def until_alive(child: subprocess.Popen, url: str, log: Path) -> None:
    """Wait until a server answers. Fail with the end of its log when it ended or takes too long."""
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            is_starting = child.poll() is None and time.monotonic() < end
            check(is_starting, log.read_text()[-1500:])
            time.sleep(0.5)
