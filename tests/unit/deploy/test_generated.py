"""What `dynamo-trtllm serve --dry-run` writes for Kubernetes and compose, beside what
test_recipes.py and test_recipe_schemas.py check of all recipes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_trtllm import __version__
from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.engines.gpu import GpuMemory
from dynamo_trtllm.launch import serve
from dynamo_trtllm.launch.topology import MachineFacts
from dynamo_trtllm.protocol.messages import Role
from tests.kit.cases import each_case
from tests.unit.deploy.recipes import (
    GENERATED,
    MODEL_CONFIG,
    ROOT,
    all_generated,
    frontend_config,
    frontends,
    generated,
    gpus,
    name_of,
    of_kind,
    planners,
    worker_config,
    workers,
)

DOCS = all_generated()
COMPOSE = ("serve without GPU", "serve another image", "serve elastic workers")
KUBERNETES = ("--dry-run", "--format", "kubernetes")


def test_workers_have_the_roles_and_gpus_that_serve_chose() -> None:
    def chosen(name: str) -> list[tuple[Role, int, int]]:
        deployments = {name_of(doc): doc for doc in of_kind(DOCS[name], "Deployment")}
        return [
            (
                worker_config(pod).disaggregation_mode,
                deployments[pod.owner]["spec"]["replicas"],
                gpus(pod),
            )
            for pod in workers(DOCS[name])
        ]

    assert chosen("serve on GPUs") == [(Role.PREFILL, 1, 1), (Role.DECODE, 1, 1)]
    assert chosen("serve on two GPUs each") == [(Role.PREFILL, 1, 2), (Role.DECODE, 3, 2)]
    assert chosen("serve aggregated") == [(Role.AGGREGATED, 2, 1)]
    assert chosen("serve without GPU") == [(Role.PREFILL, 1, 0), (Role.DECODE, 1, 0)]


def test_workers_read_the_model_from_the_claim() -> None:
    (pod, _) = workers(DOCS["serve on GPUs"])
    config = worker_config(pod)
    assert (config.engine, config.model_path) == ("vllm", "/opt/models/folder")
    assert config.served_model_name == "folder"
    (claim,) = of_kind(DOCS["serve on GPUs"], "PersistentVolumeClaim")
    assert name_of(claim) == "folder-model"
    (pod, _) = workers(DOCS["serve without GPU"])
    assert worker_config(pod).model_path == "tiny-gpt-oss"
    assert "models" not in {volume["name"] for volume in pod.spec["volumes"]}


def test_images_are_those_of_deploy_container_or_given() -> None:
    def images(name: str) -> set[str]:
        return {pod.container["image"] for pod in workers(DOCS[name])}

    assert images("serve on GPUs") == {f"dynamo-trtllm/vllm:{__version__}"}
    assert images("serve without GPU") == {f"dynamo-trtllm/frontend:{__version__}"}
    assert images("serve another image") == {"mine:1.2.3"}


def test_engine_file_is_in_a_config_map() -> None:
    (config_map,) = of_kind(DOCS["serve aggregated"], "ConfigMap")
    assert config_map["data"] == {"engine.yaml": "max_num_seqs: 7\n"}
    (pod,) = workers(DOCS["serve aggregated"])
    assert str(worker_config(pod).extra_engine_args) == "/etc/engine/engine.yaml"
    assert pod.annotations["dynamo-trtllm/engine-config-sha256"]


def test_api_keys_are_in_a_secret_and_open_the_policy() -> None:
    (pod,) = frontends(DOCS["serve on GPUs"])
    config = frontend_config(pod)
    assert str(config.api_keys_file) == "/etc/api-keys/keys.jsonl"
    assert not config.allow_anonymous
    policies = {name_of(doc): doc for doc in of_kind(DOCS["serve on GPUs"], "NetworkPolicy")}
    assert policies["folder-frontend"]["spec"]["ingress"] == [{"ports": [{"port": "http"}]}]
    text = generated("serve on GPUs")
    assert "create secret generic dynamo-api-keys --from-file=keys.jsonl=/" in text
    (pod,) = frontends(DOCS["serve aggregated"])
    assert frontend_config(pod).allow_anonymous


def test_port_is_that_of_the_service() -> None:
    (service,) = of_kind(DOCS["serve without GPU"], "Service")
    assert service["spec"]["ports"][0]["port"] == 8001


@pytest.mark.parametrize("name", GENERATED)
def test_head_says_that_no_cluster_has_run_it(name: str) -> None:
    head = generated(name).partition("\napiVersion")[0]
    assert "No cluster has run this file." in head
    assert all(line.startswith("#") for line in head.splitlines())


def compose(name: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(generated(name, "compose"))
    return made


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_services_are_closed_and_supervised(name: str) -> None:
    services = compose(name)["services"]
    is_elastic = name == "serve elastic workers"
    of_elastic = {"elastic-1", "elastic-2", "elastic-3", "planner"}
    others = of_elastic if is_elastic else {"prefill", "decode"}
    assert services.keys() == {"frontend", *others}
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"].startswith("${DYNAMO_USER:?")
        assert service["healthcheck"]["test"][0] == "CMD"
        assert set(service["depends_on"]) == {"etcd", "nats"}
    assert services["frontend"]["ports"][0].startswith("${BIND_ADDRESS:-127.0.0.1}:")
    assert not any("ports" in services[service] for service in others)


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_commands_are_accepted_and_files_mounted(name: str) -> None:
    for service_name, service in compose(name)["services"].items():
        models = {"frontend": FrontendConfig, "planner": PlannerConfig}
        config = load(
            models.get(service_name, WorkerConfig),
            prog="p",
            argv=[str(word) for word in service["command"]][3:],
            environ={key: str(value) for key, value in service["environment"].items()},
        )
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        for file in (config.etcd_ca, config.etcd_cert, config.etcd_key, config.nats_key):
            assert str(config.file_of_role(file)) in mounted
        if isinstance(config, WorkerConfig):
            assert str(config.kv_transfer_key_file) in mounted


def test_compose_file_of_the_mock_engine_is_what_serve_writes() -> None:
    shipped = (ROOT / "deploy" / "compose" / "mock.yml").read_text(encoding="utf-8")
    written = generated("serve without GPU", "compose").replace(":8001:8000", ":8000:8000")
    assert shipped.partition("\n")[2] == written.partition("\n")[2]


def compose_on_gpus(
    words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any]]:
    """Return what `serve` writes for compose on a machine with GPUs, as text and parsed."""
    memory = 80 << 30
    machine = MachineFacts(
        gpus=[
            GpuMemory(number=number, name="GPU", total_bytes=memory, free_bytes=memory)
            for number in range(8)
        ],
        no_gpu_reason="",
        cpus=8,
        memory_bytes=memory,
        engines=frozenset({"vllm"}),
    )
    monkeypatch.setattr(serve, "machine_facts", lambda _: machine)
    monkeypatch.chdir(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        serve.main(["model", "--engine", "vllm", *words, "--dry-run", "--format", "compose"])
    text = written.getvalue()
    return text, yaml.safe_load(text)


def test_compose_head_when_two_workers_then_makes_both_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, made = compose_on_gpus(("--decode", "2"), tmp_path, monkeypatch)
    (command,) = [line for line in text.splitlines() if "mkdir -p" in line]
    folders = {
        volume.partition(":")[0]
        for service in made["services"].values()
        for volume in service["volumes"]
        if volume.endswith(":/home/dynamo")
    }
    assert len(folders) == 3
    for folder in folders:
        assert f"deploy/{folder.removeprefix('./')} " in command


def test_compose_paths_when_dollar_sign_then_name_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys$x.jsonl").touch()
    (tmp_path / "engine$x.yaml").write_text("max_num_seqs: 7")
    words = ("--api-keys-file", "keys$x.jsonl", "--extra-engine-args", "engine$x.yaml")
    _, made = compose_on_gpus(words, tmp_path, monkeypatch)
    frontend = made["services"]["frontend"]["volumes"]
    worker = made["services"]["decode"]["volumes"]
    assert f"{tmp_path}/keys$$x.jsonl:/etc/api-keys/keys.jsonl:ro" in frontend
    assert f"{tmp_path}/engine$$x.yaml:/etc/engine/engine.yaml:ro" in worker


def mock_deployment(output: str, *words: str) -> list[dict[str, Any]]:
    """Return the documents that `serve` writes for the mock engine with these flags."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        serve.main(["tiny-gpt-oss", "--engine", "mock", *words, "--dry-run", "--format", output])
    return list(yaml.safe_load_all(written.getvalue()))


