"""Set up the users of NATS and etcd, one for each role (`dynamo-trtllm roles`)."""

from __future__ import annotations

import asyncio
import sys

from dynamo_trtllm.cluster.roles import COMPONENTS, cluster_users, nats_configuration
from dynamo_trtllm.config.commands import RolesConfig
from dynamo_trtllm.config.load import command
from dynamo_trtllm.config.parser import COMMAND_NAME
from dynamo_trtllm.launch.server_users import PasswordFolder, set_up_etcd
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.errors import ConfigError, Unreachable


@command(RolesConfig, f"{COMMAND_NAME} roles", Unreachable)
def main(config: RolesConfig) -> None:
    """Run the command.

    Exit with status 0, 1 if etcd is unreachable or rejects this command, and 2 for a bad command
    line.
    """
    observe_logging.setup(config.log_level, "roles", config.log_format)
    users = cluster_users(
        [config.namespace, *config.other_namespaces],
        components=[*COMPONENTS, *config.components],
        own_components=config.workers,
    )
    passwords: dict[str, str] = {}
    folder = config.credentials_folder
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"--credentials-folder {folder} can't be created: {exc.strerror or exc}; pass"
                " another folder",
                field="credentials_folder",
            ) from exc
        passwords = PasswordFolder(folder, users, has_root=True).passwords
    if config.action == "nats":
        sys.stdout.write(nats_configuration(users, passwords))
        return
    asyncio.run(set_up_etcd(config, users, passwords))
    names = ", ".join(user.name for user in users)
    sys.stdout.write(f"etcd has the users {names}, and rejects others\n")


if __name__ == "__main__":
    main()
