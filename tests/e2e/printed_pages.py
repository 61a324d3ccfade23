"""The shell blocks of the documentation, and a shell that knows nothing else to type them into."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
TYPED = ("README.md", "docs/getting-started.md", "docs/serve-a-model.md")
# Their requests are sent to the demo model.
REQUESTED = ("docs/api.md", "docs/request-time.md", "docs/responses-and-messages.md")
PAGES = {name: (ROOT / name).read_text() for name in (*TYPED, *REQUESTED)}
ACTIVATE = "source .venv/bin/activate"


def blocks(page: str) -> list[str]:
    """Return the shell blocks of a page in their order, every command on one line where it can
    be.
    """
    found = re.findall(r"^( *)```bash\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [
        re.sub(rf"^{indent}", "", text, flags=re.MULTILINE).replace("\\\n", " ")
        for indent, text in found
    ]


def make_clone(folder: Path) -> Path:
    """Return a folder with the repository's files beside the environment that the set-up makes.

    New files stay out of the repository.
    """
    clone = folder / "clone"
    clone.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "benchmark-results"):
            (clone / path.name).symlink_to(path)
    (clone / ".venv").symlink_to(sys.prefix)
    return clone


def typed(script: str, folder: Path, **environment: str) -> str:
    """Run the lines in bash until one fails. Return all that they print."""
    shell = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(Path.home()),
        "TMPDIR": str(folder),
    }
    # a pipe would stay open as long as what the shell has started
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=shell | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=200)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
    assert process.returncode == 0, said
    return said
