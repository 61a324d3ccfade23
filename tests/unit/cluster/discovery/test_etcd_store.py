"""Which endpoint texts are taken, and how keys are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_trtllm.cluster.discovery.etcd_connection import channel_credentials, parse_endpoints
from dynamo_trtllm.cluster.discovery.etcd_store import (
    key_bytes,
    key_text,
)
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.cases import each_case


@each_case(
    ("text", "addresses"),
    [
        ("127.0.0.1:2379", ("127.0.0.1:2379",)),
        ("http://etcd-0.etcd:2379/", ("etcd-0.etcd:2379",)),
        ("localhost", ("localhost:2379",)),
        ("http://a:1, b:2", ("a:1", "b:2")),
        ("[::1]:2379", ("[::1]:2379",)),
        ("https://a:1,https://b", ("a:1", "b:2379")),
    ],
)
def test_endpoints_when_well_formed_then_host_and_port(
    text: str, addresses: tuple[str, ...]
) -> None:
    assert parse_endpoints(ConnectionConfig(etcd_endpoints=text).etcd_endpoints) == [*addresses]


def test_credentials_when_no_endpoint_is_https_then_none() -> None:
    assert channel_credentials(ConnectionConfig(etcd_endpoints="http://a:1,b:2")) is None


def test_credentials_when_all_endpoints_are_https_then_some() -> None:
    assert (
        channel_credentials(ConnectionConfig(etcd_endpoints="https://a:1, https://b:2")) is not None
    )


@pytest.mark.parametrize(
    ("endpoints", "files", "field"),
    [
        ("https://a:1,http://b:2", {}, "etcd_endpoints"),
        ("http://a:1", {"etcd_ca": Path("ca.crt")}, "etcd_endpoints"),
        ("https://a:1", {"etcd_cert": Path("client.crt")}, "etcd_cert"),
        ("https://a:1", {"etcd_ca": Path("/not/there/ca.crt")}, "etcd_ca"),
    ],
)
def test_credentials_that_do_not_agree_are_rejected(
    endpoints: str, files: dict[str, Path], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        channel_credentials(ConnectionConfig(etcd_endpoints=endpoints, **files))
    assert caught.value.field == field


@each_case(
    "key", [b"", b"v1/instances/a", "naïve".encode(), b"\xff/\xc3", b"\\xff", bytes(range(256))]
)
def test_key_when_read_and_written_then_the_same_bytes(key: bytes) -> None:
    assert key_bytes(key_text(key)) == key


def test_key_when_it_is_no_utf8_then_it_reads_as_no_other_key() -> None:
    assert key_text(b"v1/\xff") != key_text(rb"v1/\xff")
