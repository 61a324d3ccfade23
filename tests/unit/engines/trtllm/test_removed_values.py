"""A value that newer releases lack is refused with what took its place."""

from __future__ import annotations

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.protocol.errors import ConfigError


def check(release: str, backend: str) -> None:
    values = {"moe_config": {"backend": backend}}
    trtllm_args(WorkerConfig(model_path="m", override_engine_args=values), release_for(release), [])


@pytest.mark.parametrize("version", ["1.3.0rc24", "1.3.0rc27", "1.3.0rc29", "1.4.0rc1", "1.4.0rc4"])
def test_args_wideep_is_rejected_from_1_3_with_successors(version: str) -> None:
    check("1.2.1", "WIDEEP")
    with pytest.raises(
        ConfigError, match=r"backend is 'WIDEEP': expected .*1\.3 removed it.*DEEPGEMM"
    ) as caught:
        check(version, "WIDEEP")
    assert caught.value.field == "moe_config.backend"


def test_args_other_wrong_value_names_no_successor() -> None:
    with pytest.raises(ConfigError) as caught:
        check("1.3.0rc29", "TRITTON")
    assert "removed" not in caught.value.message
