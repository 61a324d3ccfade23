"""Define the settings of `dynamo-trtllm planner`."""

from __future__ import annotations

from typing import ClassVar

from dynamo_trtllm.config.client_commands import DeploymentChoiceConfig
from dynamo_trtllm.config.config_base import ClusterRole, NonEmpty, Port, option
from dynamo_trtllm.config.http_access import HttpAccessConfig
from dynamo_trtllm.config.routing import SloMilliseconds


class PlannerConfig(HttpAccessConfig, DeploymentChoiceConfig):
    """Set the shares of elastic workers so that requests keep the limits of their times.

    examples:
      %(prog)s --slo-ttft-ms 2000 --slo-itl-ms 100
      %(prog)s --slo-ttft-ms 2000 --slo-itl-ms 100 --advise
    Without an address of etcd or NATS, it plans for the deployment that was launched on this
    machine. Several planners of a namespace may run: one of them leads, and another one takes over
    when it ends. Without a planner, the shares stay as they are.
    exit status: 0 after a signal, 1 if etcd or NATS does not answer at the start, 2 for a bad
    command line
    """

    cluster_role: ClassVar[ClusterRole] = ClusterRole.PLANNER

    slo_ttft_ms: SloMilliseconds = option(
        "this command", ..., help="Limit of the time to first token in milliseconds."
    )
    slo_itl_ms: SloMilliseconds = option(
        "this command",
        ...,
        help="Limit of the longest time between two tokens in milliseconds.",
    )
    advise: bool = option(
        "this command",
        False,
        help="Log what would be changed, as `shares --set` takes it, and change nothing. It may run"
        " beside another planner.",
    )
    system_host: NonEmpty = option(
        "process",
        "127.0.0.1",
        env="DYN_SYSTEM_HOST",
        help="Address that --system-port listens on. With 0.0.0.0, clients of other machines get"
        " only /live and /ready unless they have an API key, or --allow-anonymous is set.",
    )
    system_port: Port | None = option(
        "process",
        None,
        env="DYN_SYSTEM_PORT",
        help="Port for /live, /ready, /health and /metrics; 0 takes a free one. Default: disabled.",
    )
