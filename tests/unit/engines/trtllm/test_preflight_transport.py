"""The notes about how UCX and NIXL find their way: silent where the fault they warn of can't be."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm.preflight.checks import check_role
from dynamo_trtllm.protocol.messages import Role
from tests.unit.engines.trtllm.preflight_pairs import facts

NIXL = {"cache_transceiver_config.backend": "NIXL"}


def found(
    changes: dict[str, Any] | None = None, role: Role = Role.PREFILL, **known: Any
) -> dict[str, str]:
    """Return the values of the findings about the environment, by rule."""
    rules = ("nvlink-domains", "infiniband-loopback", "roce-local-subnet", "foreign-nixl")
    return {
        finding.rule: finding.value
        for finding in check_role(facts(role, changes, **known))
        if finding.rule in rules
    }


def test_transport_notes_without_such_a_path_are_silent() -> None:
    assert found(environment={}, on="h200") == {}
    assert found(environment={}, gpu=None) == {}
    assert found(environment={}, role=Role.AGGREGATED) == {}
    assert found(environment={"UCX_CUDA_IPC_ENABLE_MNNVL": "n"}) == {}
    assert found(environment={"UCX_TLS": "^ib"}, on="b200") == {}
    assert found(environment={"UCX_IB_ROCE_LOCAL_SUBNET": "n", "UCX_TLS": "^ib"}, on="b200") == {}


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"LD_LIBRARY_PATH": "/usr/local/ucx/lib:/usr/lib"}, "/usr/local/ucx/lib"),
        (
            {"NIXL_PLUGIN_DIR": "/opt/nixl/plugins", "LD_LIBRARY_PATH": "/usr/local/ucx/lib"},
            "/opt/nixl/plugins",
        ),
        ({"LD_LIBRARY_PATH": "/venv/tensorrt_llm/libs/nixl:/usr/lib"}, None),
        ({"LD_LIBRARY_PATH": ""}, None),
    ],
)
def test_foreign_nixl_build_names_the_path(environment: dict[str, str], path: str | None) -> None:
    expected = {} if path is None else {"foreign-nixl": path}
    assert found(NIXL, on="h200", environment=environment) == expected
    assert found(on="h200", environment=environment) == {}  # with UCX, TensorRT-LLM loads no NIXL
