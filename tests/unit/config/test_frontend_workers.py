"""How many processes a frontend has, where they keep responses, and how they select workers."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.protocol.errors import ConfigError


def config(*words: str) -> FrontendConfig:
    return load(FrontendConfig, prog="frontend", argv=words, environ={})


@pytest.mark.parametrize(
    ("words", "is_shared"),
    [
        ((), False),
        (("--workers", "2"), True),
        (("--response-store", "memory"), False),
        (("--response-store", "jetstream"), True),
        (("--workers", "2", "--response-store", "jetstream"), True),
    ],
)
def test_response_store_is_found_by_all_workers(words: tuple[str, ...], is_shared: bool) -> None:
    assert config(*words).shares_responses is is_shared


def test_workers_with_responses_in_memory_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--response-store memory .* --workers 2"):
        config("--workers", "2", "--response-store", "memory")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"workers": 2}, "--workers 2 starts several processes"),
        ({"response_store": "jetstream"}, "--response-store jetstream is in a NATS server"),
    ],
)
def test_cluster_in_process_rejects_settings_that_need_servers(
    settings: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        FrontendConfig(etcd_endpoints="memory://", nats_server="inproc://", **settings)


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_workers_when_it_is_no_number_of_processes_then_refused(count: str) -> None:
    with pytest.raises(ConfigError, match="--workers"):
        config("--workers", count)


@pytest.mark.parametrize(
    "words",
    [
        ("--no-kv-events",),
        ("--router-ttl-secs", "9"),
        ("--router-kv-overlap-score-credit", "0.5"),
        ("--router-temperature", "0.5"),
    ],
)
def test_router_flags_without_their_mode_are_rejected(words: tuple[str, ...]) -> None:
    flag = words[0].replace("--no-kv", "--router-kv")
    with pytest.raises(ConfigError, match=f"{flag} has an effect only with --router-mode kv"):
        config("--router-mode", "least-loaded", *words)
    config("--router-mode", "kv", *words)


LIMITS = ("--slo-ttft-ms", "2000", "--slo-itl-ms", "100")


def test_slo_mode_needs_both_limits() -> None:
    assert config("--router-mode", "slo", *LIMITS).slo_policy == "best-effort"
    for words in ((), LIMITS[:2], LIMITS[2:]):
        with pytest.raises(ConfigError, match="--router-mode slo needs both limits"):
            config("--router-mode", "slo", *words)


@pytest.mark.parametrize(
    "words", [("--slo-ttft-ms", "9"), ("--slo-itl-ms", "9"), ("--slo-policy", "reject")]
)
def test_slo_flags_without_slo_mode_are_rejected(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]} has an effect only with --router-mode slo"):
        config("--router-mode", "kv", *words)


@pytest.mark.parametrize("flag", ["--slo-ttft-ms", "--slo-itl-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "3600001", "fast"])
def test_slo_limit_that_is_no_time_is_rejected(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        config("--router-mode", "slo", *LIMITS, flag, value)
