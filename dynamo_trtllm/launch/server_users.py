"""Make users of etcd and NATS with random passwords, one for each role."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from dynamo_trtllm.cluster.credentials import CredentialsFile
from dynamo_trtllm.cluster.discovery.etcd import START_TIMEOUT_S
from dynamo_trtllm.cluster.discovery.etcd_connection import EtcdConnection
from dynamo_trtllm.cluster.discovery.etcd_store import backoff
from dynamo_trtllm.cluster.discovery.records import parse_endpoint
from dynamo_trtllm.cluster.etcd_users import ROOT, set_up_users
from dynamo_trtllm.cluster.roles import (
    COMPONENTS,
    ClusterUser,
    cluster_users,
    nats_configuration,
)
from dynamo_trtllm.config.config_base import ROLE_IN_PATH, ConnectionConfig
from dynamo_trtllm.launch.process_specs import ProcessSpec
from dynamo_trtllm.launch.secret_files import write_private
from dynamo_trtllm.protocol.errors import Unreachable

_PASSWORD_BYTES: Final = 20
_SUFFIX: Final = ".credentials"


class PasswordFolder:
    """A folder with a file USER.credentials for each user, which only its owner may read.

    Args:
        folder: the folder.
        users: the users. A user without a file gets a file with a random password.
        has_root: the folder also has a file for the user root of etcd, who can change the users.

    Raises:
        ConfigError: a file can't be read or written.
    """

    def __init__(
        self, folder: Path, users: Sequence[ClusterUser], *, has_root: bool = False
    ) -> None:
        self.users = users
        self.passwords: dict[str, str] = {}
        self.files: list[Path] = []
        # The value of --etcd-credentials-file and --nats-credentials-file of every process.
        self.credentials_files = folder / f"{ROLE_IN_PATH}{_SUFFIX}"
        names = [user.name for user in users]
        if has_root:
            names.append(ROOT)
        for name in names:
            path = folder / f"{name}{_SUFFIX}"
            self.files.append(path)
            if not path.exists():
                write_private(path, f"{name}:{secrets.token_hex(_PASSWORD_BYTES)}\n")
            credentials = CredentialsFile(path, "credentials_folder").current()
            self.passwords[name] = credentials.password

    def nats_configuration(self) -> str:
        """Return the part of a configuration of nats-server that lists the users."""
        return nats_configuration(self.users, self.passwords)


def users_of(namespace: str, specs: Sequence[ProcessSpec]) -> list[ClusterUser]:
    """Return the users of a launched deployment.

    Args:
        namespace: the namespace of the deployment.
        specs: the processes of the deployment.
    """
    endpoints = [spec.worker.endpoint for spec in specs if spec.worker is not None]
    chosen = [parse_endpoint(endpoint).component for endpoint in endpoints if endpoint]
    return cluster_users([namespace], components=list(dict.fromkeys([*COMPONENTS, *chosen])))


async def set_up_etcd(
    config: ConnectionConfig, users: Sequence[ClusterUser], passwords: Mapping[str, str] = {}
) -> None:
    """Create users in etcd, which rejects all other clients from then on.

    Wait up to START_TIMEOUT_S for an etcd that does not answer yet.

    Args:
        config: the address of etcd. If etcd has users, also the certificate or password of root.
        users: the users.
        passwords: the passwords by user. A user without a password needs a certificate with its
            name.

    Raises:
        ConfigError: a certificate file can't be read.
        Unreachable: etcd does not answer, or rejects the user of this process.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT_S
    delays = backoff()
    async with aclosing(EtcdConnection(config)) as connection:
        while True:
            try:
                await set_up_users(connection, users, passwords)
            except Unreachable:
                if connection.answered or loop.time() >= deadline:
                    raise
                await asyncio.sleep(next(delays))
            else:
                return
