"""`dynamo-trtllm planner`: the deployment for which it plans if no address is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_trtllm.cli import planner
from dynamo_trtllm.cli.launched_servers import with_launched_servers
from dynamo_trtllm.config.commands import SharesConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord, recorded
from dynamo_trtllm.planner import main as planner_module

LIMITS = ["--slo-ttft-ms", "2000", "--slo-itl-ms", "100"]
ETCD = "http://127.0.0.1:5001"


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchRecord]:
    """A deployment of which this process is the launcher."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    record = LaunchRecord(
        pid=os.getpid(),
        namespace="here",
        etcd=ETCD,
        nats="nats://127.0.0.1:5002",
        etcd_credentials_file="/run/{role}.etcd",
        nats_credentials_file="/run/{role}.nats",
    )
    with recorded(record, pytest.fail):
        yield record


def planned(monkeypatch: pytest.MonkeyPatch, *words: str) -> PlannerConfig:
    """Return the settings with which the command runs a planner."""
    configs: list[PlannerConfig] = []
    monkeypatch.setattr(planner, "run_planner", configs.append)
    with pytest.raises(SystemExit) as ended:
        planner.main([*LIMITS, *words])
    assert ended.value.code == 0
    return configs[0]


def test_planner_without_an_address_uses_the_local_deployment(
    launched: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ([], ["--deployment-name", "here"]):
        config = planned(monkeypatch, *words)
        assert (config.namespace, config.etcd_endpoints) == ("here", ETCD)
        assert config.nats_server == launched.nats
        assert config.etcd_credentials_file == Path("/run/{role}.etcd")
        assert config.nats_credentials_file == Path("/run/{role}.nats")


def test_planner_with_an_address_uses_it(
    launched: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = planned(monkeypatch, "--nats-server", "nats://other:4222")
    assert (config.namespace, config.nats_server) == ("dynamo", "nats://other:4222")
    assert config.etcd_credentials_file is None


@pytest.mark.parametrize(("uses_nats", "namespace"), [(True, "dynamo"), (False, "here")])
def test_address_of_nats_counts_only_if_nats_is_used(
    launched: LaunchRecord, uses_nats: bool, namespace: str
) -> None:
    config = load(SharesConfig, prog="test", argv=[], environ={"NATS_SERVER": "nats://other:4222"})
    assert with_launched_servers(config, None, uses_nats=uses_nats).namespace == namespace


def test_planner_of_an_unknown_deployment_is_an_error(
    launched: LaunchRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        planner.main([*LIMITS, "--deployment-name", "other"])
    assert ended.value.code == 2
    assert "no deployment named 'other' runs on this machine" in capsys.readouterr().err


def test_planner_module_does_not_ignore_the_name_of_a_deployment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[PlannerConfig] = []
    monkeypatch.setattr(planner_module, "run_planner", configs.append)
    with pytest.raises(SystemExit) as ended:
        planner_module.main([*LIMITS, "--deployment-name", "here"])
    assert ended.value.code == 2
    assert "only `dynamo-trtllm planner` looks for a deployment" in capsys.readouterr().err
    # A launcher passes variables of its user on to the planner.
    monkeypatch.setenv("DYN_TRTLLM_DEPLOYMENT_NAME", "here")
    with pytest.raises(SystemExit) as ended:
        planner_module.main(LIMITS)
    assert ended.value.code == 0
    assert len(configs) == 1


def test_deployment_name_wins_over_addresses_of_variables(
    launched: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://other:2379")
    config = planned(monkeypatch, "--deployment-name", "here")
    assert (config.etcd_endpoints, config.nats_server) == (ETCD, launched.nats)
    # A flag wins over the environment in the other direction, too.
    monkeypatch.delenv("ETCD_ENDPOINTS")
    monkeypatch.setenv("DYN_TRTLLM_DEPLOYMENT_NAME", "here")
    config = planned(monkeypatch, "--nats-server", "nats://other:4222")
    assert config.nats_server == "nats://other:4222"


def test_flags_of_a_deployment_and_of_an_address_are_an_error(
    launched: LaunchRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        planner.main([*LIMITS, "--deployment-name", "here", "--namespace", "other"])
    assert ended.value.code == 2
    assert "give --deployment-name or --namespace, not both" in capsys.readouterr().err
