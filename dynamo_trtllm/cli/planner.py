"""Run a planner for a deployment (`dynamo-trtllm planner`).

`launch` starts planners with `python -m dynamo_trtllm.planner`, which looks for no deployment.
"""

from __future__ import annotations

from dynamo_trtllm.cli.launched_servers import with_launched_servers
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.planner.main import run_planner


@command(PlannerConfig, f"{COMMAND_NAME} planner")
def main(config: PlannerConfig) -> None:
    """Run the command.

    Exit status: 0 after a signal, 2 for a wrong configuration, 1 for a later failure.
    """
    run_planner(with_launched_servers(config, config.deployment_name, uses_nats=True))


if __name__ == "__main__":
    main()
