"""Define the calls and messages of etcd's gRPC API that discovery uses.

`etcd.proto` defines them. `python -m scripts.etcd_api` compiles it to `etcd.binpb`, from which this
module makes the classes. Python code that protoc generates would need a protobuf at least as new as
that of the generator, while each release of TensorRT-LLM and vLLM requires its own version. It
would also share one table of names with any other client of etcd in the process.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import grpc.aio
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

COMPILED = "etcd.binpb"
_PACKAGE = "etcdserverpb"


def _load_definitions() -> DescriptorPool:
    compiled = resources.files(__package__).joinpath(COMPILED).read_bytes()
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(compiled).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_DEFINITIONS = _load_definitions()


def _message(name: str) -> Any:
    return GetMessageClass(_DEFINITIONS.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


RangeRequest = _message("RangeRequest")
PutRequest = _message("PutRequest")
DeleteRangeRequest = _message("DeleteRangeRequest")
Compare = _message("Compare")
RequestOp = _message("RequestOp")
TxnRequest = _message("TxnRequest")
LeaseGrantRequest = _message("LeaseGrantRequest")
LeaseRevokeRequest = _message("LeaseRevokeRequest")
LeaseKeepAliveRequest = _message("LeaseKeepAliveRequest")
LeaseTimeToLiveRequest = _message("LeaseTimeToLiveRequest")
WatchRequest = _message("WatchRequest")
WatchCreateRequest = _message("WatchCreateRequest")
AuthEnableRequest = _message("AuthEnableRequest")
AuthStatusRequest = _message("AuthStatusRequest")
AuthenticateRequest = _message("AuthenticateRequest")
AuthUserAddRequest = _message("AuthUserAddRequest")
UserAddOptions = _message("UserAddOptions")
AuthUserChangePasswordRequest = _message("AuthUserChangePasswordRequest")
AuthUserGrantRoleRequest = _message("AuthUserGrantRoleRequest")
AuthRoleAddRequest = _message("AuthRoleAddRequest")
AuthRoleGetRequest = _message("AuthRoleGetRequest")
AuthRoleGrantPermissionRequest = _message("AuthRoleGrantPermissionRequest")
AuthRoleRevokePermissionRequest = _message("AuthRoleRevokePermissionRequest")
Permission = _message("Permission")
DELETE = _message("Event").DELETE


class EtcdCalls:
    """The calls of etcd over one channel.

    Each takes its request message, `timeout` in seconds, and `metadata` with the token of a user; a
    stream takes its requests by `write`.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.range = _call(channel, "KV", "Range")
        self.put = _call(channel, "KV", "Put")
        self.delete_range = _call(channel, "KV", "DeleteRange")
        self.txn = _call(channel, "KV", "Txn")
        self.lease_grant = _call(channel, "Lease", "LeaseGrant")
        self.lease_revoke = _call(channel, "Lease", "LeaseRevoke")
        self.lease_keep_alive = _call(channel, "Lease", "LeaseKeepAlive")  # a stream
        self.lease_time_to_live = _call(channel, "Lease", "LeaseTimeToLive")
        self.watch = _call(channel, "Watch", "Watch")  # a stream
        self.auth_enable = _call(channel, "Auth", "AuthEnable")
        self.auth_status = _call(channel, "Auth", "AuthStatus")
        self.authenticate = _call(channel, "Auth", "Authenticate")
        self.user_add = _call(channel, "Auth", "UserAdd")
        self.user_change_password = _call(channel, "Auth", "UserChangePassword")
        self.user_grant_role = _call(channel, "Auth", "UserGrantRole")
        self.role_add = _call(channel, "Auth", "RoleAdd")
        self.role_get = _call(channel, "Auth", "RoleGet")
        self.role_grant_permission = _call(channel, "Auth", "RoleGrantPermission")
        self.role_revoke_permission = _call(channel, "Auth", "RoleRevokePermission")


def _call(channel: grpc.aio.Channel, service: str, method: str) -> Any:
    definition = _DEFINITIONS.FindMethodByName(f"{_PACKAGE}.{service}.{method}")
    new_call = channel.stream_stream if definition.client_streaming else channel.unary_unary
    return new_call(
        f"/{_PACKAGE}.{service}/{method}",
        request_serializer=GetMessageClass(definition.input_type).SerializeToString,
        response_deserializer=GetMessageClass(definition.output_type).FromString,
    )
