"""The recipes as tests look at them: every set of objects that is applied together, and the pods in
it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.launch import serve
from dynamo_trtllm.launch.topology import MachineFacts
from tests.unit.deploy.kustomize import Doc, documents, read_documents, render

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "recipes"
MODEL = RECIPES / "gpt-oss-120b"

TARGETS = {  # folder: the name that all its objects begin with
    "trtllm/agg": "gpt-oss-agg",
    "trtllm/disagg": "gpt-oss-disagg",
    "trtllm/disagg-8gpu": "gpt-oss-disagg-8gpu",
    "vllm/disagg": "gpt-oss-vllm-disagg",
    "vllm/elastic": "gpt-oss-vllm-elastic",
}
KUSTOMIZATIONS = sorted(
    path.parent.relative_to(RECIPES).as_posix()
    for path in RECIPES.rglob("kustomization.yaml")
    if "components" not in path.parts
)


def deployed(target: str) -> list[Doc]:
    return documents(MODEL / target / "deploy.yaml")


def of_kind(docs: list[Doc], *kinds: str) -> list[Doc]:
    return [doc for doc in docs if doc["kind"] in kinds]


def name_of(doc: Doc) -> str:
    return str(doc["metadata"]["name"])


class Pod(NamedTuple):
    """A pod template: the name of its owner, its labels, annotations and spec."""

    owner: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: Doc

    @property
    def container(self) -> Doc:
        (one,) = self.spec["containers"]
        return dict(one)

    @property
    def args(self) -> list[str]:
        return [str(word) for word in self.container.get("args", [])]


def pods(docs: list[Doc]) -> Iterator[Pod]:
    for doc in docs:
        if doc["kind"] == "LeaderWorkerSet":
            both = doc["spec"]["leaderWorkerTemplate"]
            templates = [both["leaderTemplate"], both["workerTemplate"]]
        else:
            template = doc["spec"].get("template") if isinstance(doc.get("spec"), dict) else None
            templates = [template] if template else []
        for pod_template in templates:
            metadata = pod_template["metadata"]
            yield Pod(
                name_of(doc),
                metadata["labels"],
                metadata.get("annotations", {}),
                pod_template["spec"],
            )


def workers(docs: list[Doc]) -> list[Pod]:
    return [pod for pod in pods(docs) if "dynamo_trtllm" in pod.args]


def frontends(docs: list[Doc]) -> list[Pod]:
    return [pod for pod in pods(docs) if "dynamo_trtllm.frontend" in pod.args]


def planners(docs: list[Doc]) -> list[Pod]:
    return [pod for pod in pods(docs) if "dynamo_trtllm.planner" in pod.args]


def words(pod: Pod) -> list[str]:
    """The command line after `python -m MODULE`."""
    return pod.args[pod.args.index("-m") + 2 :]


def environment(pod: Pod) -> dict[str, str]:
    """Without what comes from Secrets, but for the addresses that make_secrets puts there."""
    given = {
        variable["name"]: variable["value"]
        for variable in pod.container.get("env", [])
        if "value" in variable
    }
    return given | {
        "ETCD_ENDPOINTS": "https://etcd:2379",
        "NATS_SERVER": "tls://nats:4222",
    }


def worker_config(pod: Pod) -> WorkerConfig:
    return load(WorkerConfig, prog="p", argv=words(pod), environ=environment(pod))


def frontend_config(pod: Pod) -> FrontendConfig:
    return load(FrontendConfig, prog="p", argv=words(pod), environ=environment(pod))


def planner_config(pod: Pod) -> PlannerConfig:
    return load(PlannerConfig, prog="p", argv=words(pod), environ=environment(pod))


def gpus(pod: Pod) -> int:
    return int(pod.container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Of matchLabels and labels that must exist, or of a Service's plain labels."""
    plain = dict(selector)
    for expression in plain.pop("matchExpressions", []):
        assert expression["operator"] == "Exists"
        if expression["key"] not in labels:
            return False
    return all(labels.get(key) == value for key, value in plain.get("matchLabels", plain).items())


GENERATED: dict[str, tuple[str, ...]] = {
    "serve on GPUs": ("folder", "--gpu-memory-gib", "24", "--api-keys-file", "keys.jsonl"),
    "serve on two GPUs each": ("folder", "--engine", "trtllm", "--tp", "2", "--decode", "3"),
    "serve aggregated": ("folder", "--replicas", "2", "--extra-engine-args", "engine.yaml"),
    "serve without GPU": ("tiny-gpt-oss", "--engine", "mock", "--port", "8001"),
    "serve elastic workers": (
        *("tiny-gpt-oss", "--engine", "mock", "--elastic", "3"),
        *("--router-mode", "slo", "--slo-ttft-ms", "2000", "--slo-itl-ms", "100"),
    ),
    "serve another image": ("tiny-gpt-oss", "--engine", "torch", "--worker-image", "mine:1.2.3"),
}
MODEL_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@functools.cache
def generated(name: str, output: str = "kubernetes") -> str:
    """Return what `dynamo-trtllm serve` writes with the flags of this entry of GENERATED.

    It runs where there are no GPUs and no engines.
    """
    machine = MachineFacts(
        gpus=(), no_gpu_reason="none", cpus=2, memory_bytes=1 << 34, engines=frozenset()
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(serve, "machine_facts", return_value=machine),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as written,
    ):
        Path("folder").mkdir()
        Path("folder/config.json").write_text(json.dumps(MODEL_CONFIG))
        Path("engine.yaml").write_text("max_num_seqs: 7")
        Path("keys.jsonl").touch()
        serve.main([*GENERATED[name], "--dry-run", "--format", output])
    return written.getvalue()


def all_generated() -> dict[str, list[Doc]]:
    """Return the objects that `serve` writes, by the name in GENERATED."""
    return {name: read_documents(generated(name)) for name in GENERATED}


def everything() -> dict[str, list[Doc]]:
    """Every set of objects that is applied together, by what it is called in test ids."""
    found = {folder: render(RECIPES / folder) for folder in KUSTOMIZATIONS}
    for path in sorted(MODEL.rglob("*.yaml")):
        # deploy.yaml is the kustomization beside it
        if path.parent.name == "model-cache" or path.name == "perf.yaml":
            found[path.relative_to(RECIPES).as_posix()] = documents(path)
    return found
