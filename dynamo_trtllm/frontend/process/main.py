"""Start a frontend (`python -m dynamo_trtllm.frontend`).

`python -m` of this module runs one of several frontend processes on a port.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import uvloop

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import command, warn_of_ignored_variables
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.http.hooks import import_hooks
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS

PROG = "python -m dynamo_trtllm.frontend"


@command(FrontendConfig, PROG)
def main(config: FrontendConfig) -> int:
    """Run the frontend.

    Exit status: 0 after a signal, 2 for a wrong configuration, 1 for a later failure.
    """
    OUTPUTS.start("frontend", config.log_format)
    observe_logging.setup(config.log_level, "frontend", config.log_format)
    warn_of_ignored_variables(config)
    return Frontend(config).run()


@command(FrontendProcessConfig, PROG)
def process_main(config: FrontendProcessConfig) -> None:
    """Run one of several frontend processes.

    `process_group` starts the process with one end of a socket pair as standard input. The process
    serves like a single frontend process, and exits with its parent. The exit statuses are those of
    `main`.
    """
    name = f"frontend-{config.number}"
    OUTPUTS.start(name, config.log_format)
    observe_logging.setup(config.log_level, name, config.log_format)
    uvloop.run(_serve_with_parent(config))


async def _serve_with_parent(config: FrontendProcessConfig) -> None:
    """Serve until a signal or the end of the parent, whose socket is standard input."""
    from dynamo_trtllm.access.key_usage import UsageTable
    from dynamo_trtllm.frontend.process.control_pipe import ControlPipe

    own_end = socket.socket(fileno=sys.stdin.fileno())
    usage = None
    if config.api_keys_file is not None:
        # The parent has sent the file before it started this process, so `recv_fds` does not wait.
        _, (usage_file,), _, _ = socket.recv_fds(own_end, 1, 1)
        usage = UsageTable(usage_file, config.number, config.workers)
        os.close(usage_file)
    reader, writer = await asyncio.open_unix_connection(sock=own_end)
    hooks = {} if config.hooks is None else import_hooks(config.hooks)
    pipe = ControlPipe(reader, writer)
    await Frontend(config, **hooks, pipe=pipe, usage=usage).serve_with_signals()


if __name__ == "__main__":
    process_main()
