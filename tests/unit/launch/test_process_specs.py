from __future__ import annotations

import pytest

from dynamo_trtllm.config.commands import LaunchConfig
from dynamo_trtllm.config.deployment import DeploymentConfig
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.launch.process_specs import is_open_to_all, processes, with_settings
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role


def deployment(**changes):
    worker = {
        "name": "w",
        "disaggregation_mode": "decode",
        "flags": {"model_path": "/models/m", "engine": "mock"},
    }
    return DeploymentConfig.model_validate(
        {"namespace": "ns", "frontend": {"http_port": 0}, "workers": [worker | changes]}
    )


def typed(**settings):
    return LaunchConfig(deployment="d.yaml", **settings)


def test_processes_have_the_settings_of_the_deployment():
    frontend, worker = processes(deployment())
    assert frontend.port == 0
    read = load(FrontendConfig, prog="p", argv=frontend.arguments(81), environ=frontend.env)
    assert (read.http_port, read.namespace) == (81, "ns")
    config = load(WorkerConfig, prog="p", argv=worker.argv, environ=worker.env)
    assert (config.model_path, config.engine, config.disaggregation_mode) == (
        "/models/m",
        "mock",
        Role.DECODE,
    )
    assert config.namespace == "ns"


def test_processes_without_frontend_are_workers_only():
    only = deployment().model_copy(update={"frontend": None})
    assert [spec.name for spec in processes(only)] == ["w"]


def test_processes_with_count_two_divide_devices():
    _, first, second = processes(deployment(count=2, devices=[4, 5, 6, 7]))
    assert (first.name, second.name) == ("w-1", "w-2")
    assert (first.env["CUDA_VISIBLE_DEVICES"], second.env["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")


def test_processes_on_cpu_see_no_gpu_unless_set():
    assert processes(deployment())[1].env == {"CUDA_VISIBLE_DEVICES": ""}
    set_by_hand = deployment(env={"CUDA_VISIBLE_DEVICES": "3", "A": "b"})
    assert processes(set_by_hand)[1].env == {"CUDA_VISIBLE_DEVICES": "3", "A": "b"}


def test_processes_ignore_wrong_address_in_environment():
    assert (
        len(processes(deployment(), {"ETCD_ENDPOINTS": "a b", "DYN_TRTLLM_NATS_SERVER": "a b"}))
        == 2
    )


def test_processes_draining_long_are_killed_later():
    spec = processes(deployment(flags={"model_path": "m", "drain_timeout_s": 100}))[1]
    assert spec.stop_timeout_s > 100


def test_processes_without_system_port_get_a_local_one():
    _, worker = processes(deployment())
    assert (worker.host, worker.port) == ("127.0.0.1", 0)
    config = load(WorkerConfig, prog="p", argv=worker.arguments(23456), environ=worker.env)
    assert (config.system_host, config.system_port) == ("127.0.0.1", 23456)


@pytest.mark.parametrize(
    ("flags", "environ", "wanted"),
    [
        ({"system_port": 9090}, {}, ("127.0.0.1", 9090)),
        ({"system_port": 0, "system_host": "0.0.0.0"}, {}, ("0.0.0.0", 0)),
        ({"system_host": "10.0.0.1"}, {}, ("10.0.0.1", 0)),
        ({}, {"DYN_SYSTEM_PORT": "9091", "DYN_SYSTEM_HOST": "0.0.0.0"}, ("0.0.0.0", 9091)),
        ({"system_port": 9090}, {"DYN_SYSTEM_PORT": "9091"}, ("127.0.0.1", 9090)),
    ],
)
def test_processes_with_system_port_are_asked_there(flags, environ, wanted):
    flags = {"model_path": "m"} | flags
    _, inherits = processes(deployment(flags=flags), environ)
    _, has_its_own = processes(deployment(flags=flags, env=environ))
    for spec in (inherits, has_its_own):
        assert (spec.host, spec.port) == wanted
        chosen = load(WorkerConfig, prog="p", argv=spec.arguments(spec.port or 7), environ=environ)
        assert (chosen.system_host, chosen.system_port) == (wanted[0], wanted[1] or 7)


def test_processes_use_http_port_of_the_environment():
    of = deployment().model_copy(update={"frontend": {}})
    assert processes(of)[0].port == 8000
    assert processes(of, {"DYN_HTTP_PORT": "81"})[0].port == 81


@pytest.mark.parametrize(
    ("frontend", "environ", "address", "wanted"),
    [
        ({}, {}, {}, ("127.0.0.1", 8000)),
        ({"http_host": "0.0.0.0", "http_port": 9}, {}, {}, ("0.0.0.0", 9)),
        ({}, {"DYN_TRTLLM_HTTP_HOST": "::"}, {}, ("::", 8000)),
        ({"http_host": "0.0.0.0", "http_port": 9}, {}, {"port": 7}, ("0.0.0.0", 7)),
        ({"http_port": 9}, {"DYN_TRTLLM_HTTP_HOST": "::"}, {"host": "10.0.0.1"}, ("10.0.0.1", 9)),
    ],
)
def test_processes_without_address_keep_frontend_local(frontend, environ, address, wanted):
    of = with_settings(deployment().model_copy(update={"frontend": frontend}), typed(**address))
    environ = environ | {"DYN_TRTLLM_ALLOW_ANONYMOUS": "true"}
    spec = processes(of, environ)[0]
    assert (spec.host, spec.port) == wanted
    read = load(FrontendConfig, prog="p", argv=spec.arguments(spec.port), environ=environ)
    assert (read.http_host, read.http_port) == wanted


def test_frontend_open_to_other_machines_needs_keys():
    of = deployment().model_copy(update={"frontend": {"http_host": "0.0.0.0"}})
    assert is_open_to_all(of, {})
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        processes(of)
    for name, value in (("API_KEY", "k" * 16), ("ALLOW_ANONYMOUS", "true")):
        environ = {f"DYN_TRTLLM_{name}": value}
        assert not is_open_to_all(of, environ)
        assert processes(of, environ)[0].host == "0.0.0.0"
    assert not is_open_to_all(deployment(), {})


def test_with_settings_without_frontend_is_rejected():
    with pytest.raises(ConfigError, match="need a frontend"):
        with_settings(deployment().model_copy(update={"frontend": None}), typed(port=7))


def test_processes_with_wrong_environment_are_rejected():
    with pytest.raises(ConfigError, match="w: unknown environment variable DYN_TRTLLM_SYSTEM_PROT"):
        processes(deployment(env={"DYN_TRTLLM_SYSTEM_PROT": "1"}))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"count": 2, "flags": {"model_path": "m", "system_port": 9090}}, "w-1 and w-2"),
        ({"flags": {"model_path": "m", "system_port": 8000}}, "frontend and w"),
    ],
)
def test_processes_with_the_same_port_are_named(changes, names):
    of = deployment(**changes).model_copy(update={"frontend": {}})
    with pytest.raises(ConfigError, match=f"{names} have the same port"):
        processes(of)


