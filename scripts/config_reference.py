"""Write docs/reference-configuration.md from the configuration models.

`python -m scripts.config_reference` runs it. A test compares the page with this output.
"""

from __future__ import annotations

import html
import json
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dynamo_trtllm.cli.console import COMMANDS
from dynamo_trtllm.config.commands import (
    ChatConfig,
    ClearNamespaceConfig,
    CompletionConfig,
    DemoConfig,
    ExplainConfig,
    KeysConfig,
    LaunchConfig,
    LogsConfig,
    PlanConfig,
    PlannerConfig,
    PreflightConfig,
    ProfileConfig,
    RolesConfig,
    ServeConfig,
    SharesConfig,
    SimulateConfig,
    StatusConfig,
    StopConfig,
    VersionConfig,
)
from dynamo_trtllm.config.config_base import GROUPS, Config
from dynamo_trtllm.config.deployment import (
    DeploymentConfig,
    RestartConfig,
    ServicesConfig,
    WorkerSpec,
)
from dynamo_trtllm.config.dynamo_variables import FRONTEND, VARIABLES, VLLM, WORKER, Variable
from dynamo_trtllm.config.flags import ENV_PREFIX, Flag, flags_of
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.engines.mock.args import MockArgs
from dynamo_trtllm.engines.torch.args import TorchArgs

PAGE = Path(__file__).parents[1] / "docs" / "reference-configuration.md"


class Program(NamedTuple):
    title: str
    command: str
    model: type[Config]
    module: str = ""  # what `python -m` starts as well; "": nothing


class Table(NamedTuple):
    """The table of the fields of a model."""

    title: str
    model: type[BaseModel]


PROGRAMS = (
    Program("Worker", "worker", WorkerConfig, "dynamo_trtllm"),
    Program("Frontend", "frontend", FrontendConfig, "dynamo_trtllm.frontend"),
    Program("Launcher", "launch", LaunchConfig, "dynamo_trtllm.launch"),
    Program("Demo", "demo", DemoConfig),
    Program("Serve", "serve", ServeConfig, "dynamo_trtllm.launch.serve"),
    Program("Preflight", "preflight", PreflightConfig, "dynamo_trtllm.preflight"),
    Program("Simulate", "simulate", SimulateConfig),
    Program("Plan", "plan", PlanConfig),
    Program("Profile", "profile", ProfileConfig),
    Program("Terminal client", "chat", ChatConfig, "dynamo_trtllm.chat"),
    Program("Status", "status", StatusConfig),
    Program("Logs", "logs", LogsConfig),
    Program("Stop", "stop", StopConfig),
    Program("Explain", "explain", ExplainConfig),
    Program("Planner", "planner", PlannerConfig, "dynamo_trtllm.planner"),
    Program("Shares of elastic workers", "shares", SharesConfig),
    Program(
        "Clear a namespace",
        "clear-namespace",
        ClearNamespaceConfig,
        "dynamo_trtllm.clear_namespace",
    ),
    Program("API keys", "keys", KeysConfig, "dynamo_trtllm.cli.keys"),
    Program("Users of etcd and NATS", "roles", RolesConfig),
    Program("Version", "version", VersionConfig),
    Program("Completion", "completion", CompletionConfig),
)
DEPLOYMENT = (
    Table("Deployment", DeploymentConfig),
    Table("services", ServicesConfig),
    Table("workers, each of the list", WorkerSpec),
    Table("restart", RestartConfig),
)
ENGINES = (Table("torch", TorchArgs), Table("mock", MockArgs))
_HEAD = f"""\
# Configuration reference

<!-- written by `python -m scripts.config_reference`; a test compares -->

This page lists every setting of every program, as `--help` shows it.
[Configuration](configuration.md) describes which source overrides which, and how engine arguments
are merged. The variables in the table begin with `{ENV_PREFIX}`; for some settings, a variable that
other programs use works too. `--no-…` switches a switch off. Every program also has `--help`,
`--version` and `--print-config`.

## Commands

`dynamo-trtllm COMMAND` is the console command that comes with the package. The flags of `bench` and
`chaos` are in their `--help`.
"""


def page() -> str:
    """Return the page."""
    rows = [(f"`{COMMAND_NAME} {command.name}`", command.summary) for command in COMMANDS.values()]
    parts = [_HEAD, table(("command", "what it does"), rows)]
    for program in PROGRAMS:
        typed = f"`{COMMAND_NAME} {program.command}`"
        if program.module:
            typed += f" or `python -m {program.module}`"
        parts += [f"## {program.title}\n", f"{typed}\n"]
        parts += _program(program.model)
    parts += ["## Deployment file\n", _DEPLOYMENT_HEAD]
    for section in DEPLOYMENT:
        parts += [f"### {section.title}\n", _fields(section.model)]
    parts += ["## Arguments of the engines that are here\n", _ENGINES_HEAD]
    for section in ENGINES:
        parts += [f"### {section.title}\n", _fields(section.model)]
    parts += ["## Variables of NVIDIA Dynamo\n", _DYNAMO_HEAD, _dynamo_options()]
    parts += [_IGNORED_HEAD, _dynamo_ignored()]
    return "\n".join(parts)


