"""`python -m dynamo_trtllm`: configuration to a running worker. Nothing else."""

from __future__ import annotations

import logging

from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import print_config
from dynamo_trtllm.errors import ConfigError, DynamoError
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.worker.worker import Worker

PROG = "python -m dynamo_trtllm"
_DESCRIPTION = "Runs one worker: an engine that serves prefill calls, decode calls or complete requests of one model."

_log = logging.getLogger(__name__)


def main() -> None:
    """Exit status: 0 after a drain, 2 for a bad configuration, 1 for anything that failed later."""
    try:
        config = load(WorkerConfig, prog=PROG, description=_DESCRIPTION, more=print_config.table).config
        observe_logging.setup(config.log_level, config.disaggregation_mode, config.log_format)
        if config.dump_config_to is not None:
            print_config.dump(config, config.dump_config_to)
        Worker(config).run()
    except ConfigError as exc:
        exit_with(PROG, exc)
    except DynamoError as exc:
        _log.error("%s: %s", exc.code, exc.message)
        raise SystemExit(1) from exc
