"""The console command: every subcommand explains itself, is found by its name, and completes in a
shell.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.cli import console
from dynamo_trtllm.cli.completion import completion
from dynamo_trtllm.cli.console import COMMANDS, Command, main, parser_of
from dynamo_trtllm.config.commands import (
    DemoConfig,
    FrontendConfig,
    ServeConfig,
    WorkerConfig,
)
from dynamo_trtllm.config.config_base import GROUPS
from dynamo_trtllm.config.layers import find_file
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.parser import command_streams
from dynamo_trtllm.config.split_flags import split_words

Type = Callable[[str], int]
NAMES = list(COMMANDS)
# Beyond these, an import costs more than the help is worth.
HEAVY = (
    "asyncio",
    "msgspec",
    "pydantic",
    "rich",
    "shtab",
    "torch",
    "prometheus_client",
    "grpc",
    "nats",
)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Run a command line in this process. Return its exit status."""

    def run(line: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dynamo-trtllm", *shlex.split(line)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code if isinstance(ended.value.code, int) else 0

    return run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def imported_for(*words: str) -> tuple[str, list[str]]:
    """Return what the command prints, and which heavy modules it imports."""
    code = (
        "import sys\nfrom dynamo_trtllm.cli.console import main\n"
        "try:\n    main()\nexcept SystemExit as exc:\n"
        f"    print(exc.code, *(name for name in {HEAVY} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}\n{code}", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    *lines, last = done.stdout.splitlines()
    status, *modules = last.split()
    assert status == "0"
    return "\n".join(lines), modules


def test_help_groups_every_command_and_imports_nothing_heavy() -> None:
    said, modules = imported_for("--help")
    assert modules == []
    assert said.startswith("usage: dynamo-trtllm COMMAND [flags]\n")
    assert [
        line.rstrip(":") for line in said.splitlines() if line.rstrip(":") in console.GROUPS
    ] == list(console.GROUPS)
    assert all(
        f"\n  {command.name} " in said and command.summary in said for command in COMMANDS.values()
    )


@pytest.mark.parametrize(
    ("line", "same"), [("help", "--help"), ("help chat", "chat --help"), ("-V", "version")]
)
def test_other_words_for_help_and_version_are_known(
    line: str, same: str, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(line)
    shown = capsys.readouterr().out
    typed(same)
    assert shown == capsys.readouterr().out != ""


def test_faults_help_imports_no_server_or_worker() -> None:
    assert imported_for("chaos", "--help")[1] == ["asyncio", "msgspec", "pydantic"]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_command_when_help_is_asked_then_its_flags_are_shown(
    command: Command, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(f"{command.name} --help") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: dynamo-trtllm {command.name} ")
    assert "python -m dynamo_trtllm" not in said
    if not command.module.startswith("bench."):
        assert any(f"\n{title}:\n" in said for title in GROUPS)


def examples_of(help_text: str) -> list[list[str]]:
    """Return the words of each example in a help text, as a shell splits them."""
    examples = []
    for line in help_text.replace("\\\n", " ").splitlines():
        if line.startswith("  "):
            command_line = line.partition(" > ")[0].rpartition(" | ")[2]
            examples.append(shlex.split(command_line, comments=True))
    return examples


def test_examples_of_help_can_be_pasted() -> None:
    num_examples = 0
    for command in COMMANDS.values():
        parser = parser_of(command)
        for program, name, *words in examples_of((parser.epilog or "") % {"prog": parser.prog}):
            assert (program, name) == ("dynamo-trtllm", command.name)
            # `serve` also takes the flags of workers and frontends.
            models = (ServeConfig, WorkerConfig, FrontendConfig)
            parser.parse_args(split_words(words, models)[0] if name == "serve" else words)
            num_examples += 1
    assert num_examples > 40


def test_help_about_a_word_shows_only_its_flags(
    capsys: pytest.CaptureFixture[str], typed: Type
) -> None:
    assert typed("worker --help=MAX-SEQ") == 0
    assert capsys.readouterr().out.startswith("model:\n  --max-seq-len INT, --max-model-len INT\n")


def test_help_begins_with_what_the_command_is_for(
    capsys: pytest.CaptureFixture[str], typed: Type
) -> None:
    assert typed("explain --help") == 0
    said = capsys.readouterr().out
    assert said.index("--stuck") < said.index("--etcd-endpoints")


def test_help_shows_one_form_of_a_switch_that_is_off(
    capsys: pytest.CaptureFixture[str], typed: Type
) -> None:
    assert typed("status --help") == 0
    assert "\n  --json-output, --json\n" in capsys.readouterr().out
    assert typed("frontend --help=console") == 0
    assert "  --console, --no-console\n" in capsys.readouterr().out


def test_help_names_the_allowed_words_of_an_argument(
    capsys: pytest.CaptureFixture[str], typed: Type
) -> None:
    assert typed("completion --help") == 0
    assert "{bash,zsh,fish}" in capsys.readouterr().out


@pytest.fixture
def broken_pipe() -> Iterator[int]:
    """A pipe whose reader has exited."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("line", ["--help", "completion zsh"])
def test_output_when_the_reader_has_exited_then_no_traceback(line: str, broken_pipe: int) -> None:
    code = "from dynamo_trtllm.cli.console import main; main()"
    command = [sys.executable, "-c", code, *line.split()]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=broken_pipe, stderr=subprocess.PIPE, text=True, check=False, env=env
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("line", ["--help", "version --version", "chat --print-config"])
def test_unwritable_output_gives_one_line_and_status_1(
    line: str,
    is_buffered: bool,
    broken_pipe: int,
    typed: Type,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, said in (
        (
            os.open("/dev/full", os.O_WRONLY),
            "dynamo-trtllm: the output can't be written: No space left on device\n",
        ),
        (os.dup(broken_pipe), ""),
    ):
        raw = open(number, "wb", buffering=-1 if is_buffered else 0)
        with (
            io.TextIOWrapper(raw, write_through=not is_buffered) as stream,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stdout", stream)
            assert (typed(line), capsys.readouterr().err) == (1, said)


def test_output_with_closed_streams_runs_the_command(
    typed: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert typed("chat --print-config") == 0
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_output_escapes_characters_its_encoding_lacks(
    typed: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert typed("chat --model \u00fcn\u00ef --print-config") == 0
    assert b" \\xfcn\\xef " in raw.getvalue()


def test_error_when_it_is_not_of_the_output_then_it_is_raised() -> None:
    with pytest.raises(BrokenPipeError), command_streams("x"):
        raise BrokenPipeError


def test_package_when_installed_then_it_has_the_command() -> None:
    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "scripts"
    ]
    module, _, name = scripts["dynamo-trtllm"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_table_has_a_function_for_every_command() -> None:
    for command in COMMANDS.values():
        module = importlib.import_module(f"dynamo_trtllm.{command.module}")
        assert callable(module.main)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lunch", "dynamo-trtllm: unknown command 'lunch'; did you mean launch?\n"),
        ("xyz", "dynamo-trtllm: unknown command 'xyz'; see --help\n"),
        (
            "ps",
            "dynamo-trtllm: unknown command 'ps'; status shows the processes of a deployment\n",
        ),
        (
            "launch",
            "dynamo-trtllm launch: DEPLOYMENT is missing; pass it, or set DYN_TRTLLM_DEPLOYMENT\n",
        ),
        (
            "worker --model-name m",
            "dynamo-trtllm worker: unknown flag --model-name; use --served-model-name\n",
        ),
        (
            "frontend --tp 2",
            (
                "dynamo-trtllm frontend: unknown flag --tp; it is --tensor-parallel-size of"
                " dynamo-trtllm"
            ),
        ),
        (
            "chat a b",
            "dynamo-trtllm chat: 'b' is a second QUESTION; give only one, and quote it if it"
            " contains spaces\n",
        ),
        (
            "worker --help=xyzzy",
            "dynamo-trtllm worker: no flag of dynamo-trtllm worker contains 'xyzzy'; see --help\n",
        ),
        (
            "demo a b",
            "dynamo-trtllm demo: 'b' is a second DEPLOYMENT; give only one, and quote it if it"
            " contains spaces\n",
        ),
        (
            f"launch {300 * 'a'}",
            f"dynamo-trtllm launch: {300 * 'a'}: can't be read: File name too long\n",
        ),
        (
            "demo none.yaml",
            "dynamo-trtllm demo: none.yaml: can't be read: No such file or directory\n",
        ),
        (
            "status --url x",
            (
                "dynamo-trtllm status: flag --url is 'x': expected an address like"
                " localhost:8000 or https://HOST:PORT\n"
            ),
        ),
        (
            "completion ksh",
            "dynamo-trtllm completion: flag SHELL is 'ksh': should be 'bash', 'zsh' or 'fish'\n",
        ),
    ],
)
def test_wrong_line_names_the_command_and_exits_with_2(
    line: str, said: str, typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(line) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(said)
    assert errors.count("\n") == 1


def test_line_when_it_is_empty_then_the_commands_and_status_2(
    typed: Type, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("") == 2
    assert "\n  demo " in capsys.readouterr().out


def test_interrupt_while_modules_load_exits_with_130(
    typed: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert typed("chat") == 130


def test_benchmarks_name_a_missing_package(
    typed: Type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [module for module in sys.modules if module.startswith("dynamo_trtllm.bench.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert typed("chaos --list") == 2
    assert "the benchmarks need orjson; " in capsys.readouterr().err
    assert "status" in completion("bash")  # of the other commands


def test_demo_when_no_file_is_named_then_the_sample_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(DemoConfig, prog="x", argv=[], environ={})
    assert config.demo
    assert find_file(config.deployment).is_file()


def test_help_on_a_terminal_is_colored_unless_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**env: str) -> str:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", Terminal())
        command = COMMANDS["launch"]
        parser_of(command).print_help()
        return sys.stdout.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert "\x1b[" in shown(TERM="xterm")
    plain = shown(NO_COLOR="1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    parser_of(COMMANDS["launch"]).print_help()
    assert plain == sys.stdout.getvalue()  # the same text as in a pipe


def test_help_when_the_extra_cli_is_missing_then_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    # Images of TensorRT-LLM and vLLM have rich.
    monkeypatch.setitem(sys.modules, "rich_argparse", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    parser_of(COMMANDS["launch"]).print_help()
    assert sys.stdout.getvalue().startswith("usage: ")
    assert "\x1b[" not in sys.stdout.getvalue()


def test_completion_names_missing_extra_cli(
    typed: Type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert typed("completion bash") == 2
    assert "completion needs shtab; run pip install -e '.[cli]'" in capsys.readouterr().err


_COMPLETE = """
source "$1"
complete -p dynamo-trtllm > /dev/null
COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2))
_shtab_dynamo_trtllm
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completion_has_commands_flags_values_and_files(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(completion("bash"))
    (tmp_path / "mine.yaml").touch()

    def answers(*words: str) -> set[str]:
        command = ["bash", "-c", _COMPLETE, "bash", script.name, "dynamo-trtllm", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert answers("") == set(NAMES)
    assert answers("worker", "--disagg") == {"--disaggregation-mode", "--disaggregation-strategy"}
    assert answers("worker", "--disaggregation-mode", "") == {
        "prefill",
        "decode",
        "prefill_and_decode",
        "elastic",
    }
    assert answers("launch", "mi") == {"mine.yaml"}
    assert "--shape" in answers("bench", "--s")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shell_completion_has_commands_and_flags(shell: str) -> None:
    script = completion(shell)
    assert all(name in script for name in NAMES)
    assert "disaggregation-mode" in script
