from pathlib import Path

import pytest

from dynamo_trtllm.config.deployment import load_deployment
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role

GOOD = """\
services: {etcd: start, nats: "nats://n:4222"}
frontend: {http-port: 8000}
workers:
  - name: prefill
    disaggregation_mode: prefill
    flags: {model: /m, engine: mock, --max-num-tokens: 100}
  - name: decode
    disaggregation_mode: decode
    devices: [0, 1]
    count: 2
    flags: {model_path: /m}
    env: {OMP_NUM_THREADS: "1"}
restart: {max_restarts: 1}
"""


@pytest.fixture
def deployment_file(tmp_path):
    def write(text):
        path = tmp_path / "d.yaml"
        path.write_text(text)
        return path

    return write


def test_load_deployment_names_flags_by_field(deployment_file):
    deployment = load_deployment(deployment_file(GOOD))
    assert deployment.services.etcd == "start"
    assert deployment.frontend == {"http_port": 8000}
    prefill, decode = deployment.workers
    assert prefill.flags == {"model_path": "/m", "engine": "mock", "max_num_tokens": 100}
    assert (prefill.disaggregation_mode, prefill.count, prefill.devices) == (Role.PREFILL, 1, "cpu")
    assert (decode.devices, decode.count, decode.env) == ([0, 1], 2, {"OMP_NUM_THREADS": "1"})
    assert (deployment.restart.max_restarts, deployment.restart.window_s) == (1, 60.0)


def test_load_deployment_with_workers_only_has_defaults(deployment_file):
    deployment = load_deployment(
        deployment_file(
            "workers: [{name: w, disaggregation_mode: prefill_and_decode, flags: {model: m}}]"
        )
    )
    assert (deployment.services.etcd, deployment.services.nats) == ("start", "start")
    assert deployment.frontend == {}
    assert (deployment.restart.max_restarts, deployment.restart.decode_workers) == (3, True)


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("services:", "servces:", "unknown key 'servces'; did you mean 'services'?"),
        ("etcd: start", "etdc: start", "services: unknown key 'etdc'; did you mean 'etcd'?"),
        (
            "--max-num-tokens",
            "max-num-token",
            "workers[0].flags: unknown key 'max_num_token'; did you mean",
        ),
        ("100}", "abc}", "workers[0].flags.max_num_tokens is 'abc'"),
        ("engine: mock", "engine: sglang", "workers[0].flags.engine: there is no engine 'sglang'"),
        ("name: decode", "name: prefill", "two workers are named 'prefill'"),
        (
            "name: prefill",
            "name: decode-2",
            "and one of workers 'decode-2' are both named 'decode-2'",
        ),
        *(
            ("name: prefill", f"name: {name}", f"are both named '{name}'")
            for name in ("frontend", "planner", "etcd", "nats", "launch")
        ),
        ("name: decode", "name: De code", "workers[1].name: expected lower-case letters"),
        ("count: 2", "count: 3", "workers[1]: 2 devices can't be divided equally among 3 workers"),
        (
            "count: 2",
            "count: 2000",
            "workers[1].count is 2000: should be less than or equal to 1024",
        ),
        ("count: 2", "cuont: 2", "workers[1]: unknown key 'cuont'; did you mean 'count'?"),
        ("{model_path: /m}", "{engine: mock}", "workers[1].flags.model_path is missing"),
        ("{model_path: /m}", "{model_path: /m, model: /n}", "model_path is given twice"),
        (
            "{model_path: /m}",
            "{model: /m, nats-server: x}",
            "nats-server: set services.nats instead",
        ),
        ("http-port: 8000", "http-port: 99999", "frontend.http_port is 99999"),
        (
            "frontend:",
            "planner: {deployment-name: other}\nfrontend:",
            "planner: deployment-name: set namespace instead",
        ),
        ("http-port", "htp-port", "frontend: unknown key 'htp_port'; did you mean 'http_port'?"),
        ("nats://n:4222", "a b", "services.nats: expected an address like"),
        ("[0, 1]", "gpu", "workers[1].devices: expected cpu or a list of GPU numbers"),
        ("[0, 1]", "[0, a]", "workers[1].devices[1] is 'a'"),
        ("{max_restarts: 1}", "{max_restarts: -1}", "restart.max_restarts is -1"),
        ("{max_restarts: 1}", "{decode_workers: 2}", "restart.decode_workers is 2"),
        (
            "{max_restarts: 1}",
            "{decode_worker: 1}",
            "unknown key 'decode_worker'; did you mean 'decode_workers'?",
        ),
        (
            "disaggregation_mode: decode",
            "disaggregation_mode: d",
            "workers[1].disaggregation_mode is 'd'",
        ),
        ('"1"}', "1}", "workers[1].env.OMP_NUM_THREADS is 1: should be a valid string"),
    ],
)
def test_load_deployment_names_the_path_of_a_problem(deployment_file, old, new, wanted):
    assert old in GOOD
    path = deployment_file(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_deployment(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert wanted in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "workers: []", "workers: 3", "workers: [3]", "services: 1\nworkers: []"]
)
def test_load_deployment_without_worker_is_rejected(deployment_file, text):
    with pytest.raises(ConfigError, match=r"workers|services"):
        load_deployment(deployment_file(text))


def test_load_deployment_replaces_variables(deployment_file):
    path = deployment_file("""\
frontend: {http-port: "${PORT:-8000}"}
workers:
  - name: w
    disaggregation_mode: decode
    devices: ${GPUS:-0,1,2,3}
    count: ${COUNT:-2}
    flags: {model: "${MODEL:-/model}"}
""")
    plain = load_deployment(path)
    assert plain.frontend == {"http_port": "8000"}
    assert (plain.workers[0].devices, plain.workers[0].count) == ([0, 1, 2, 3], 2)
    assert plain.workers[0].flags == {"model_path": "/model"}
    given = load_deployment(path, {"PORT": "81", "GPUS": "cpu", "COUNT": "1", "MODEL": "tiny"})
    assert given.frontend == {"http_port": "81"}
    assert (given.workers[0].devices, given.workers[0].flags) == ("cpu", {"model_path": "tiny"})
    with pytest.raises(ConfigError, match=r"frontend\.http_port is 'x'"):
        load_deployment(path, {"PORT": "x"})
    with pytest.raises(
        ConfigError, match=r"workers\[0\]\.devices: expected cpu or a list of GPU numbers, got 'a'"
    ):
        load_deployment(path, {"GPUS": "a"})


@pytest.mark.parametrize("name", ["demo", "demo.yaml"])
def test_load_deployment_names_the_shipped_file_of_a_name(name):
    with pytest.raises(ConfigError, match=r"there is no file demo.* deploy/local/demo\.yaml\?"):
        load_deployment(Path(name))
