"""The compiled definitions of etcd's API are those of etcd.proto."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from scripts import etcd_api


def test_compiled_etcd_api_when_compiled_again_then_as_committed() -> None:
    pytest.importorskip("grpc_tools", reason="scripts/setup --dev installs grpcio-tools")
    committed = FileDescriptorSet.FromString(etcd_api.COMPILED.read_bytes())
    assert FileDescriptorSet.FromString(etcd_api.compiled()) == committed, (
        "run python -m scripts.etcd_api"
    )
