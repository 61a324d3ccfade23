"""Which endpoint texts are taken."""

from __future__ import annotations

import pytest

from dynamo_trtllm.discovery.etcd_store import parse_endpoints
from dynamo_trtllm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:2379", ("127.0.0.1:2379",)),
        ("http://etcd-0.etcd:2379/", ("etcd-0.etcd:2379",)),
        ("localhost", ("localhost:2379",)),
        ("http://a:1, b:2,", ("a:1", "b:2")),
        ("[::1]:2379", ("[::1]:2379",)),
    ],
)
def test_endpoints_when_well_formed_then_host_and_port(text: str, addresses: tuple[str, ...]) -> None:
    assert parse_endpoints(text) == addresses


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "no etcd endpoint"), ("https://a:1", "TLS"), ("http://me:secret@a:1", "user names"), ("a:b:c", "HOST:PORT")],
)
def test_endpoints_when_not_supported_then_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        parse_endpoints(text)
    assert "secret" not in caught.value.message
