"""Every command on a page runs in a test, or a comment before its block says why not.

Lines that start our programs are loaded by tests/unit/test_docs_commands.py, pages that a shell types
are in tests/e2e/printed_pages.py, and requests by curl are sent to the demo model by
tests/e2e/demo_model/test_printed_clients.py. A comment such as
`<!-- litellm_sdk.py litellm -->` names a driver in tests/clients. Here, flags of benchmarks and
scripts are looked up in their help.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.printed_pages import REQUESTED, TYPED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(?P<comment> *<!-- (?:not run by tests: [^>]+|\w+\.(?:py|mjs) [\w-]+) -->\n)?"
    r" *```(?:bash|sh)\n(?P<text>.*?)^ *```",
    re.DOTALL | re.MULTILINE,
)
OF_THE_SHELL = re.compile(r"(export|source|set|umask|cd) |\(umask |kill \$\(jobs")
OURS = re.compile(r"(\w+=\S+ )*(dynamo-trtllm (?!bench)|python3? -m dynamo_trtllm)")
INSTALLS = re.compile(r"python3 -m venv |pip install ")  # tests/repository/test_requirements.py
BENCHMARK = re.compile(r"python -m (benchmarks\.[\w.]+)")
SCRIPT = re.compile(r"(?:\w+=\S+ )*(?:\./)?((?:scripts|deploy)/[\w./]+)")
BENCH = "dynamo-trtllm bench"


class Command(NamedTuple):
    page: str
    text: str  # on one line, without comments and quoted texts


def commands() -> list[Command]:
    """Return the commands of all blocks but those whose comment says who runs them, or why not."""
    found = []
    for path in sorted(DOCS.glob("*.md")):
        for block in BLOCK.finditer(path.read_text(encoding="utf-8")):
            if block["comment"] is None:
                found += [Command(path.name, line) for line in lines(block["text"])]
    return found


def lines(text: str) -> list[str]:
    """Return the commands of a block."""
    without_comments = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    joined = re.sub(r"'[^']*'", "''", without_comments)
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return done.stdout


def flags_are_known(line: str) -> bool:
    """Return whether a benchmark or a script lists each flag of a line in its help."""
    line = line.replace(BENCH, "python -m benchmarks.profile")
    benchmark = BENCHMARK.search(line)
    if benchmark is not None:
        words = line[benchmark.end() :].split()
        subcommands = [words[0]] if words and re.fullmatch(r"[a-z][a-z-]*", words[0]) else []
        shown = help_of(sys.executable, "-m", benchmark[1], *subcommands)
    else:
        script = SCRIPT.match(line)
        assert script is not None
        shown = help_of(str(ROOT / script[1]))
    return all(flag in shown for flag in re.findall(r"--[a-z][\w-]*", line))


def is_run(command: Command) -> bool:
    """Return whether a test runs a command, loads it, or knows its flags."""
    if f"docs/{command.page}" in TYPED or OF_THE_SHELL.match(command.text):
        return True
    if OURS.match(command.text) or INSTALLS.match(command.text):
        return True
    if command.text.startswith("curl "):
        return f"docs/{command.page}" in REQUESTED
    is_ours = command.text.startswith(BENCH) or BENCHMARK.match(command.text)
    return bool(is_ours or SCRIPT.match(command.text)) and flags_are_known(command.text)


def test_lines_are_joined_and_without_comments() -> None:
    text = "a --b \\\n  c   # why\n# d\ncurl -d '{\n \"x\": 1}'\n"
    assert lines(text) == ["a --b c", "curl -d ''"]


def test_unknown_flag_of_a_benchmark_is_found() -> None:
    assert flags_are_known("python -m benchmarks.profile --isl 5")
    assert not flags_are_known("python -m benchmarks.profile --no-such-flag 5")


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_commands_of_page_are_run_or_say_why_not(page: str) -> None:
    of_page = [command for command in commands() if command.page == page]
    assert [command.text for command in of_page if not is_run(command)] == []
