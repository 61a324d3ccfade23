"""Write the Kubernetes objects of a deployment: frontends, workers, planner, budgets and network
policies.

`dynamo-trtllm serve --dry-run --format kubernetes` and `deploy/recipes/render` use this module. It
imports no other package, because `render` runs where none is installed. The texts of the objects
and their comments are in manifests/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Final

_TEMPLATES: Final = Path(__file__).parent / "manifests"
# Words that YAML does not read as text.
YAML_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
_PLAIN: Final = re.compile("[A-Za-z][A-Za-z0-9_-]*")
# Flags of frontends, unless the caller passes another value.
_FRONTEND_FLAGS: Final = {
    "--router-mode": "round-robin",
    "--http-host": "0.0.0.0",
    "--http-port": "8000",
    "--workers": "4",
    "--response-store": "jetstream",
    "--sse-keep-alive-s": "15",
}
_ANONYMOUS: Final = """\
            - {name: DYN_TRTLLM_ALLOW_ANONYMOUS, value: "true"} # without API keys; see the \
NetworkPolicy
"""
_API_KEYS: Final = """\
            - {name: DYN_TRTLLM_API_KEYS_FILE, value: /etc/api-keys/keys.jsonl}
"""
_NEIGHBORS: Final = """\
    - from: # clients of this namespace, and Prometheus: no API key is needed
        - podSelector: {}
        - namespaceSelector: {}
          podSelector: {matchLabels: {app.kubernetes.io/name: prometheus}}
      ports: [{port: http}]
"""
_EVERYBODY_WITH_A_KEY: Final = """\
    - ports: [{port: http}] # clients of the whole cluster, such as an Ingress: they need an API key
"""
ONE_NODE: Final = "kubernetes.io/hostname"
_NEAR: Final = """\
        podAffinity: # near each other, so that KV transfers use no network
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: $near
                labelSelector:
                  matchLabels: {nvidia.com/dynamo-graph-deployment-name: $name, \
dynamo-trtllm/worker: "true"}
"""
_GPU_NODES: Final = """\
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: nvidia.com/gpu.present, operator: In, values: ["true"]}
"""
_GPU_TAINT: Final = """\
      tolerations:
        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
