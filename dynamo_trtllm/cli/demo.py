"""Run the sample deployment (`dynamo-trtllm demo`)."""

from __future__ import annotations

from dynamo_trtllm.cli.failover import FAILOVER
from dynamo_trtllm.config.commands import DemoConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.launch.demonstration import SAMPLE
from dynamo_trtllm.launch.main import launch
from dynamo_trtllm.support.subprocesses import RunFailed


@command(DemoConfig, f"{COMMAND_NAME} demo", RunFailed)
def main(config: DemoConfig) -> None:
    """Run the command.

    Exit with status 0 after a stop by signal, 2 for a bad configuration, and 1 if the deployment
    failed or was stopped before `--once` was done, or if `--failover` did not end as it should.
    """
    if config.failover:
        launch(config, FAILOVER, once=True)
    else:
        launch(config, SAMPLE if config.demo else None, once=config.once)
