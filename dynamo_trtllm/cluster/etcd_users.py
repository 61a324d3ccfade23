"""Set up the users of a deployment in etcd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamo_trtllm.cluster.discovery import etcd_api as api
from dynamo_trtllm.cluster.discovery.etcd_connection import EtcdConnection
from dynamo_trtllm.cluster.discovery.etcd_store import prefix_end
from dynamo_trtllm.cluster.roles import ClusterUser
from dynamo_trtllm.protocol.errors import Unreachable

# Without this user and role of etcd, users can't be enabled.
ROOT: Final = "root"
_EXISTS: Final = "already exists"


async def set_up_users(
    connection: EtcdConnection, users: Sequence[ClusterUser], passwords: Mapping[str, str] = {}
) -> None:
    """Create users with their permissions, and let etcd reject all others from then on.

    Each user has a role of its name, with no other permissions than its own. The user root may call
    this again.

    Args:
        connection: a connection of the user root, or to an etcd without users.
        users: the users.
        passwords: their passwords by name, and that of root. A user without one needs a certificate
            with its name.

    Raises:
        Unreachable: etcd does not answer, or rejects the user of this process.
    """
    await _add_user(connection, ROOT, passwords.get(ROOT, ""))
    await connection.call("user_grant_role", api.AuthUserGrantRoleRequest(user=ROOT, role=ROOT))
    for user in users:
        await set_permissions(connection, user)
        await _add_user(connection, user.name, passwords.get(user.name, ""))
        grant = api.AuthUserGrantRoleRequest(user=user.name, role=user.name)
        await connection.call("user_grant_role", grant)
    await connection.call("auth_enable", api.AuthEnableRequest())


async def _add_user(connection: EtcdConnection, name: str, password: str) -> None:
    options = api.UserAddOptions(no_password=not password)
    adding = api.AuthUserAddRequest(name=name, password=password, options=options)
    is_new = await _create(connection, "user_add", adding)
    if not is_new and password:
        change = api.AuthUserChangePasswordRequest(name=name, password=password)
        await connection.call("user_change_password", change)


async def set_permissions(connection: EtcdConnection, user: ClusterUser) -> None:
    """Create the role of a user, or give the existing one the user's permissions alone.

    Raises:
        Unreachable: etcd does not answer, or rejects the user of this process.
    """
    await _create(connection, "role_add", api.AuthRoleAddRequest(name=user.name))
    types = api.Permission.DESCRIPTOR.enum_types_by_name["Type"].values_by_name
    wanted = {prefix.encode(): types["READ"].number for prefix in user.etcd.read}
    wanted |= {prefix.encode(): types["READWRITE"].number for prefix in user.etcd.read_write}
    reply = await connection.call("role_get", api.AuthRoleGetRequest(role=user.name))
    for former in reply.perm:
        if former.key not in wanted or former.range_end != prefix_end(former.key.decode()):
            revocation = api.AuthRoleRevokePermissionRequest(
                role=user.name, key=former.key, range_end=former.range_end
            )
            await connection.call("role_revoke_permission", revocation)
    for prefix, kind in wanted.items():
        permission = api.Permission(
            permType=kind, key=prefix, range_end=prefix_end(prefix.decode())
        )
        grant = api.AuthRoleGrantPermissionRequest(name=user.name, perm=permission)
        await connection.call("role_grant_permission", grant)


async def _create(connection: EtcdConnection, call: str, request: Any) -> bool:
    """Create a user or role. Return False if it exists."""
    try:
        await connection.call(call, request)
    except Unreachable as exc:
        if _EXISTS not in exc.message:
            raise
        return False
    return True
