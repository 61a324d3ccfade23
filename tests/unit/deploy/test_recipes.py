"""The recipes against our own code (command lines, probes, drains, engine files), and their objects
against another.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_trtllm import __version__
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.frontend.http.openapi import document
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.worker.health import Health, health_app
from dynamo_trtllm.worker.show_arguments import describe_arguments
from tests.kit.cases import each_case
from tests.unit.deploy.kustomize import Doc, documents
from tests.unit.deploy.recipes import (
    GENERATED,
    MODEL,
    RECIPES,
    ROOT,
    TARGETS,
    Pod,
    all_generated,
    deployed,
    environment,
    everything,
    frontend_config,
    frontends,
    gpus,
    matches,
    name_of,
    of_kind,
    planner_config,
    planners,
    pods,
    worker_config,
    workers,
)

SETS = everything()
WHOLE = [name for name in SETS if workers(SETS[name])]  # those with a deployment in them
# with those that `serve` writes
ALL = SETS | all_generated()
ALL_WHOLE = [*WHOLE, *GENERATED]
EVERY_POD = [
    pytest.param(pod, id=f"{name}:{pod.owner}:{i}")
    for name in ALL
    for i, pod in enumerate(pods(ALL[name]))
]
EVERY_WORKER = [
    pytest.param(pod, id=f"{target}:{pod.owner}")
    for target in TARGETS
    for pod in workers(deployed(target))
]
# by deploy/make_secrets
MADE = {
    *(f"{name}-tls" for name in ("etcd-server", "nats-server", "etcd-root")),
    *(f"{name}-tls" for name in ("frontend", "worker", "planner")),
    "nats-routes",
    "dynamo-platform",
    "kv-transfer-key",
}
BY_HAND = {"hf-token-secret", "mpi-ssh", "dynamo-api-keys"}


def test_names_are_those_of_the_kubernetes_guide() -> None:
    def names(path: str, kind: str) -> list[str]:
        return [name_of(doc) for doc in of_kind(documents(MODEL / path), kind)]

    assert names("model-cache/model-cache.yaml", "PersistentVolumeClaim") == ["model-cache"]
    assert names("model-cache/model-download.yaml", "Job") == ["model-download"]
    assert names("trtllm/agg/deploy.yaml", "Service") == ["gpt-oss-agg-frontend"]
    assert names("trtllm/disagg/deploy.yaml", "Service") == ["gpt-oss-disagg-frontend"]
    assert names("trtllm/agg/perf.yaml", "Job") == ["gpt-oss-120b-bench"]
    assert names("trtllm/disagg/perf.yaml", "Job") == ["gpt-oss-120b-disagg-bench"]
    # `kubectl apply -f model-cache/` takes every file in the folder
    assert {path.name for path in (MODEL / "model-cache").iterdir()} == {
        "model-cache.yaml",
        "model-download.yaml",
    }


@pytest.mark.parametrize(("target", "name"), TARGETS.items())
def test_pods_with_the_guides_label_are_complete(target: str, name: str) -> None:
    docs = deployed(target)
    assert all(pod.labels["nvidia.com/dynamo-graph-deployment-name"] == name for pod in pods(docs))
    assert all(name_of(doc).startswith(f"{name}-") for doc in docs)


def test_rendered_parts_when_checked_then_current() -> None:
    done = subprocess.run(
        [sys.executable, RECIPES / "render", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_config_map_equals_the_engine_files(target: str) -> None:
    (config_map,) = of_kind(deployed(target), "ConfigMap")
    source = re.search(r"^# BEGIN (\S+)", (MODEL / target / "deploy.yaml").read_text(), re.M)
    assert source is not None
    used = {
        pod.args[i].rpartition("/")[2]
        for pod in workers(deployed(target))
        for i in _engine_file_words(pod)
    }
    assert set(config_map["data"]) == used
    for name, content in config_map["data"].items():
        assert content.encode() == (ROOT / source[1] / name).read_bytes()


def _engine_file_words(pod: Pod) -> list[int]:
    return [i for i, word in enumerate(pod.args) if word.startswith("--extra-engine-args=")]


@each_case("name", WHOLE)
def test_worker_lines_match_role_model_and_gpus_of_the_pod(name: str) -> None:
    roles = {
        "prefill": Role.PREFILL,
        "decode": Role.DECODE,
        "worker": Role.AGGREGATED,
        "elastic": Role.ELASTIC,
    }
    for pod in workers(SETS[name]):
        config = worker_config(pod)
        assert config.disaggregation_mode is roles[pod.labels["app.kubernetes.io/component"]]
        assert config.served_model_name == "openai/gpt-oss-120b"
        assert (config.dyn_reasoning_parser, config.dyn_tool_call_parser) == ("gpt_oss", "harmony")
        assert config.namespace == pod.labels["nvidia.com/dynamo-graph-deployment-name"]
        assert config.system_port == 9090


EXPECTED = {  # TP, EP, batch, tokens a step, KV fraction, MoE kernels, graph batch
    ("gpt-oss-agg", "worker"): (4, 4, 800, None, 0.9, "TRTLLM", 800),
    ("gpt-oss-disagg", "prefill"): (1, 1, 64, 20000, 0.8, "TRTLLM", 30),
    ("gpt-oss-disagg", "decode"): (4, 1, 1280, 20000, 0.85, "TRTLLM", 1280),
    ("gpt-oss-disagg-8gpu", "prefill"): (4, 4, 32, 20000, 0.9, "CUTLASS", 32),
    ("gpt-oss-disagg-8gpu", "decode"): (4, 4, 128, 16384, 0.9, "CUTLASS", 128),
}


@pytest.mark.parametrize("release", LIBRARY.releases, ids=lambda r: r.name)
@pytest.mark.parametrize(
    "pod", [worker for worker in EVERY_WORKER if not worker.id.startswith("vllm")]
)
def test_worker_line_merged_with_file_matches_the_guide(
    pod: Pod, release: Any, tmp_path: Any
) -> None:
    name, role = (
        pod.labels[key]
        for key in ("nvidia.com/dynamo-graph-deployment-name", "app.kubernetes.io/component")
    )
    (target,) = [target for target, kind in TARGETS.items() if kind == name]
    (config_map,) = of_kind(deployed(target), "ConfigMap")
    for file, content in config_map["data"].items():
        (tmp_path / file).write_text(content)
    config = worker_config(pod)
    assert config.extra_engine_args is not None
    assert config.extra_engine_args.parent.as_posix() == "/etc/engine"
    here = config.model_copy(update={"extra_engine_args": tmp_path / config.extra_engine_args.name})
    args = trtllm_args(here.with_sources(config._sources), release, [])
    keys = ("tensor_parallel_size", "moe_expert_parallel_size", "max_batch_size", "max_num_tokens")
    nested = (
        "kv_cache_config.free_gpu_memory_fraction",
        "moe_config.backend",
        "cuda_graph_config.max_batch_size",
    )
    found = tuple(args.get(key) for key in (*keys, *nested))
    assert [
        (f, w) for f, w in zip(found, EXPECTED[name, role], strict=True) if w is not None and f != w
    ] == []
    assert gpus(pod) == args.get("tensor_parallel_size")


@pytest.mark.parametrize("pod", [worker for worker in EVERY_WORKER if worker.id.startswith("vllm")])
def test_vllm_line_merged_with_file_has_four_gpus(pod: Pod, tmp_path: Path) -> None:
    name = pod.labels["nvidia.com/dynamo-graph-deployment-name"]
    (target,) = [target for target, deployment in TARGETS.items() if deployment == name]
    (config_map,) = of_kind(deployed(target), "ConfigMap")
    config = worker_config(pod)
    assert config.extra_engine_args is not None
    name = config.extra_engine_args.name
    (tmp_path / name).write_text(config_map["data"][name])
    here = config.model_copy(update={"extra_engine_args": tmp_path / name})
    found = {
        key: leaf.value
        for key, leaf in describe_arguments(here.with_sources(config._sources)).given.items()
    }
    from_file = yaml.safe_load(config_map["data"][name])
    assert {key: found[key] for key in from_file} == from_file | {"tensor_parallel_size": gpus(pod)}


@pytest.mark.parametrize("pod", [worker for worker in EVERY_WORKER if worker.id.startswith("vllm")])
def test_vllm_pod_keeps_compiled_code_at_restart(pod: Pod) -> None:
    image = (ROOT / "deploy/container/Containerfile.vllm").read_text()
    (home,) = re.findall(r"\bHOME=(\S+)", image)
    (mount,) = [
        one_mount
        for one_mount in pod.container["volumeMounts"]
        if one_mount["mountPath"] == f"{home}/.cache"
    ]
    (volume,) = [
        one_volume for one_volume in pod.spec["volumes"] if one_volume["name"] == mount["name"]
    ]
    assert "medium" not in volume["emptyDir"]  # on disk, and as old as the pod
    assert worker_config(pod).compile_cache == Path(mount["mountPath"])


def test_quantization_override_is_on_disaggregated_only() -> None:
    for target in TARGETS:
        for pod in workers(deployed(target)):
            override = environment(pod).get("OVERRIDE_QUANT_ALGO")
            assert override == ("W4A8_MXFP4_MXFP8" if target == "trtllm/disagg" else None)
            if target.startswith("trtllm"):
                assert environment(pod)["TRTLLM_ENABLE_PDL"] == "1"
                assert environment(pod)["TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL"] == "True"


@each_case("name", ALL_WHOLE)
def test_probes_use_existing_paths_and_ports(name: str) -> None:
    worker_paths = {route.path for route in health_app(Health(), bytes).routes}  # type: ignore[attr-defined]
    for pod in workers(ALL[name]):
        _check_probes(pod, worker_paths, worker_config(pod).system_port)
    for pod in frontends(ALL[name]):
        _check_probes(pod, frontend_paths(), frontend_config(pod).http_port)
        assert "/v1/models/{id}/ready" in frontend_paths()  # asked by the perf Jobs
    for pod in planners(ALL[name]):
        _check_probes(pod, worker_paths, planner_config(pod).system_port)


@functools.cache
def frontend_paths() -> set[str]:
    return set(document()["paths"])


@each_case("name", [name for name in WHOLE if not of_kind(SETS[name], "Ingress")])
def test_frontends_without_keys_are_closed_to_other_namespaces(name: str) -> None:
    for pod in frontends(SETS[name]):
        config = frontend_config(pod)
        assert config.is_exposed
        assert config.allow_anonymous
    policies = of_kind(SETS[name], "NetworkPolicy")
    (policy,) = [doc for doc in policies if name_of(doc).endswith("-frontend")]
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    for rule in policy["spec"]["ingress"]:
        assert rule["from"] == [
            {"podSelector": {}},
            {"namespaceSelector": {}, "podSelector": prometheus},
        ]


def _check_probes(pod: Pod, paths: set[str], port: int | None) -> None:
    ports = {one_port["name"]: one_port["containerPort"] for one_port in pod.container["ports"]}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = pod.container[kind]["httpGet"]
        assert get["path"] in paths
        assert ports[get["port"]] == port
    assert pod.container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert pod.annotations["prometheus.io/port"] == str(port)
    assert "/metrics" in paths


@each_case("name", ALL_WHOLE)
def test_elastic_workers_alone_have_a_planner(name: str) -> None:
    modes = {worker_config(pod).disaggregation_mode for pod in workers(ALL[name])}
    found = planners(ALL[name])
    assert len(found) == (Role.ELASTIC in modes)
    for pod in found:
        planner = planner_config(pod)
        # Otherwise no probe and no scraper reaches it.
        assert planner.system_host == "0.0.0.0"
        (deployment,) = [
            doc for doc in of_kind(ALL[name], "Deployment") if name_of(doc) == pod.owner
        ]
        assert deployment["spec"]["replicas"] == 1
        for frontend in map(frontend_config, frontends(ALL[name])):
            assert frontend.router_mode == "slo"
            assert frontend.namespace == planner.namespace
            assert frontend.slo_ttft_ms == planner.slo_ttft_ms
            assert frontend.slo_itl_ms == planner.slo_itl_ms


@each_case("name", ALL_WHOLE)
def test_startup_allows_half_an_hour_to_load(name: str) -> None:
    for pod in workers(ALL[name]):
        probe = pod.container["startupProbe"]
        assert probe["httpGet"]["path"] == "/ready"  # 503 while it loads
        assert 30 * 60 <= probe["periodSeconds"] * probe["failureThreshold"] <= 45 * 60
        for doc in of_kind(ALL[name], "Deployment"):
            if name_of(doc) == pod.owner:
                assert (
                    doc["spec"]["progressDeadlineSeconds"]
                    > probe["periodSeconds"] * probe["failureThreshold"]
                )


@each_case("name", ALL_WHOLE)
def test_grace_when_a_pod_is_stopped_then_its_drain_fits(name: str) -> None:
    for pod in workers(ALL[name]):
        config = worker_config(pod)
        assert pod.spec["terminationGracePeriodSeconds"] >= config.drain_timeout_s + 30
        # KV of the last prompt can still be fetched
        assert config.drain_timeout_s >= config.kv_transfer_ttl_s
    for pod in frontends(ALL[name]):
        slept = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
        # 30 s: what a frontend gives its answers
        assert pod.spec["terminationGracePeriodSeconds"] >= slept + 30 + 10


def test_frontends_differ_in_names_and_number_only() -> None:
    def plain(target: str, name: str) -> list[Doc]:
        parts = [doc for doc in deployed(target) if name_of(doc) == f"{name}-frontend"]
        text = yaml.safe_dump(parts).replace(name, "NAME")
        return list(yaml.safe_load(re.sub(r"replicas: \d+", "replicas: 0", text)))

    # Those of elastic workers have the limits of the planner, too.
    all_of_them = [
        plain(target, name) for target, name in TARGETS.items() if not planners(deployed(target))
    ]
    assert len(all_of_them[0]) == 4  # Service, Deployment, disruption budget, network policy
    assert all(doc == all_of_them[0] for doc in all_of_them)


def test_images_when_listed_then_ours_in_this_version_or_pinned() -> None:
    for docs in SETS.values():
        for pod in pods(docs):
            for container in pod.spec["containers"] + pod.spec.get("initContainers", []):
                image, _, tag = container["image"].partition(":")
                ours = re.fullmatch(r"(registry\.example\.com/)?dynamo-trtllm/(\w+)", image)
                if ours is None:
                    assert re.fullmatch(r"v?\d+\.\d+\.\d+(-\w+)?", tag)
                else:
                    assert tag == __version__
                    file = "frontend" if ours[2] == "bench" else ours[2]
                    assert (ROOT / "deploy" / "container" / f"Containerfile.{file}").is_file()


@each_case("pod", EVERY_POD)
def test_pod_writes_only_into_its_volumes(pod: Pod) -> None:
    """tests/e2e/test_read_only.py has what our processes write."""
    assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod.spec["containers"] + pod.spec.get("initContainers", []):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {mount["mountPath"] for mount in pod.container["volumeMounts"]}
    if "dynamo_trtllm.frontend" in pod.args:
        assert {"/home/dynamo", "/tmp"} <= mounted
    if gpus(pod):
        assert {"/home/dynamo", "/tmp", "/dev/shm"} <= mounted


@each_case("pod", EVERY_POD)
def test_pod_when_read_then_not_root_bounded_and_without_a_token(pod: Pod) -> None:
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["enableServiceLinks"] is False  # else etcd reads ETCD_PORT as a flag of its own
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["securityContext"]["runAsUser"] > 0
    for container in pod.spec["containers"] + pod.spec.get("initContainers", []):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]


@each_case("pod", EVERY_POD)
def test_variables_when_put_into_others_then_defined_before_them(pod: Pod) -> None:
    """Kubernetes leaves $(NAME) as it is when NAME comes later in the list."""
    known: list[str] = []
    for variable in pod.container.get("env", []):
        assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= set(known)
        known.append(variable["name"])
    assert set(re.findall(r"\$\((\w+)\)", " ".join(pod.args))) <= set(known)


@each_case("name", ALL)
def test_references_when_followed_then_they_are_there(name: str) -> None:
    docs = ALL[name]
    config_maps = {name_of(doc) for doc in of_kind(docs, "ConfigMap")}
    for pod in pods(docs):
        mounted = {
            mount["name"] for c in pod.spec["containers"] for mount in c.get("volumeMounts", [])
        }
        assert mounted >= {volume["name"] for volume in pod.spec.get("volumes", [])}
        for node in _nodes(pod.spec):
            if "secretKeyRef" in node or "secretRef" in node:
                assert (node.get("secretKeyRef") or node["secretRef"])["name"] in MADE | BY_HAND
            if isinstance(node.get("secret"), dict):
                assert node["secret"]["secretName"] in MADE | BY_HAND
            if isinstance(node.get("configMap"), dict):
                assert node["configMap"]["name"] in config_maps
            if "claimName" in node:
                claims = {name_of(doc) for doc in of_kind(docs, "PersistentVolumeClaim")}
                assert node["claimName"] in claims | {"model-cache"}


def _nodes(node: Any) -> list[Doc]:
    if isinstance(node, dict):
        return [node] + [below for value in node.values() for below in _nodes(value)]
    return [below for value in node for below in _nodes(value)] if isinstance(node, list) else []


@each_case("name", ALL)
def test_selectors_when_applied_then_they_meet_pods_and_ports(name: str) -> None:
    docs = ALL[name]
    there = list(pods(docs))
    for doc in of_kind(docs, "Deployment", "StatefulSet"):
        assert matches(doc["spec"]["selector"], doc["spec"]["template"]["metadata"]["labels"])
    for doc in of_kind(docs, "Service"):
        hit = [pod for pod in there if matches(doc["spec"]["selector"], pod.labels)]
        assert {pod.owner for pod in hit} == {name_of(doc).removesuffix("-headless")}
        ports = {port["name"] for pod in hit for port in pod.container["ports"]}
        assert {port["targetPort"] for port in doc["spec"]["ports"]} <= ports
    for doc in of_kind(docs, "PodDisruptionBudget"):
        hit = [pod for pod in there if matches(doc["spec"]["selector"], pod.labels)]
        assert {pod.owner for pod in hit} == {name_of(doc)}
    for doc in of_kind(docs, "HorizontalPodAutoscaler", "ScaledObject"):
        target = doc["spec"]["scaleTargetRef"]
        (scaled,) = [d for d in of_kind(docs, target["kind"]) if name_of(d) == target["name"]]
        assert "replicas" not in scaled["spec"]  # else an apply would set it back


@pytest.mark.parametrize("name", [name for name in ALL if of_kind(ALL[name], "Ingress")])
def test_ingress_leads_to_a_service_that_needs_keys(name: str) -> None:
    ports = {
        (name_of(doc), port["name"])
        for doc in of_kind(ALL[name], "Service")
        for port in doc["spec"]["ports"]
    }
    for ingress in of_kind(ALL[name], "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                assert (service["name"], service["port"]["name"]) in ports
    assert all("DYN_TRTLLM_API_KEYS_FILE" in environment(pod) for pod in frontends(ALL[name]))


@each_case("name", ALL)
def test_only_objects_with_gpus_are_named_after_them(name: str) -> None:
    for pod in pods(ALL[name]):
        labels = [label for label in pod.labels if "gpu" in label]
        assert not labels or gpus(pod), pod.owner


@each_case("name", ALL_WHOLE)
def test_every_role_has_a_budget_and_a_policy(name: str) -> None:
    docs = ALL[name]
    budgets = {name_of(doc) for doc in of_kind(docs, "PodDisruptionBudget")}
    for pod in [*workers(docs), *frontends(docs)]:
        assert pod.owner in budgets
        assert any(
            matches(doc["spec"]["podSelector"], pod.labels)
            for doc in of_kind(docs, "NetworkPolicy")
        )


@each_case("name", WHOLE)
def test_gpu_pods_are_placed_on_suitable_nodes(name: str) -> None:
    for pod in pods(SETS[name]):
        affinity = pod.spec.get("affinity", {}).get("nodeAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
            "nodeSelectorTerms", [{}]
        )
        wanted = {
            expression["key"]: expression["values"]
            for expression in terms[0].get("matchExpressions", [])
        }
        if not gpus(pod):
            assert not wanted
            continue
        assert wanted["nvidia.com/gpu.present"] == ["true"]
        assert "blackwell" in wanted["nvidia.com/gpu.family"]
        assert ("kubernetes.io/arch" in wanted) == pod.owner.startswith("gpt-oss-agg")
        assert pod.container["resources"]["requests"]["nvidia.com/gpu"] == str(gpus(pod))
