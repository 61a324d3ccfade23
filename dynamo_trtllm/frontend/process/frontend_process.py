"""Run one of several frontend processes on a port. `process_group` starts it with a socket pair as standard input.

It serves like a single frontend process and exits with its parent.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvloop

from dynamo_trtllm.config.commands import FrontendProcessConfig
from dynamo_trtllm.config.load import command_errors, load
from dynamo_trtllm.frontend.process.control_pipe import ControlPipe
from dynamo_trtllm.frontend.process.main import serve
from dynamo_trtllm.network.listening import listen
from dynamo_trtllm.observability import logging as observe_logging

PROG = "python -m dynamo_trtllm.frontend.process.frontend_process"


@command_errors(PROG)
def main() -> None:
    """Run the process. The exit statuses are those of `frontend.main`."""
    config = load(FrontendProcessConfig, prog=PROG)
    observe_logging.setup(config.log_level, f"frontend-{config.number}", config.log_format)
    uvloop.run(_serve(config))


async def _serve(config: FrontendProcessConfig) -> None:
    parent = socket.socket(fileno=sys.stdin.fileno())
    pipe = ControlPipe(*await asyncio.open_unix_connection(sock=parent))
    await serve(config, listen(config.http_host, config.http_port, is_shared=True), pipe)


if __name__ == "__main__":
    main()