@each_case("namespace", ["prod-1", "123", "true", "Null", "#x", "a:b", "it's", "-", "$(X)${X}"])
def test_namespace_is_the_text_that_was_given(namespace: str) -> None:
    words = (
        *("--namespace", namespace, "--elastic", "3"),
        *("--router-mode", "slo", "--slo-ttft-ms", "2000", "--slo-itl-ms", "100"),
    )
    docs = mock_deployment("kubernetes", *words)
    for pod in (*workers(docs), *frontends(docs), *planners(docs)):
        variables = {variable["name"]: variable.get("value") for variable in pod.container["env"]}
        # Kubernetes replaces $(X), and reads $$(X) as $(X).
        assert variables["DYN_NAMESPACE"] == namespace.replace("$(", "$$(")
    (made,) = mock_deployment("compose", *words)
    for name in ("frontend", "elastic-1", "planner"):
        # Compose replaces ${X}, and reads $$ as $.
        shown = made["services"][name]["environment"]["DYN_NAMESPACE"]
        assert shown == namespace.replace("$", "$$")


class _Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()


def test_health_checks_of_compose_use_no_proxy() -> None:
    # Docker may give every container the proxy of its configuration.
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    (made,) = mock_deployment("compose")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for service in made["services"].values():
            *_, code = service["healthcheck"]["test"]
            code = re.sub(r":\d+/", f":{server.server_port}/", code)
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=os.environ | proxy, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr
        server.shutdown()


