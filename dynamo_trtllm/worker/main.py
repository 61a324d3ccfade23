"""Run a worker from the command line (`python -m dynamo_trtllm`)."""

from __future__ import annotations

import sys

from dynamo_trtllm.config.load import command, process_environment, warn_of_ignored_variables
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.worker.show_arguments import argument_table, dump_arguments, shell_exports
from dynamo_trtllm.worker.worker import Worker


@command(WorkerConfig, "python -m dynamo_trtllm", extra_text=argument_table)
def main(config: WorkerConfig) -> None:
    """Run the command.

    Exit status: 0 after a drain, 2 for an invalid configuration, 1 for a later failure.
    """
    observe_logging.setup(config.log_level, config.disaggregation_mode, config.log_format)
    warn_of_ignored_variables(config)
    if config.print_environment:
        sys.stdout.write(shell_exports(config, process_environment()))
        return
    if config.dump_config_to is not None:
        dump_arguments(config, config.dump_config_to)
    OUTPUTS.start(config.disaggregation_mode, config.log_format)
    Worker(config).run()
