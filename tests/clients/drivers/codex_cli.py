"""Codex CLI: a task without tools, and a task with a shell command. Runs in an empty folder."""

import json
import os
import subprocess
from pathlib import Path

from steps import check, run

# docs: codex
CONFIG = """
model = "MODEL"
model_provider = "local"

[model_providers.local]
name = "dynamo_trtllm"
base_url = "http://localhost:8000/v1"
wire_api = "responses"
"""
# docs: end


def _exec(base_url: str, model: str, task: str, more: str = "") -> tuple[list[dict], str]:
    """Run a task with the documented configuration. Return the finished items and the errors."""
    home = Path("codex-home").absolute()
    home.mkdir()
    text = CONFIG.replace("MODEL", model).replace("http://localhost:8000", base_url)
    (home / "config.toml").write_text(more + text)
    # No sandbox: it needs rights that a container may lack. The commands are those of the script.
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    env = os.environ | {"CODEX_HOME": str(home)}
    done = subprocess.run(
        ["codex", "exec", *flags, task],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    errors = [event for event in events if event["type"] in ("error", "turn.failed")]
    check(done.returncode == 0 and not errors, errors, done.stderr[-1500:])
    return items, done.stderr


def _messages(items: list[dict]) -> list[str]:
    return [item["text"] for item in items if item["type"] == "agent_message"]


def plain(base_url: str, model: str) -> str:
    items, errors = _exec(base_url, model, "Hello")
    check(_messages(items), items, errors)
    return _messages(items)[-1]


def _loop(base_url: str, model: str, more: str = "") -> str:
    """Run the shell command that the model calls for, and send back its output."""
    items, errors = _exec(base_url, model, "Write the word ready into state.txt", more)
    commands = [item for item in items if item["type"] == "command_execution"]
    check(commands and commands[0]["exit_code"] == 0, items, errors)
    check(Path("state.txt").read_text() == "ready\n", items)
    check(_messages(items), items)
    return _messages(items)[-1]


def tools(base_url: str, model: str) -> str:
    """Offer all tools of Codex, hosted ones and namespaces included (R1)."""
    return _loop(base_url, model)


def tools_reduced(base_url: str, model: str) -> str:
    """Turn off the hosted tools and the namespaces."""
    return _loop(base_url, model, REDUCED)


REDUCED = 'web_search = "disabled"\nfeatures.multi_agent = false\n'

if __name__ == "__main__":
    run(plain, tools, tools_reduced)