@each_case("model", ["true", "No", "null", "123", "gpt-oss"])
def test_labels_are_texts(model: str) -> None:
    for doc in mock_deployment("kubernetes", "--served-model-name", model):
        labels = doc["metadata"].get("labels", {})
        assert [value for value in labels.values() if not isinstance(value, str)] == []
        assert isinstance(name_of(doc), str)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--format", "compose"), "--format compose needs --dry-run"),
        (("--dry-run", "--worker-image", "x"), "need --format kubernetes or compose"),
        ((*KUBERNETES, "--host", "0.0.0.0"), "--host can't be used"),
        (
            (*KUBERNETES, "--api-key", "k" * 16),
            "--api-key can't be used with --format kubernetes: pass --api-keys-file",
        ),
        (
            (*KUBERNETES, "--tls-cert-file", "c", "--tls-key-file", "k"),
            "--tls-cert-file can't be used with --format kubernetes: it names a file",
        ),
        (
            ("--dry-run", "--format", "compose", "--gpu-memory-gib", "24"),
            "--gpu-memory-gib needs --format kubernetes",
        ),
        (
            (*KUBERNETES, "--engine", "torch"),
            "makes no image with the engine torch; pass yours with --worker-image",
        ),
    ],
)
def test_settings_that_do_not_fit_are_errors(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = () if "--engine" in words else ("--engine", "mock")
    with pytest.raises(SystemExit, match=r"^2$"):
        serve.main(["tiny-gpt-oss", *engine, *words])
    assert says in capsys.readouterr().err
