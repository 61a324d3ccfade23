"""Run `dynamo-trtllm launch`: start and supervise a deployment."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from dynamo_trtllm.access.api_keys import new_key
from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.config_base import LogFormat
from dynamo_trtllm.config.deployment import DeploymentConfig, load_deployment
from dynamo_trtllm.config.engine_names import DEFAULT_ENGINE
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.layers import find_file
from dynamo_trtllm.config.load import (
    child_environment,
    command,
    process_environment,
    warn_of_ignored_variables,
)
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.engines.factory import check_prerequisites
from dynamo_trtllm.engines.gpu import VISIBLE
from dynamo_trtllm.launch.demonstration import (
    API_KEY_VARIABLE,
    KEY_HEADER,
    SAMPLE,
    Demonstration,
    ReadyDeployment,
)
from dynamo_trtllm.launch.dry_run import describe_start
from dynamo_trtllm.launch.launcher import Launcher
from dynamo_trtllm.launch.process_output import LAUNCHER, ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec, is_open_to_all, processes, with_settings
from dynamo_trtllm.launch.running_deployments import LaunchRecord
from dynamo_trtllm.models import locate
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.subprocesses import RunFailed
from dynamo_trtllm.support.tls import server_certificate

PROG = "python -m dynamo_trtllm.launch"
_KEY_NOTE = (
    "Other machines can connect, so clients need this API key, which is new with each start:"
)


@command(LaunchConfig, PROG, RunFailed)
def main(config: LaunchConfig) -> None:
    """Run the command.

    Exit with status 0 after a stop by signal, 2 for a bad configuration, and 1 if the deployment
    failed or was stopped before `--once` was done.
    """
    launch(config, SAMPLE if config.demo else None, once=config.once)


def launch(config: LaunchConfig, demonstration: Demonstration | None, *, once: bool) -> None:
    """Run the deployment of these settings, or with `dry_run` only print what would be started.

    Args:
        config: the settings.
        demonstration: what to show when all processes are ready.
        once: stop after the demonstration.

    Raises:
        ConfigError, RunFailed, OSError: as for `run`.
    """
    if config.dry_run:
        _dry_run(config)
        return
    OUTPUTS.start(LAUNCHER, config.log_format)
    observe_logging.setup(config.log_level, LAUNCHER, config.log_format)
    deployment = with_settings(
        load_deployment(find_file(config.deployment), process_environment()), config
    )
    if demonstration is not None and deployment.frontend is None:
        raise ConfigError(
            f"{config.deployment}: --demo needs a frontend, but frontend is null; remove one of"
            " them"
        )
    asyncio.run(
        run(deployment, log_format=config.log_format, demonstration=demonstration, once=once)
    )


def _dry_run(config: LaunchConfig) -> None:
    """Check a deployment as `run` does, and print what it would start. Raises ConfigError."""
    environ = child_environment()
    deployment = with_settings(load_deployment(find_file(config.deployment), environ), config)
    specs = processes(deployment, environ)
    _check_processes(specs, environ)
    sys.stdout.write(describe_start(deployment, specs))


async def run(
    deployment: DeploymentConfig,
    *,
    log_format: LogFormat,
    demonstration: Demonstration | None = None,
    once: bool = False,
    preface: Sequence[str] = (),
) -> None:
    """Run a deployment until a signal, or until it has been ready once.

    Args:
        deployment: the deployment.
        log_format: format of log lines, also of the processes.
        demonstration: what to show when all processes are ready.
        once: stop when all processes are ready and the demonstration is done.
        preface: lines to write before anything starts.

    Raises:
        ConfigError: a setting is wrong, or a port is in use.
        RunFailed: the deployment failed, or was stopped before `once` was done.
        OSError: the reader of the output has exited. The deployment was stopped.
    """
    environ = child_environment() | {f"{ENV_PREFIX}LOG_FORMAT": log_format}
    demo_key = ""
    is_quiet = demonstration is not None and demonstration.is_quiet
    if demonstration is not None and is_open_to_all(deployment, environ):
        demo_key = new_key()
        environ[API_KEY_VARIABLE] = demo_key
    # Check all settings before the servers start, so that a mistake is reported at once, and only
    # by this process.
    specs = processes(deployment, environ)
    _check_processes(specs, environ)
    if demonstration is not None:
        demonstration.check(specs)
    warn_of_ignored_variables(*(spec.worker or FrontendConfig() for spec in specs))
    output = ProcessOutput(sys.stdout, [spec.name for spec in specs], is_json=log_format == "json")
    for line in preface:
        output.say(line)
    is_done = False

    async def on_ready(record: LaunchRecord) -> bool:
        nonlocal is_done
        frontend = record.frontend
        url = None if frontend is None else frontend.url
        rows = [] if is_quiet else [*_name_rows(record), *_summary(specs, url)]
        _say_ready(output, rows, url, once=once)
        if demo_key:
            output.say(f"{_KEY_NOTE}\nexport {API_KEY_VARIABLE}={demo_key}")
        if demonstration is not None and frontend is not None:
            await demonstration.show(ReadyDeployment(output, specs, record, frontend))
        is_done = True
        return once

    if output.failure is None:
        with output.hiding_lines() if is_quiet else nullcontext(), output.starting():
            await Launcher(deployment, specs, output, environ).run(on_ready)
    if output.failure is not None:
        raise output.failure
    if once and not is_done:
        raise RunFailed("stopped before all processes were ready and the demo was done")


def _check_processes(specs: Sequence[ProcessSpec], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a package, file or GPU that a process needs is missing or wrong."""
    for spec in specs:
        try:
            server_certificate(spec.tls_files)
            if spec.worker is not None:
                check_prerequisites(spec.worker, {**environ, **spec.env}, locate)
        except ConfigError as exc:
            raise ConfigError(f"{spec.name}: {exc.message}", field=exc.field) from exc


