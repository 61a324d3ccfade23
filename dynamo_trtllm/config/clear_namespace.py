"""The settings of `python -m dynamo_trtllm.clear_namespace`: whose records to remove, and how sure one is."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dynamo_trtllm.config.base import PROCESS, ConnectionConfig, option


class ClearNamespaceConfig(ConnectionConfig):
    """Removes what a deployment left in etcd and JetStream."""

    examples: ClassVar[str] = """\
examples:
  python -m dynamo_trtllm.clear_namespace --namespace dynamo
  python -m dynamo_trtllm.clear_namespace --namespace dynamo --yes
exit status: 0 when it is clear, 1 when something was left or could not be reached, 2 for a bad command line
"""

    yes: bool = Field(
        default=False,
        description="remove without asking; required when there is no terminal to ask on",
        json_schema_extra=option(PROCESS),
    )
    force: bool = Field(
        default=False,
        description="also instances that live; their leases are revoked, and a worker that does run registers again "
        "within seconds",
        json_schema_extra=option(PROCESS),
    )