def test_processes_may_share_a_port_of_other_addresses():
    flags = {"model_path": "m", "system_port": 8000}
    of = deployment(flags=flags).model_copy(update={"frontend": {"http_host": "10.0.0.1"}})
    environ = {"DYN_TRTLLM_ALLOW_ANONYMOUS": "true"}
    assert [spec.port for spec in processes(of, environ)] == [8000, 8000]


def test_processes_may_log_only_warnings():
    assert "--log-level=warning" in processes(
        deployment(flags={"model_path": "m", "log_level": "warning"})
    )[1].arguments(7)


def test_with_settings_model_applies_to_every_worker():
    other = with_settings(
        deployment(flags={"model_path": "m", "served_model_name": "old"}), typed(model="smollm2")
    )
    assert processes(other)[1].model == "smollm2"
    assert "--served-model-name" not in " ".join(processes(other)[1].argv)


def test_with_settings_engine_drops_old_arguments():
    flags = {
        "model_path": "m",
        "engine": "mock",
        "extra_engine_args": "mock.yaml",
        "tensor_parallel_size": 4,
    }
    (changed,) = with_settings(deployment(flags=flags), typed(engine="torch")).workers
    assert changed.flags == {"model_path": "m", "engine": "torch"}
    (same,) = with_settings(deployment(flags=flags), typed(engine="mock")).workers
    assert "extra_engine_args" in same.flags


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"model_path": "/models/m"}, "m"),
        ({"model_path": "/models/m/"}, "m"),
        ({"model_path": "m", "served_model_name": "n"}, "n"),
    ],
)
def test_processes_with_flags_name_the_model_for_clients(flags, name):
    assert processes(deployment(flags=flags))[1].model == name


LIMITS = {"slo_ttft_ms": 2000, "slo_itl_ms": 100}


@pytest.mark.parametrize(
    ("role", "limits", "planner", "is_started"),
    [
        ("elastic", LIMITS, {}, True),
        ("elastic", LIMITS, {"planner": "off"}, False),
        ("elastic", LIMITS, {"planner": "OFF"}, False),
        ("elastic", LIMITS, {"planner": False}, False),
        ("elastic", {}, {}, False),
        ("elastic", {}, {"planner": LIMITS}, True),
        ("decode", LIMITS, {}, False),
    ],
)
def test_elastic_workers_with_limits_get_a_planner(role, limits, planner, is_started):
    frontend = {"http_port": 0, **({"router_mode": "slo"} if limits else {}), **limits}
    made = DeploymentConfig.model_validate(
        {
            "namespace": "ns",
            "frontend": frontend,
            "workers": [
                {
                    "name": "w",
                    "disaggregation_mode": role,
                    "flags": {"model_path": "/models/m", "engine": "mock"},
                }
            ],
            **planner,
        }
    )
    specs = processes(made)
    assert [spec.name for spec in specs] == ["frontend", "w", *["planner"] * is_started]
    if is_started:
        read = load(PlannerConfig, prog="p", argv=specs[-1].arguments(0), environ=specs[-1].env)
        assert (read.slo_ttft_ms, read.slo_itl_ms, read.namespace) == (2000, 100, "ns")


def test_limits_of_the_environment_start_a_planner():
    made = DeploymentConfig.model_validate(
        {
            "frontend": {"http_port": 0},
            "workers": [
                {
                    "name": "w",
                    "disaggregation_mode": "elastic",
                    "flags": {"model_path": "/models/m", "engine": "mock"},
                }
            ],
        }
    )
    environ = {
        "DYN_TRTLLM_ROUTER_MODE": "slo",
        "DYN_TRTLLM_SLO_TTFT_MS": "2000",
        "DYN_TRTLLM_SLO_ITL_MS": "100",
    }
    assert [spec.name for spec in processes(made, environ)] == ["frontend", "w", "planner"]


def test_planner_without_limits_is_rejected():
    made = DeploymentConfig.model_validate(
        {
            "workers": [{"name": "w", "disaggregation_mode": "elastic", "flags": {}}],
            "planner": {"slo_ttft_ms": 2000},
        }
    )
    with pytest.raises(ConfigError, match="slo-itl-ms"):
        processes(made.model_copy(update={"workers": []}))