_DYNAMO_HEAD = """\
These variables of Dynamo's frontend, router and workers set an option here. A flag and the
`DYN_TRTLLM_` variable of the same option override them.
"""
_IGNORED_HEAD = """\
These have no effect here. A process that gets one says so at its start, in one line that also names
unknown variables that begin with `DYN_`. It leaves out variables of other processes, and those with
one of the values in the third column, which ask for what happens anyway. `*` stands for any rest of
a name.
"""
_MODELS: dict[str, type[Config]] = {
    FRONTEND: FrontendConfig,
    WORKER: WorkerConfig,
    VLLM: WorkerConfig,
}
_PROCESSES = {FRONTEND: "frontend", WORKER: "worker", VLLM: "worker with `--engine vllm`"}


def _dynamo_options() -> str:
    """Return a table of the variables of Dynamo that set options."""
    rows = []
    for name, variable in VARIABLES.items():
        for process in variable.processes:
            if process not in _MODELS:
                continue
            for flag in flags_of(_MODELS[process]):
                if name in flag.env:
                    typed = f"`{flag.names[0]}`"
                    rows.append((f"`{name}`", _PROCESSES[process], typed, variable.form))
    return table(("variable", "process", "option", "value"), rows)


def _dynamo_ignored() -> str:
    """Return a table of the variables of Dynamo without effect, one row for each reason."""
    groups: dict[Variable, list[str]] = {}
    for name, variable in VARIABLES.items():
        if variable.reason and all(process in _PROCESSES for process in variable.processes):
            # Variables that agree in these fields share a row.
            row_of = Variable(
                _without_option(name, variable), variable.reason, variable.no_op_values
            )
            groups.setdefault(row_of, []).append(f"`{name}`")
    rows = []
    for variable, names in groups.items():
        processes = " and ".join(_PROCESSES[process] for process in variable.processes)
        rows.append((", ".join(names), processes, _quoted(variable.no_op_values), variable.reason))
    return table(("variables", "process", "without a message", "why, or what to do"), rows)


def _without_option(name: str, variable: Variable) -> tuple[str, ...]:
    """Return the processes in which no option takes the variable."""
    taking = set()
    for process in variable.processes:
        if any(name in flag.env for flag in flags_of(_MODELS[process])):
            taking.add(process)
    return tuple(process for process in variable.processes if process not in taking)


_DEPLOYMENT_HEAD = """\
The YAML file of the launcher. In every value `${NAME}` and `${NAME:-default}` come from the
launcher's environment.
"""
_ENGINES_HEAD = """\
Keys of `--extra-engine-args` and `--override-engine-args`. TensorRT-LLM's and vLLM's own arguments
are in their documentation; what is known of them by release is checked before anything loads.
"""


def _program(model: type[Config]) -> Iterator[str]:
    flags = flags_of(model)
    for group in GROUPS:
        in_group = [flag for flag in flags if flag.group == group]
        if not in_group:
            continue
        yield f"### {group[0].upper()}{group[1:]}\n"
        rows = [_flag(flag, model.model_fields[flag.field]) for flag in in_group]
        yield table(("flag", "variable", "default", "what it is for"), rows)


def _flag(flag: Flag, info: FieldInfo) -> tuple[str, ...]:
    names = _quoted(flag.names)
    if flag.choices:
        names += f": {_quoted(flag.choices)}"
    variables = _quoted([f"{ENV_PREFIX}{flag.field.upper()}", *flag.env])
    return names, variables, _default(info), _description(info)


def _fields(model: type[BaseModel]) -> str:
    rows = []
    for name, info in model.model_fields.items():
        key = f"`{name}`"
        choices = _choices(info.annotation)
        if choices:
            key += f": {_quoted(choices)}"
        rows.append((key, _default(info), _description(info)))
    return table(("key", "default", "what it is for"), rows)


def _description(info: FieldInfo) -> str:
    return html.escape(str(info.description), quote=False)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the words that a field allows; none if it allows other values."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(str(member.value) for member in annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return ()


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, Enum):
        value = value.value
    if not isinstance(value, str):
        value = json.dumps(value, default=str)
    return f"`{value}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
