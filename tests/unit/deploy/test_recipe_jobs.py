"""What scales, loads and downloads: names of metrics, loads of the perf Jobs, what model-download
fetches.
"""

from __future__ import annotations

import fnmatch
import re
import urllib.parse
from typing import Any

import pytest

from benchmarks.profile.main import parser
from benchmarks.profile.shapes import find_shape
from dynamo_trtllm.observability.metrics import PREFIX, TABLE
from tests.unit.deploy.kustomize import Doc, documents, render
from tests.unit.deploy.recipes import (
    MODEL,
    TARGETS,
    Pod,
    deployed,
    frontend_config,
    frontends,
    gpus,
    name_of,
    of_kind,
    pods,
    words,
    workers,
)

BY_PROCESS = {
    process: {PREFIX + row.name for row in TABLE if row.process == process}
    for process in ("frontend", "worker", "planner")
}
DISAGG = "gpt-oss-disagg"
ELASTIC = "gpt-oss-vllm-elastic"


def _process(scaled: Doc) -> str:
    return (
        "frontend" if scaled["spec"]["scaleTargetRef"]["name"].endswith("-frontend") else "worker"
    )


def test_autoscalers_use_existing_pod_metrics() -> None:
    found = of_kind(render(MODEL / "overlays/disagg-production"), "HorizontalPodAutoscaler")
    assert {name_of(doc) for doc in found} == {
        f"{DISAGG}-{role}" for role in ("prefill", "decode", "frontend")
    }
    for doc in found:
        for metric in doc["spec"]["metrics"]:
            if metric["type"] == "Pods":
                assert metric["pods"]["metric"]["name"] in BY_PROCESS[_process(doc)]


