"""Run `python -m dynamo_trtllm.launch`: load and check the configuration, then supervise the deployment."""

from __future__ import annotations

import asyncio
import sys

from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.deployment import DeploymentConfig, load_deployment
from dynamo_trtllm.config.load import ENV_PREFIX, exit_with, load, process_environment
from dynamo_trtllm.demo_models import locate
from dynamo_trtllm.engines.factory import check_prerequisites
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.launch import demo
from dynamo_trtllm.launch.console import Console
from dynamo_trtllm.launch.launcher import DeploymentStatus, Launcher
from dynamo_trtllm.launch.plan import processes, with_address, with_engine, with_model
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.subprocesses.supervisor import RunFailed

PROG = "python -m dynamo_trtllm.launch"
_DESCRIPTION = "Start etcd, NATS, a frontend and workers on this machine from a YAML file, and restart those that die."


def main() -> None:
    """Run the command.

    Exit with status 0 after a stop by signal, 2 for a bad configuration, and 1 if the deployment failed or was stopped
    before `--once` was done.
    """
    try:
        config = load(LaunchConfig, prog=PROG, description=_DESCRIPTION)
        observe_logging.setup(config.log_level, "launch", config.log_format)
        deployment = load_deployment(config.deployment, process_environment())
        if config.model is not None:
            deployment = with_model(deployment, config.model)
        if config.engine is not None:
            deployment = with_engine(deployment, config.engine)
        deployment = with_address(deployment, host=config.host, port=config.port)
        if config.demo and deployment.frontend is None:
            raise ConfigError(f"{config.deployment}: --demo needs a frontend, but frontend is null; remove one of them")
        asyncio.run(_run(config, deployment))
    except ConfigError as exc:
        exit_with(PROG, exc)
    except RunFailed as exc:
        sys.stderr.write(f"{PROG}: {exc}\n")
        raise SystemExit(exc.exit_status) from exc


async def _run(config: LaunchConfig, deployment: DeploymentConfig) -> None:
    environ = process_environment() | {f"{ENV_PREFIX}LOG_FORMAT": config.log_format}
    # check all settings before the servers start, so that a mistake is reported at once and only once
    specs = processes(deployment, environ)
    for spec in specs:
        try:
            if spec.worker is not None:
                check_prerequisites(spec.worker, {**environ, **spec.env}, locate)
        except ConfigError as exc:
            raise ConfigError(f"{spec.name}: {exc.message}", field=exc.field) from exc
    console = Console(sys.stdout, [spec.name for spec in specs], is_json=config.log_format == "json")
    is_done, is_mock = False, any(spec.engine == "mock" for spec in specs)

    async def on_ready(status: DeploymentStatus) -> bool:
        nonlocal is_done
        where = " without a frontend" if status.frontend is None else f": http://{status.frontend}"
        console.say(f"Ready{where}" + ("" if config.once else " (Ctrl-C to stop)"))
        if config.demo and status.frontend is not None:
            model = next(spec.model for spec in specs if not spec.is_frontend)
            answer = await demo.ask(status.frontend, model)
            console.say(demo.report(answer, model, status.names, is_mock=is_mock))
            console.say(demo.next_step(status.frontend, model))
        is_done = True
        return config.once

    await Launcher(deployment, specs, console, environ).run(on_ready)
    if config.once and not is_done:
        raise RunFailed("stopped before all processes were ready and the demo was done")
