"""Create the HTTP server of a frontend within the limits of its settings."""

from __future__ import annotations

from dataclasses import replace

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.api.error_bodies import openai_error
from dynamo_trtllm.support.http_server.exchange import Handler
from dynamo_trtllm.support.http_server.limits import TIMING, ConnectionLimits, ConnectionTiming
from dynamo_trtllm.support.http_server.server import HttpServer
from dynamo_trtllm.support.network.listening import allow_files
from dynamo_trtllm.support.tls import ServerCertificate

# Connections beyond `max_connections`, for idle clients and for requests that get 429. Their number
# is four times ACCEPTS_PER_TURN.
RESERVED_CONNECTIONS = 256
# Open files of the log, etcd, NATS and models, and of connections that are accepted or closed in
# one turn of the event loop.
_OTHER_FILES = 256
_SHUTDOWN_S = 30  # longest wait for running requests after the first signal


def frontend_server(
    handler: Handler,
    config: FrontendConfig,
    timing: ConnectionTiming = TIMING,
    *,
    keeps_all_headers: bool = False,
    certificate: ServerCertificate | None = None,
) -> HttpServer:
    """Create the server, which does not serve yet.

    The limit of open files is raised to fit its connections. If that many files are not allowed,
    the server has fewer connections.
    """
    wanted = config.max_connections + RESERVED_CONNECTIONS + _OTHER_FILES
    files = allow_files(wanted, ", or lower --max-connections")
    # If the limit is very low, connections get half of the files.
    files_for_connections = max(files - _OTHER_FILES, files // 2)
    reserved = min(RESERVED_CONNECTIONS, files_for_connections // 4)
    # The settings have the names of the limits.
    configured = config.model_dump(include=set(ConnectionLimits.__dataclass_fields__))
    limits = ConnectionLimits(
        reserved_connections=reserved,
        timing=timing,
        keeps_all_headers=keeps_all_headers,
        **configured,
    )
    most_connections = files_for_connections - reserved
    if limits.max_connections > most_connections:
        limits = replace(limits, max_connections=most_connections)
    return HttpServer(
        handler,
        limits,
        error_form=openai_error,
        shutdown_s=_SHUTDOWN_S,
        certificate=certificate,
        origins=config.allowed_origins,
    )
