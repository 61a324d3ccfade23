"""The recipes as tests look at them: every set of objects that is applied together, and the pods in
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.config.load import load
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from tests.unit.deploy.kustomize import Doc, documents, render

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "deploy" / "recipes"
MODEL = RECIPES / "gpt-oss-120b"

TARGETS = {  # folder: the name that all its objects begin with
    "trtllm/agg": "gpt-oss-agg",
    "trtllm/disagg": "gpt-oss-disagg",
    "trtllm/disagg-8gpu": "gpt-oss-disagg-8gpu",
    "vllm/disagg": "gpt-oss-vllm-disagg",
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


def everything() -> dict[str, list[Doc]]:
    """Every set of objects that is applied together, by what it is called in test ids."""
    found = {folder: render(RECIPES / folder) for folder in KUSTOMIZATIONS}
    for path in sorted(MODEL.rglob("*.yaml")):
        # deploy.yaml is the kustomization beside it
        if path.parent.name == "model-cache" or path.name == "perf.yaml":
            found[path.relative_to(RECIPES).as_posix()] = documents(path)
    return found
