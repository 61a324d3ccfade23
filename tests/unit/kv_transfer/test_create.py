from __future__ import annotations

import logging
import sys

import pytest

from dynamo_trtllm.kv_transfer.create import create_backend
from dynamo_trtllm.protocol.errors import ConfigError
from tests.kit.nixl_import import import_nixl


@pytest.fixture(scope="module", autouse=True)
def with_nixl() -> None:
    import_nixl()


@pytest.mark.parametrize(("choice", "name"), [("tcp", "tcp"), ("nixl", "nixl/ucx")])
def test_select_when_named_then_that_backend(choice: str, name: str) -> None:
    assert create_backend(choice).name == name


def test_select_when_unnamed_then_nixl_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dynamo_trtllm")
    assert create_backend(None).name == "nixl/ucx"
    assert [record.getMessage() for record in caplog.records] == ["KV transfer backend: nixl/ucx"]


def test_select_without_nixl_uses_tcp_unless_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("nixl", "nixl._api", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    caplog.set_level(logging.INFO, "dynamo_trtllm")
    assert create_backend(None).name == "tcp"
    assert len(caplog.records) == 1
    assert "pip install -e '.[nixl]'" in caplog.text
    with pytest.raises(ConfigError, match="pip install"):
        create_backend("nixl")