def test_scaled_objects_query_existing_metrics() -> None:
    docs = render(MODEL / "overlays/disagg-keda")
    found = of_kind(docs, "ScaledObject")
    assert {name_of(doc) for doc in found} == {
        f"{DISAGG}-{role}" for role in ("prefill", "decode", "frontend")
    }
    (monitor,) = of_kind(docs, "PodMonitor")
    given = {
        row["targetLabel"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for row in endpoint["relabelings"]
    }
    roles = {pod.labels["app.kubernetes.io/component"] for pod in pods(docs)}
    for doc in found:
        query = doc["spec"]["triggers"][0]["metadata"]["query"]
        assert set(re.findall(rf"{PREFIX}\w+", query)) <= BY_PROCESS[_process(doc)]
        pairs = re.findall(r'(\w+)="([^"]+)"', query)
        assert {label for label, _ in pairs} <= given
        assert {value for label, value in pairs if label == "graph"} == {DISAGG}
        assert {value for label, value in pairs if label == "role"} <= roles
        assert doc["spec"]["minReplicaCount"] >= 1


def test_elastic_workers_are_scaled_as_the_planner_wants() -> None:
    """Where the planner gives no number, the number of workers stays."""
    (scaled,) = of_kind(render(MODEL / "overlays/elastic-keda"), "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    (by_hpa,) = of_kind(render(MODEL / "overlays/elastic-hpa"), "HorizontalPodAutoscaler")
    (metric,) = by_hpa["spec"]["metrics"]
    name = metric["external"]["metric"]["name"]
    assert name in BY_PROCESS["planner"]
    assert re.findall(rf"{PREFIX}\w+", query) == [name]
    assert f'graph="{ELASTIC}"' in query
    assert metric["external"]["metric"]["selector"] == {"matchLabels": {"graph": ELASTIC}}
    # One worker for each that is wanted.
    assert trigger["metadata"]["threshold"] == "1"
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert by_hpa["spec"]["minReplicas"] == scaled["spec"]["minReplicaCount"] == 2


def test_pod_monitor_uses_existing_ports() -> None:
    docs = render(MODEL / "overlays/disagg-keda")
    (monitor,) = of_kind(docs, "PodMonitor")
    ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert ports == {port["name"] for pod in pods(docs) for port in pod.container["ports"]}


def _perf(target: str) -> tuple[Pod, Any]:
    (pod,) = pods(documents(MODEL / target / "perf.yaml"))
    assert pod.args[:3] == ["python", "-m", "dynamo_trtllm.bench.profile"]
    return pod, parser().parse_args(words(pod))


@pytest.mark.parametrize(
    ("target", "load"),
    [  # tokens in, tokens out, at once, requests
        ("trtllm/agg", (128, 1000, 3600, 36000)),
        ("trtllm/disagg", (8192, 1024, 1536, 15360)),
        ("trtllm/disagg-8gpu", (32000, 256, 256, 6144)),
    ],
)
def test_perf_job_sends_the_guides_load(target: str, load: tuple[int, int, int, int]) -> None:
    pod, args = _perf(target)
    shape = find_shape(args.shape)
    assert (shape.isl, shape.osl, shape.concurrency, shape.requests_at(*shape.concurrency)) == (
        *load[:2],
        (load[2],),
        load[3],
    )
    docs = deployed(target)
    assert args.gpus == sum(gpus(worker) for worker in workers(docs))
    (service,) = of_kind(docs, "Service")
    assert args.url == f"http://{name_of(service)}:{service['spec']['ports'][0]['port']}"
    assert args.model == "openai/gpt-oss-120b"
    assert args.concurrency is None
    assert not any("LIMIT" in variable["name"] for variable in pod.container["env"])
    (script,) = [word for word in pod.spec["initContainers"][0]["args"] if "urlopen" in word]
    compile(script, "wait", "exec")
    asked = re.search(r'url = "(.+)"', script)
    assert asked is not None
    assert urllib.parse.urlsplit(asked[1]).path == f"/v1/models/{args.model}/ready"
    assert asked[1].startswith(args.url)


@pytest.mark.parametrize("target", ["trtllm/agg", "trtllm/disagg", "trtllm/disagg-8gpu"])
def test_frontends_accept_all_streams_of_the_load(target: str) -> None:
    """Even if the Service gives them all to one frontend."""
    _, args = _perf(target)
    (streams,) = find_shape(args.shape).concurrency
    for pod in frontends(deployed(target)):
        config = frontend_config(pod)
        assert min(config.max_connections, config.max_inflight + config.max_queued) >= streams


FILES = {  # of openai/gpt-oss-120b: whether a worker needs them
    "model-00000-of-00014.safetensors": True,
    "model-00014-of-00014.safetensors": True,
    "model.safetensors.index.json": True,
    "config.json": True,
    "generation_config.json": True,
    "tokenizer.json": True,
    "tokenizer_config.json": True,
    "special_tokens_map.json": True,
    "chat_template.jinja": True,
    "LICENSE": True,
    "README.md": False,
    "USAGE_POLICY": False,
    "original/config.json": False,
    "original/dtypes.json": False,
    "original/model--00001-of-00007.safetensors": False,
    "metal/model.bin": False,
}


def _download() -> Pod:
    (pod,) = pods(documents(MODEL / "model-cache/model-download.yaml"))
    assert pod.args[:3] == ["hf", "download", "openai/gpt-oss-120b"]
    return pod


def _values(pod: Pod, flag: str) -> list[str]:
    return [word.partition("=")[2] for word in pod.args if word.startswith(f"--{flag}=")]


def test_download_has_safetensors_and_tokenizer_files() -> None:
    pod = _download()
    include = _values(pod, "include")
    exclude = _values(pod, "exclude")
    chosen = {
        name: any(fnmatch.fnmatch(name, pattern) for pattern in include)
        and not any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
        for name in FILES
    }
    assert chosen == FILES


def test_download_pins_a_commit_that_workers_load() -> None:
    pod = _download()
    (revision,) = _values(pod, "revision")
    (folder,) = _values(pod, "local-dir")
    assert re.fullmatch(r"[0-9a-f]{40}", revision)
    for target in TARGETS:
        for worker in workers(deployed(target)):
            assert f"--model-path={folder}" in worker.args
            assert any(
                mount["mountPath"] == "/opt/models" for mount in worker.container["volumeMounts"]
            )
    (token,) = [variable for variable in pod.container["env"] if variable["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf-token-secret", "key": "HF_TOKEN"}


def test_claim_holds_the_weights_for_many_nodes() -> None:
    (claim,) = documents(MODEL / "model-cache/model-cache.yaml")
    size = claim["spec"]["resources"]["requests"]["storage"]
    assert int(size.removesuffix("Gi")) >= 65 + 10
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
