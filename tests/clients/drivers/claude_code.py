"""Claude Code: a task with a shell command, over `/v1/messages`. Runs in an empty folder."""

import json
import os
import shlex
import subprocess
from pathlib import Path

from steps import check, run

# docs: claude-code
CONFIG = """
export ANTHROPIC_BASE_URL=http://localhost:8000 ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL=MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL
claude
"""
# docs: end


def _environment(base_url: str, model: str) -> dict[str, str]:
    """Return the environment after the documented lines, with a home folder of its own."""
    home = Path("home").absolute()
    home.mkdir()
    text = CONFIG.replace("MODEL=MODEL", f"MODEL={model}").replace(
        "http://localhost:8000", base_url
    )
    exports = [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("export ")]
    variables = dict(word.split("=", 1) for words in exports for word in words)
    # Without this, it also calls servers of Anthropic, for updates and statistics.
    variables |= {"HOME": str(home), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return os.environ | variables


def tools(base_url: str, model: str) -> str:
    """Run the shell command that the model calls for, and send back its output."""
    task = "Write the word ready into state.txt"
    flags = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash"]
    done = subprocess.run(
        ["claude", "--print", *flags, "--", task],
        env=_environment(base_url, model),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode == 0, done.stdout[-1500:], done.stderr[-1500:])
    events = [json.loads(line) for line in done.stdout.splitlines()]
    check(Path("state.txt").read_text() == "ready\n", events)
    (result,) = [event for event in events if event["type"] == "result"]
    check(result["subtype"] == "success" and result["num_turns"] == 2, result)
    return result["result"]


if __name__ == "__main__":
    run(tools)
