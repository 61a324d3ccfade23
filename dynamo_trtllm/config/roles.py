"""Define the settings of `dynamo-trtllm roles`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from dynamo_trtllm.config.config_base import Component, ConnectionConfig, Namespace, option


class RolesConfig(ConnectionConfig):
    """Set up the users of NATS and etcd, one for each role: frontend, worker and tool.

    examples, for servers that read the names of users from client certificates:
      %(prog)s nats --namespace dynamo > nats-users.conf
      %(prog)s etcd --namespace dynamo --etcd-endpoints https://etcd:2379 \\
        --etcd-ca ca.crt --etcd-cert root.crt --etcd-key root.key
    for servers with passwords, which are in the files USER.credentials of a folder:
      %(prog)s nats --credentials-folder /etc/dynamo > nats-users.conf
      %(prog)s etcd --credentials-folder /etc/dynamo
    `nats` prints a part of the configuration of nats-server. `etcd` creates the users, and makes
    etcd reject everyone else. To change users later, run it as the user root, with its certificate
    or with --etcd-credentials-file /etc/dynamo/root.credentials.
    exit status: 0, 1 if etcd is unreachable or rejects this command, 2 for a bad command line
    """

    action: Literal["nats", "etcd"] = option(
        "process", ..., positional=True, help="The server whose users are set up: nats or etcd."
    )
    other_namespaces: tuple[Namespace, ...] = option(
        "control plane",
        (),
        aliases=("--other-namespace",),
        help="Another deployment whose processes have the same users. May be repeated.",
    )
    components: tuple[Component, ...] = option(
        "control plane",
        (),
        aliases=("--component",),
        help="Component of the --endpoint of workers, beside the default ones. May be repeated.",
    )
    workers: tuple[Component, ...] = option(
        "control plane",
        (),
        aliases=("--worker",),
        help="Component with one worker, which has a user of its own, worker-NAME. May be repeated."
        " Other workers can't receive its requests. It needs --endpoint dyn://NAMESPACE.NAME.generate"
        " and --nats-inbox-prefix _INBOX_worker.NAME.",
    )
    credentials_folder: Path | None = option(
        "control plane",
        None,
        help="Folder with a file USER.credentials for each user, and for root of etcd. Users"
        " without a file get one with a random password. Default: users have no passwords, but"
        " client certificates with their name as common name.",
    )

    @model_validator(mode="after")
    def _users_can_log_in(self) -> RolesConfig:
        has_tls = self.etcd_endpoints.strip().startswith("https://")
        if self.action == "etcd" and self.credentials_folder is None and not has_tls:
            raise ValueError(
                "without passwords, users need certificates, but --etcd-endpoints does not begin"
                " with https://; pass https:// endpoints, or --credentials-folder"
            )
        return self
