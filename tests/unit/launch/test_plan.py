from __future__ import annotations

import pytest

from dynamo_trtllm.config.deployment import DeploymentConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.launch.plan import Addresses, model_names, processes, reachable, with_engine, with_model
from dynamo_trtllm.messages import Role

ADDRESSES = Addresses(etcd="127.0.0.1:1", nats="nats://127.0.0.1:2")


def deployment(**changes):
    worker = {"name": "w", "disaggregation_mode": "decode", "flags": {"model_path": "/models/m", "engine": "mock"}}
    return DeploymentConfig.model_validate(
        {"namespace": "ns", "frontend": {"http_port": 0}, "workers": [worker | changes]}
    )


def test_processes_when_read_back_by_their_programs_then_settings_are_the_deployment_s():
    frontend, worker = processes(deployment(), ADDRESSES)
    read = load(FrontendConfig, prog="p", description="", argv=frontend.argv, environ=frontend.env).config
    assert (read.http_port, read.namespace, read.etcd_endpoints, read.nats_server) == (
        0,
        "ns",
        "127.0.0.1:1",
        "nats://127.0.0.1:2",
    )
    config = load(WorkerConfig, prog="p", description="", argv=worker.argv, environ=worker.env).config
    assert (config.model_path, config.engine, config.disaggregation_mode) == ("/models/m", "mock", Role.DECODE)
    assert (config.namespace, config.etcd_endpoints, config.nats_server) == ("ns", "127.0.0.1:1", "nats://127.0.0.1:2")


def test_processes_when_frontend_is_null_then_only_workers_are_started():
    only = deployment().model_copy(update={"frontend": None})
    assert [spec.name for spec in processes(only, ADDRESSES)] == ["w"]


def test_processes_when_count_is_two_then_devices_are_dealt_out_and_names_numbered():
    _, first, second = processes(deployment(count=2, devices=[4, 5, 6, 7]), ADDRESSES)
    assert (first.name, second.name) == ("w-1", "w-2")
    assert (first.env["CUDA_VISIBLE_DEVICES"], second.env["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")


def test_processes_when_worker_is_on_the_cpu_then_it_sees_no_gpu_unless_its_env_says_so():
    env = {"DYN_TRTLLM_NATS_SERVER": ADDRESSES.nats}
    assert processes(deployment(), ADDRESSES)[1].env == env | {"CUDA_VISIBLE_DEVICES": ""}
    set_by_hand = deployment(env={"CUDA_VISIBLE_DEVICES": "3", "A": "b"})
    assert processes(set_by_hand, ADDRESSES)[1].env == env | {"CUDA_VISIBLE_DEVICES": "3", "A": "b"}


def test_processes_when_nats_asks_for_a_password_then_no_command_line_shows_it():
    secret = Addresses(etcd="127.0.0.1:1", nats="nats://dynamo:secret@127.0.0.1:2")
    for spec in processes(deployment(), secret):
        assert "secret" not in " ".join(spec.argv)
        assert spec.env["DYN_TRTLLM_NATS_SERVER"] == secret.nats


def test_processes_when_worker_drains_long_then_it_is_killed_only_later():
    spec = processes(deployment(flags={"model_path": "m", "drain_timeout_s": 100}), ADDRESSES)[1]
    assert spec.stop_timeout_s > 100


def test_processes_when_a_worker_would_not_log_readiness_then_it_is_refused():
    with pytest.raises(ConfigError, match="w: log_level is 'warning'"):
        processes(deployment(flags={"model_path": "m", "log_level": "warning"}), ADDRESSES)


def test_with_model_when_given_then_every_worker_serves_it_under_its_own_name():
    other = with_model(deployment(flags={"model_path": "m", "served_model_name": "old"}), "smollm2")
    assert model_names(other) == ["smollm2"]
    assert "--served-model-name" not in " ".join(processes(other, ADDRESSES)[1].argv)


def test_with_engine_when_it_is_another_then_arguments_of_the_old_one_go():
    flags = {"model_path": "m", "engine": "mock", "extra_engine_args": "mock.yaml", "tensor_parallel_size": 4}
    (changed,) = with_engine(deployment(flags=flags), "torch").workers
    assert changed.flags == {"model_path": "m", "engine": "torch"}
    (same,) = with_engine(deployment(flags=flags), "mock").workers
    assert "extra_engine_args" in same.flags


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"model_path": "/models/m"}, "m"),
        ({"model_path": "/models/m/"}, "m"),
        ({"model_path": "m", "served_model_name": "n"}, "n"),
    ],
)
def test_model_names_when_worker_has_flags_then_name_is_what_clients_send(flags, name):
    assert model_names(deployment(flags=flags)) == [name]


@pytest.mark.parametrize(
    ("listening", "wanted"),
    [("0.0.0.0:80", "localhost:80"), (":::80", "localhost:80"), ("10.0.0.1:80", "10.0.0.1:80")],
)
def test_reachable_when_server_listens_then_address_is_one_to_connect_to(listening, wanted):
    assert reachable(listening) == wanted