"""


@dataclass(frozen=True, kw_only=True)
class WorkerPods:
    """The pods of one role.

    Attributes:
        role: prefill, decode, or worker for aggregated workers.
        args: flags of `dynamo-trtllm worker`.
        variables: environment variables of the engine.
        model_claim: volume claim of the weights; "": there is no claim.
        engine_config_map: ConfigMap with the engine's arguments; "": there is no
            ConfigMap.
        engine_digest: digest of that ConfigMap's content.
        node_rules: more expressions that select nodes with suitable GPUs.
        near_label: label of nodes, such as ONE_NODE; workers prefer nodes with the same value. "":
            any node.
        keeps_compiled: the folder of compiled kernels outlives a container.
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    role: str
    image: str
    args: Sequence[str]
    replicas: int = 1
    gpus: int = 0
    cpus: int
    memory_gib: int
    memory_limit_gib: int
    shm_gib: int
    variables: Mapping[str, str] = field(default_factory=dict)
    model_claim: str = ""
    engine_config_map: str = ""
    engine_digest: str = ""
    node_rules: Sequence[str] = ()
    near_label: str = ""
    keeps_compiled: bool = False
    grace_s: int = 180

    @property
    def transfers_kv(self) -> bool:
        return self.role != "worker"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The objects of one deployment.

    Attributes:
        name: the beginning of the names of all objects.
        namespace: DYN_NAMESPACE. NATS and etcd have users for it.
        frontend_image: image of the frontends.
        frontend_words: more flags of the frontends.
        port: port of the Service.
        has_api_keys: frontends need the API keys of the Secret dynamo-api-keys.
        workers: the workers by role.
        planner_words: flags of the planner of elastic workers; empty: there is no planner.
    """

    name: str
    namespace: str
    frontend_image: str
    workers: Sequence[WorkerPods]
    frontend_words: Sequence[str] = ()
    planner_words: Sequence[str] = ()
    port: int = 8000
    has_api_keys: bool = False


def template(file: str, **values: object) -> str:
    """Return the text of a file in manifests/ with these values."""
    text = (_TEMPLATES / f"{file}.template").read_text(encoding="utf-8")
    return Template(text).substitute({name: str(value) for name, value in values.items()})


def manifests(recipe: Recipe) -> str:
    """Return the objects of a deployment as YAML documents."""
    parts = [_frontends(recipe)]
    parts += [_workers(recipe, pods) for pods in recipe.workers]
    if recipe.planner_words:
        parts.append(_planner(recipe))
    roles = ["frontend", *(pods.role for pods in recipe.workers)]
    parts += [template("budget.yaml", name=recipe.name, role=role) for role in roles]
    clients = _EVERYBODY_WITH_A_KEY if recipe.has_api_keys else _NEIGHBORS
    parts.append(template("policies.yaml", name=recipe.name, clients=clients))
    return "---\n".join(parts)


def config_map(name: str, deployment: str, files: Mapping[str, str]) -> str:
    """Return a ConfigMap with the files of engines."""
    data = "".join(
        f"  {file}: |\n{_indented(content.rstrip())}\n" for file, content in files.items()
    )
    labels = (
        "{app.kubernetes.io/part-of: dynamo-trtllm,"
        f" nvidia.com/dynamo-graph-deployment-name: {deployment}}}"
    )
    return (
        f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\n  labels: {labels}\n"
        f"data:\n{data}"
    )


def _indented(content: str) -> str:
    return "".join(
        f"    {line}" if line.strip() else line for line in content.splitlines(keepends=True)
    )


def frontend_command(words: Sequence[str]) -> str:
    """Return the command line of a frontend in a container, as the items of a YAML list.

    Args:
        words: more flags, each with its value.
    """
    command = ["python", "-m", "dynamo_trtllm.frontend"]
    for flag, value in _FRONTEND_FLAGS.items():
        if not any(word.startswith(f"{flag}=") for word in words):
            command += [flag, f'"{value}"' if value.isdigit() else value]
    return ", ".join([*command, *(quoted(_literal(word)) for word in words)])


def _frontends(recipe: Recipe) -> str:
    mounts = ""
    volumes = ""
    if recipe.has_api_keys:
        mounts = "            - {name: api-keys, mountPath: /etc/api-keys, readOnly: true}\n"
        volumes = (
            "        - name: api-keys\n"
            "          secret: {secretName: dynamo-api-keys, defaultMode: 0440}\n"
        )
    return template(
        "frontend.yaml",
        name=recipe.name,
        namespace=scalar(_literal(recipe.namespace)),
        image=recipe.frontend_image,
        args=frontend_command(recipe.frontend_words),
        port=recipe.port,
        access=_API_KEYS if recipe.has_api_keys else _ANONYMOUS,
        mounts=mounts,
        volumes=volumes,
    )


def _workers(recipe: Recipe, pods: WorkerPods) -> str:
    gpus = f', nvidia.com/gpu: "{pods.gpus}"' if pods.gpus else ""
    digest = ""
    if pods.engine_digest:
        digest = (
            f'        dynamo-trtllm/engine-config-sha256: "{pods.engine_digest}"'
            " # changed files restart the pods\n"
        )
    mounts, volumes = _volumes(pods)
    return template(
        "worker.yaml",
        name=recipe.name,
        namespace=scalar(_literal(recipe.namespace)),
        role=pods.role,
        replicas=pods.replicas,
        grace_s=pods.grace_s,
        digest=digest,
        placement=_placement(recipe.name, pods),
        image=pods.image,
        args=_items(pods.args),
        variables=_variables(pods),
        cpus=pods.cpus,
        memory_gib=pods.memory_gib,
        memory_limit_gib=pods.memory_limit_gib,
        gpus=gpus,
        mounts=mounts,
        volumes=volumes,
    )


def _planner(recipe: Recipe) -> str:
    return template(
        "planner.yaml",
        name=recipe.name,
        namespace=scalar(_literal(recipe.namespace)),
        image=recipe.frontend_image,
        args=_items(recipe.planner_words),
    )


def _items(words: Sequence[str]) -> str:
    """Return the flags of a container as items of a YAML list, one a line."""
    return "".join(f"            - {quoted(_literal(word))}\n" for word in words)


def _literal(word: str) -> str:
    """Return a word in which Kubernetes replaces no variable."""
    return word.replace("$(", "$$(")


def quoted(word: str) -> str:
    """Return a flag as YAML, in quotes if it has characters that may have a meaning there."""
    letters_and_digits = word
    for harmless in "-_=/.":
        letters_and_digits = letters_and_digits.replace(harmless, "")
    is_plain = word.startswith("--") and letters_and_digits.isalnum()
    return word if is_plain else "'" + word.replace("'", "''") + "'"


def scalar(text: str) -> str:
    """Return a text as a YAML value, in quotes if YAML may read something else without them."""
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in YAML_WORDS
    return text if is_plain else "'" + text.replace("'", "''") + "'"


def _placement(name: str, pods: WorkerPods) -> str:
    if not pods.gpus:
        return ""
    rules = "".join(f"                  - {rule}\n" for rule in pods.node_rules)
    near = ""
    if pods.near_label:
        near = Template(_NEAR).substitute(name=name, near=pods.near_label)
    return _GPU_NODES + rules + near + _GPU_TAINT


def _variables(pods: WorkerPods) -> str:
    lines = []
    if pods.transfers_kv:
        lines.append("{name: DYN_TRTLLM_KV_TRANSFER_KEY_FILE, value: /etc/kv-transfer-key/keys}")
    if pods.model_claim:
        lines.append('{name: HF_HUB_OFFLINE, value: "1"} # loads only what model-download fetched')
    lines += [f"{{name: {name}, value: {value}}}" for name, value in pods.variables.items()]
    return "".join(f"            - {line}\n" for line in lines)


def _volumes(pods: WorkerPods) -> tuple[str, str]:
    """Return the mounts of a worker and its volumes."""
    mounts = []
    volumes = []

    def add(name: str, mount: str, volume: str, comment: str = "") -> None:
        mounts.append(f"{{name: {name}, {mount}}}{comment}")
        volumes.append(f"{name}\n          {volume}")

    if pods.model_claim:
        add(
            "models",
            "mountPath: /opt/models, readOnly: true",
            f"persistentVolumeClaim: {{claimName: {pods.model_claim}, readOnly: true}}",
        )
    if pods.engine_config_map:
        add(
            "engine",
            "mountPath: /etc/engine, readOnly: true",
            f"configMap: {{name: {pods.engine_config_map}}}",
        )
    add(
        "cluster-tls",
        "mountPath: /etc/cluster-tls, readOnly: true",
        "secret: {secretName: worker-tls, defaultMode: 0440}",
    )
    if pods.transfers_kv:
        add(
            "kv-transfer-key",
            "mountPath: /etc/kv-transfer-key, readOnly: true",
            "secret: {secretName: kv-transfer-key, defaultMode: 0440}",
        )
    memory = f"emptyDir: {{medium: Memory, sizeLimit: {pods.shm_gib}Gi}}"
    add("shm", "mountPath: /dev/shm", f"{memory} # counts towards the pod's memory")
    caches = " # caches of the engine and its libraries"
    add("home", "mountPath: /home/dynamo", "emptyDir: {}", caches)
    add("tmp", "mountPath: /tmp", "emptyDir: {}")
    if pods.keeps_compiled:
        add(
            "compiled",
            "mountPath: /home/dynamo/.cache",
            "emptyDir: {sizeLimit: 16Gi}",
            " # for the next container of this pod",
        )
    return (
        "".join(f"            - {mount}\n" for mount in mounts),
        "".join(f"        - name: {volume}\n" for volume in volumes),
    )
