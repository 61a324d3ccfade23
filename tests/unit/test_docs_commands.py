"""The commands that the documentation shows: each is accepted as it is typed, and prints what is
shown below it.
"""

import re
import shlex
from pathlib import Path

import pytest

from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.split_flags import split_words
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker.show_arguments import argument_table
from scripts.config_reference import PROGRAMS
from tests.kit.cases import each_case

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(text: str, *languages: str) -> list[str]:
    """Return the blocks of code of a page that are in one of these languages."""
    found = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    return [block for language, block in found if language in languages]


def launch_lines() -> list[tuple[str, str, str]]:
    """(page, module or subcommand, flags) of every line in a block of code that starts a program of
    ours.
    """
    # tests/repository/test_page_commands.py has the benchmarks
    start = re.compile(
        r"^\s*(?:python3? -m (?=dynamo_trtllm)|dynamo-trtllm (?!bench))(\S+) ?([^#&>\n]*)",
        re.MULTILINE,
    )
    blocks = [
        (page.stem, block.replace("\\\n", " "))
        for page in sorted(DOCS.glob("*.md"))
        for block in code_blocks(page.read_text(), "bash", "sh", "")
    ]
    return [
        (page, module, flags) for page, block in blocks for module, flags in start.findall(block)
    ]


@each_case(("page", "module", "flags"), launch_lines())
def test_documented_launch_lines_are_accepted(page: str, module: str, flags: str) -> None:
    models = {
        name: program.model for program in PROGRAMS for name in (program.module, program.command)
    }
    # Blocks about servers with certificates load a file with this variable first.
    environ = {"ETCD_ENDPOINTS": "https://127.0.0.1:2379"}
    words = shlex.split(flags)
    if models[module] is ServeConfig:
        # It takes the flags of workers and of the frontend, too.
        kinds = (ServeConfig, WorkerConfig, FrontendConfig)
        words, of_workers, of_frontend = split_words(words, kinds)
        worker_environ = environ | {"DYN_TRTLLM_MODEL_PATH": "-"}
        load(WorkerConfig, prog="x", argv=of_workers, environ=worker_environ)
        load(FrontendConfig, prog="x", argv=of_frontend, environ=environ)
    load(models[module], prog="x", argv=words, environ=environ)


def shown_outputs() -> list[tuple[str, str]]:
    """Return each command of a worker that a page shows with its output, and this output."""
    blocks = [
        block
        for page in sorted(DOCS.glob("*.md"))
        for block in code_blocks(page.read_text(), "console")
    ]
    commands = [
        command.replace("\\\n", " ") for block in blocks for command in block.split("$ ")[1:]
    ]
    return [(line, output) for line, _, output in (command.partition("\n") for command in commands)]


@pytest.mark.parametrize(("line", "output"), shown_outputs())
def test_documented_output_is_what_the_command_prints(
    line: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, grep = line.partition(" | grep ")
    words = shlex.split(command)
    is_left_out = grep.startswith("-v ")
    environ = dict(word.split("=") for word in words if re.match(r"DYN_\w+=", word))
    argv = words[len(environ) + 2 :]
    assert words[len(environ) : len(environ) + 2] == ["dynamo-trtllm", "worker"]
    with pytest.raises((SystemExit, ConfigError)) as end:
        load(WorkerConfig, prog="x", argv=argv, environ=environ, extra_text=argument_table)
    printed = capsys.readouterr().out
    if isinstance(end.value, ConfigError):
        printed = f"dynamo-trtllm worker: {end.value.message}\n"
    pattern = re.compile(shlex.split(grep)[-1] if grep else "")
    lines = [shown for shown in printed.splitlines() if bool(pattern.search(shown)) != is_left_out]
    assert "\n".join(lines) == output.rstrip("\n")


def test_launch_lines_when_counted_then_there_are_some() -> None:
    assert len(launch_lines()) > 5
