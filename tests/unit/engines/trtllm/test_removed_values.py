"""A value that newer releases lack is refused with what took its place."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.errors import ConfigError

RELEASES = {release.name: release for release in LIBRARY.releases}


def check(release: str, backend: str) -> None:
    values = {"moe_config": {"backend": backend}}
    trtllm_args(WorkerConfig(model_path="m", override_engine_args=values), RELEASES[release], [])


def test_args_when_experts_are_wideep_then_refused_from_1_3_on_with_its_successors() -> None:
    check("1.2.1", "WIDEEP")
    with pytest.raises(ConfigError, match=r"backend is 'WIDEEP': expected .*1\.3 removed it.*DEEPGEMM") as caught:
        check("1.3.0rc", "WIDEEP")
    assert caught.value.field == "moe_config.backend"


def test_args_when_another_value_is_wrong_then_no_successor_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check("1.3.0rc", "TRITTON")
    assert "removed" not in caught.value.message
