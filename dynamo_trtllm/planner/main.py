"""Run a planner from the command line (`python -m dynamo_trtllm.planner`)."""

from __future__ import annotations

import uvloop

from dynamo_trtllm.config.load import command, warn_of_ignored_variables
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.planner.process import PlannerProcess
from dynamo_trtllm.protocol.errors import ConfigError


@command(PlannerConfig, "python -m dynamo_trtllm.planner")
def main(config: PlannerConfig) -> None:
    """Run the planner.

    Exit status: 0 after a signal, 2 for a wrong configuration, 1 for a later failure.
    """
    # Only the flag is an error: the variable may be set for other commands.
    if config.source_of("deployment_name").startswith("flag "):
        raise ConfigError(
            "only `dynamo-trtllm planner` looks for a deployment of this machine; use that"
            " command, or pass --etcd-endpoints, --nats-server and --namespace",
            field="deployment_name",
        )
    run_planner(config)


def run_planner(config: PlannerConfig) -> None:
    """Run a planner as this process until a signal.

    Raises:
        ConfigError: a setting is invalid.
        Unreachable: etcd or NATS does not answer at the start.
    """
    OUTPUTS.start("planner", config.log_format)
    observe_logging.setup(config.log_level, "planner", config.log_format)
    warn_of_ignored_variables(config)
    uvloop.run(_run(config))


async def _run(config: PlannerConfig) -> None:
    await PlannerProcess(config).serve_with_signals()


if __name__ == "__main__":
    main()