def _say_ready(
    output: ProcessOutput, rows: Sequence[tuple[str, str]], url: str | None, *, once: bool
) -> None:
    """Write that all processes are ready: as a panel with these rows, or in one line."""
    stop = "" if once else " (Ctrl-C to stop)"
    if not output.end_start(f"Ready{stop}", rows):
        where = " without a frontend" if url is None else f": {url}"
        output.say(f"Ready{where}{stop}")


def _name_rows(record: LaunchRecord) -> list[tuple[str, str]]:
    """Return the name of a deployment, if it is not its namespace: other commands need it."""
    return [("name", record.name)] if record.name != record.namespace else []


def _shell_rows() -> list[tuple[str, str]]:
    """Return the row that says how a shell finds the commands of the panel.

    There is no row if this process finds them. `scripts/demo` starts the program of a virtual
    environment that the shell has not activated.
    """
    script = Path(sys.prefix, "bin", "activate")
    if shutil.which(COMMAND_NAME) is not None or not script.is_file():
        return []
    shown = script
    # It may be in another folder, or the working folder was deleted.
    with suppress(ValueError, FileNotFoundError):
        shown = script.relative_to(Path.cwd())
    return [("shell", f"source {shlex.quote(str(shown))}   # once in each terminal")]


def _summary(specs: Sequence[ProcessSpec], url: str | None) -> list[tuple[str, str]]:
    """Return what a user needs to know of a ready deployment, as subjects and texts."""
    workers = [spec for spec in specs if spec.worker is not None]
    models = dict.fromkeys(spec.model for spec in workers)
    rows = [("models", ", ".join(models))]
    names_by_place: dict[tuple[str | None, str], list[str]] = {}
    for spec in workers:
        place = (spec.engine, _device(spec))
        names_by_place.setdefault(place, []).append(spec.name)
    for (engine, device), names in names_by_place.items():
        rows.append(("workers", f"{', '.join(names)} ({engine or DEFAULT_ENGINE}, {device})"))
    if url is None:
        return rows
    header = ""
    if any(spec.needs_api_key for spec in specs):
        header = f" {KEY_HEADER}"
    return [
        ("URL", f"{url}/v1"),
        *rows,
        *_shell_rows(),
        ("chat", f"{COMMAND_NAME} chat --url {url}"),
        ("curl", f"curl {url}/v1/models{header}"),
        ("logs", f"{COMMAND_NAME} logs --follow"),
        ("API", f"{url}/docs"),
    ]


def _device(spec: ProcessSpec) -> str:
    visible = spec.env.get(VISIBLE, "")
    return f"GPU {visible}" if visible else "CPU"
