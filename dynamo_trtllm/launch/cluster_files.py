"""Write a deployment for Kubernetes or Docker Compose, from the choices of `dynamo-trtllm serve`.

The engines are in the images, so the machine that writes a deployment needs no engine. No cluster
has run one of these files yet.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dynamo_trtllm import __version__
from dynamo_trtllm.config.child_settings import to_argv
from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE, Config
from dynamo_trtllm.config.deployment import DeploymentConfig, WorkerSpec
from dynamo_trtllm.config.flags import flags_of
from dynamo_trtllm.config.http_access import ACCESS_FIELDS
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig
from dynamo_trtllm.engines.gpu import GpuMemory
from dynamo_trtllm.launch.kubernetes import (
    ONE_NODE,
    YAML_WORDS,
    Recipe,
    WorkerPods,
    config_map,
    frontend_command,
    manifests,
    quoted,
    scalar,
    template,
)
from dynamo_trtllm.launch.process_specs import devices_of, planner_flags, slo_limits
from dynamo_trtllm.launch.topology import MachineFacts, ModelFacts, reads_model
from dynamo_trtllm.models import BUNDLED
from dynamo_trtllm.models.hub import HubModel
from dynamo_trtllm.protocol.errors import ConfigError

_GIB: Final = 1 << 30
_MODELS: Final = "/opt/models"
_ENGINE_FILE: Final = "engine.yaml"
_SYSTEM_PORT: Final = 9090
_DRAIN_S: Final = 120.0  # longer than KV is kept for a decode worker
_CLOSE_S: Final = 60  # time to close the engine after the drain
_PLATFORM_NAMESPACE: Final = "dynamo"  # NATS and etcd of deploy/ have users for this namespace
_NUM_GPUS: Final = 1024  # GPUs of a cluster: more than a deployment of `serve` takes
_DEFAULT_GPU_GIB: Final = 80.0  # memory of a GPU of the cluster, if this machine has no GPU
_CPUS: Final = 4  # CPUs of a worker without GPU
# Memory of a node. It is more than any model needs, because the nodes of a cluster are not known.
_ENOUGH_BYTES: Final = 1 << 50
_MAX_NAME_CHARS: Final = 40  # Kubernetes allows 63, with what is added to the name
# Size of /dev/shm of a worker. 80 GiB as in Dynamo's recipe.
_SHM_GIB: Final = {"trtllm": 80, "vllm": 16}
# The environment variables of Dynamo's recipes for gpt-oss-120b that also suit other models.
_VARIABLES: Final = {
    "trtllm": {
        "TRTLLM_ENABLE_PDL": "1",
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "True",
        "NCCL_GRAPH_REGISTER": "0",
        "OMPI_MCA_coll_ucc_enable": "0",
    }
}


def cluster_facts(machine: MachineFacts, config: ServeConfig) -> MachineFacts:
    """Return what the machines of a deployment are assumed to have.

    Docker Compose uses the GPUs of this machine. A Kubernetes cluster has any number of GPUs with
    `--gpu-memory-gib` each, by default as much as the smallest GPU of this machine. If this machine
    has no GPU and the engine can run on CPUs, the cluster has no GPUs either.
    """
    # There is an image with vLLM, so it may be chosen without being installed here.
    machine = replace(machine, engines=machine.engines | {"vllm"})
    if config.format == "compose":
        return machine
    gpus: Sequence[GpuMemory] = ()
    if machine.gpus or config.engine not in ("torch", "mock"):
        smallest_bytes = min(
            (gpu.total_bytes for gpu in machine.gpus), default=_DEFAULT_GPU_GIB * _GIB
        )
        if config.gpu_memory_gib is None:
            gpu_bytes = int(smallest_bytes)
        else:
            gpu_bytes = int(config.gpu_memory_gib * _GIB)
        name = f"GPU of the cluster with {gpu_bytes / _GIB:.0f} GiB"
        gpus = [
            GpuMemory(number=number, name=name, total_bytes=gpu_bytes, free_bytes=gpu_bytes)
            for number in range(_NUM_GPUS)
        ]
    return replace(machine, gpus=gpus, cpus=_CPUS, memory_bytes=_ENOUGH_BYTES)


@dataclass(frozen=True, kw_only=True)
class ClusterDeployment:
    """A deployment to write.

    Attributes:
        config: settings of the command.
        deployment: the deployment as the launcher would run it on one machine.
        model: the model.
        hub_model: the model on the Hub; None: the model is not from the Hub.
        head: lines for the beginning of the file.
    """

    config: ServeConfig
    deployment: DeploymentConfig
    model: ModelFacts
    hub_model: HubModel | None
    head: Sequence[str]

    def __post_init__(self) -> None:
        if self.config.host is not None:
            raise self._wrong("host", "frontends listen on all addresses of their container")
        if self.config.port == 0:
            raise self._wrong("port", "clients need a port that does not change; pass another one")

    @property
    def engine(self) -> str:
        return str(self.deployment.workers[0].flags["engine"])

    @property
    def name(self) -> str:
        """Return the beginning of the names of all objects, which are labels of DNS."""
        last = self.model.name.rpartition("/")[2].lower()
        name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_MAX_NAME_CHARS].strip("-")
        # The name is also the value of labels. There, YAML must read it as text.
        is_name = name[:1].isalpha() and name not in YAML_WORDS
        return name if is_name else f"model-{name}".strip("-")

    @property
    def model_folder(self) -> str:
        """Return the model's folder in the containers; "": the model is found by its name."""
        is_named = self.config.model in BUNDLED or not reads_model(self.engine)
        return "" if is_named else f"{_MODELS}/{self.name}"

    @property
    def worker_image(self) -> str:
        """Return the image of the workers.

        Raises:
            ConfigError: there is no image for the engine.
        """
        if self.config.worker_image is not None:
            return self.config.worker_image
        if self.engine == "mock":
            return self.frontend_image
        if self.engine in _SHM_GIB:
            return f"dynamo-trtllm/{self.engine}:{__version__}"
        raise ConfigError(
            f"deploy/container makes no image with the engine {self.engine}; pass yours with"
            " --worker-image, or --engine vllm"
        )

    @property
    def frontend_image(self) -> str:
        return f"dynamo-trtllm/frontend:{__version__}"

    @property
    def keys_file(self) -> str:
        """Return the file of API keys on this machine; "": there is no such file."""
        return str((self.deployment.frontend or {}).get("api_keys_file") or "")

    def frontend_words(self) -> list[str]:
        """Return the flags of frontends, without the address. Raises ConfigError."""
        values = dict(self.deployment.frontend or {})
        for field in ("http_port", "http_host", "api_keys_file", "allow_anonymous"):
            values.pop(field, None)
        if values.get("api_key"):
            raise self._wrong("api_key", "pass --api-keys-file, whose keys go into a Secret")
        self._check_files(FrontendConfig, values)
        return to_argv(FrontendConfig, values)

    def planner_words(self) -> list[str]:
        """Return the flags of the planner; empty: there is none."""
        flags = planner_flags(self.deployment, slo_limits(self.deployment.frontend or {}))
        if flags is None:
            return []
        address = {"system_host": "0.0.0.0", "system_port": _SYSTEM_PORT}
        return to_argv(PlannerConfig, flags | address)

    def worker_words(self, worker: WorkerSpec) -> list[str]:
        """Return the flags of workers of one role. Raises ConfigError."""
        given = {name: value for name, value in worker.flags.items() if name not in ACCESS_FIELDS}
        values: dict[str, Any] = {
            "engine": self.engine,
            "disaggregation_mode": worker.disaggregation_mode.value,
            "system_port": _SYSTEM_PORT,
            "drain_timeout_s": _DRAIN_S,
        }
        if self.engine == "vllm":
            values["compile_cache"] = "/home/dynamo/.cache"
        values |= given
        if self.model_folder:
            values["model_path"] = self.model_folder
        if values.pop("extra_engine_args", None):
            values["extra_engine_args"] = f"/etc/engine/{_ENGINE_FILE}"
        self._check_files(WorkerConfig, given)
        return to_argv(WorkerConfig, values)

    def engine_file(self) -> str:
        """Return the content of `--extra-engine-args`; "": it is not set. Raises ConfigError."""
        path = self.deployment.workers[0].flags.get("extra_engine_args")
        if not path:
            return ""
        try:
            return Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"--extra-engine-args {path} can't be read: {exc}") from exc

    def _check_files(self, model: type[Config], values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a setting that names another file of this machine."""
        for flag in flags_of(model):
            if flag.kind is Path and flag.field not in ("extra_engine_args", "model_path"):
                if values.get(flag.field) is not None:
                    raise self._wrong(
                        flag.field,
                        "it names a file of this machine; leave it out, and mount the file in the"
                        " written deployment",
                    )

    def _wrong(self, field: str, what: str) -> ConfigError:
        flag = f"--{field.replace('_', '-')}"
        return ConfigError(f"{flag} can't be used with --format {self.config.format}: {what}")

    def size_gib(self) -> int:
        """Return the size of the weights."""
        return math.ceil((self.model.weight_bytes or 0) / _GIB)

    def gpus_of(self, worker: WorkerSpec) -> int:
        """Return the number of GPUs of one worker."""
        return 0 if worker.devices == "cpu" else len(worker.devices) // worker.count


def kubernetes_file(cluster: ClusterDeployment) -> str:
    """Return the objects of a deployment for Kubernetes.

    Raises:
        ConfigError: a setting can't be used on Kubernetes.
    """
    name = cluster.name
    content = cluster.engine_file()
    recipe = Recipe(
        name=name,
        namespace=cluster.config.namespace,
        frontend_image=cluster.frontend_image,
        frontend_words=cluster.frontend_words(),
        planner_words=cluster.planner_words(),
        port=cluster.config.port,
        has_api_keys=bool(cluster.keys_file),
        workers=[_pods(cluster, worker, content) for worker in cluster.deployment.workers],
    )
    parts = []
    if cluster.model_folder:
        # While a new revision is downloaded, the volume has the weights twice.
        storage_gib = max(10, math.ceil(2 * cluster.size_gib()))
        parts.append(template("model.yaml", name=name, storage_gib=storage_gib))
    if cluster.hub_model is not None:
        parts.append(
            template(
                "download.yaml",
                name=name,
                image=cluster.frontend_image,
                model=cluster.hub_model.name,
                revision=cluster.hub_model.revision,
                folder=cluster.model_folder,
            )
        )
    if content:
        parts.append(config_map(f"{name}-engine", name, {_ENGINE_FILE: content}))
    parts.append(manifests(recipe))
    return _comments(_kubernetes_head(cluster)) + "---\n".join(parts)


def _pods(cluster: ClusterDeployment, worker: WorkerSpec, engine_file: str) -> WorkerPods:
    """Return the pods of the workers of one role."""
    gpus = cluster.gpus_of(worker)
    size_gib = cluster.size_gib()
    shm_gib = _SHM_GIB.get(cluster.engine, 1)
    words = cluster.worker_words(worker)
    drain_s = float(worker.flags.get("drain_timeout_s", _DRAIN_S))
    variables = _VARIABLES.get(cluster.engine, {})
    # The weights pass through the memory of the host, so the pods need memory for them.
    if gpus:
        cpus = max(8, 4 * gpus)
        memory_gib = size_gib + 16 * gpus
        memory_limit_gib = 2 * size_gib + 32 * gpus + shm_gib
    else:
        cpus = _CPUS
        memory_gib = size_gib + 2
        memory_limit_gib = 2 * size_gib + 4 + shm_gib
    return WorkerPods(
        role=worker.name,
        image=cluster.worker_image,
        args=words,
        replicas=worker.count,
        gpus=gpus,
        cpus=cpus,
        memory_gib=memory_gib,
        memory_limit_gib=memory_limit_gib,
        shm_gib=shm_gib,
        variables={name: f'"{value}"' for name, value in variables.items()},
        model_claim=f"{cluster.name}-model" if cluster.model_folder else "",
        engine_config_map=f"{cluster.name}-engine" if engine_file else "",
        engine_digest=_digest(engine_file),
        near_label=ONE_NODE if gpus else "",
        keeps_compiled=cluster.engine == "vllm",
        grace_s=math.ceil(drain_s) + _CLOSE_S,
    )


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16] if content else ""


def _kubernetes_head(cluster: ClusterDeployment) -> list[str]:
    """Return the lines at the beginning of the file: its origin, and how to use it."""
    lines = [
        *cluster.head,
        "",
        "No cluster has run this file. Put your registry before the names of the images, which"
        " deploy/container builds.",
        "docs/kubernetes.md explains each part. In a checkout:",
        "  deploy/make_secrets kubernetes --namespace NAMESPACE | kubectl apply -f -",
        "  kubectl apply -k deploy/recipes/platform/base -n NAMESPACE",
    ]
    if cluster.config.namespace != _PLATFORM_NAMESPACE:
        lines.append(
            f"NATS and etcd need users for DYN_NAMESPACE {cluster.config.namespace}:"
            " docs/kubernetes.md, Prerequisites."
        )
    if cluster.keys_file:
        lines.append(
            "  kubectl create secret generic dynamo-api-keys"
            f" --from-file=keys.jsonl={cluster.keys_file} -n NAMESPACE"
        )
    if cluster.model_folder:
        lines.append(f"Set the storage class of the claim {cluster.name}-model.")
    if cluster.model_folder and cluster.hub_model is None:
        lines.append(f"Copy the model to the folder {cluster.name} of this claim.")
    return [*lines, "  kubectl apply -f THIS-FILE -n NAMESPACE"]


def compose_file(cluster: ClusterDeployment) -> str:
    """Return the services of a deployment for Docker Compose, beside etcd and NATS of deploy/.

    Raises:
        ConfigError: a setting can't be used with Docker Compose.
    """
    if cluster.config.source_of("gpu_memory_gib") != DEFAULT_SOURCE:
        raise ConfigError("--gpu-memory-gib needs --format kubernetes; remove it")
    access = (
        '      DYN_TRTLLM_ALLOW_ANONYMOUS: "true"           # its port is published on 127.0.0.1'
    )
    volumes = ""
    if cluster.keys_file:
        access = "      DYN_TRTLLM_API_KEYS_FILE: /etc/api-keys/keys.jsonl"
        volume = _for_compose(f"{cluster.keys_file}:/etc/api-keys/keys.jsonl:ro")
        volumes = f"      - {quoted(volume)}\n"
    words = cluster.frontend_words()
    if not any(word.startswith("--workers=") for word in words):
        words.append("--workers=1")
    words = [_for_compose(word) for word in words]
    services = [
        _service(cluster, worker, number)
        for worker in cluster.deployment.workers
        for number in range(worker.count)
    ]
    planner = cluster.planner_words()
    if planner:
        services.append(
            template(
                "compose-planner.yaml",
                image=cluster.frontend_image,
                args="".join(f"      - {quoted(_for_compose(word))}\n" for word in planner),
            )
        )
    text = template(
        "compose.yaml",
        namespace=scalar(_for_compose(cluster.config.namespace)),
        image=cluster.frontend_image,
        args=frontend_command(words),
        access=access,
        port=cluster.config.port,
        volumes=volumes,
        workers="\n".join(services).rstrip(),
    )
    return _comments(_compose_head(cluster)) + text


def _service(cluster: ClusterDeployment, worker: WorkerSpec, number: int) -> str:
    """Return the service of worker `number` of the group."""
    name = worker.process_names[number]
    devices = devices_of(worker, number)
    # Without GPUs, the home folder is in memory. With GPUs, it is a volume (see below).
    home = "" if devices else ', "/home/dynamo:mode=1777"'
    volumes = []
    if cluster.model_folder:
        source = f"./compose/data/models/{cluster.name}"
        if cluster.hub_model is None:
            source = cluster.model.path
        volumes.append(f"{source}:{cluster.model_folder}:ro")
    if cluster.engine_file():
        volumes.append(f"{worker.flags['extra_engine_args']}:/etc/engine/{_ENGINE_FILE}:ro")
    gpus = ""
    if devices:
        volumes.append(f"./compose/data/home/{name}:/home/dynamo")  # caches of the engine
        ids = ", ".join(f'"{device_id}"' for device_id in devices.split(","))
        device = f"{{driver: nvidia, device_ids: [{ids}], capabilities: [gpu]}}"
        gpus = f"    deploy: {{resources: {{reservations: {{devices: [{device}]}}}}}}\n"
    variables = _VARIABLES.get(cluster.engine, {})
    words = cluster.worker_words(worker)
    return template(
        "compose-worker.yaml",
        service=name,
        image=cluster.worker_image,
        args="".join(f"      - {quoted(_for_compose(word))}\n" for word in words),
        variables="".join(f'      {key}: "{value}"\n' for key, value in variables.items()),
        home=home,
        volumes="".join(f"      - {quoted(_for_compose(volume))}\n" for volume in volumes),
        shm_gib=_SHM_GIB.get(cluster.engine, 1),
        gpus=gpus,
    )


def _for_compose(word: str) -> str:
    """Return a word in which compose replaces no variable."""
    return word.replace("$", "$$")


def _compose_head(cluster: ClusterDeployment) -> list[str]:
    """Return the lines at the beginning of the file: its origin, and how to use it."""
    folders = [
        f"deploy/compose/data/home/{name}"
        for worker in cluster.deployment.workers
        if worker.devices != "cpu"
        for name in worker.process_names
    ]
    lines = [
        *cluster.head,
        "",
        "No container runtime has run this file. deploy/container builds the images.",
        "In a checkout:",
        "  deploy/make_secrets compose   # once; it prints how to set up the users of etcd",
    ]
    if cluster.hub_model is not None:
        folder = f"deploy/compose/data/models/{cluster.name}"
        lines.append(
            f"  hf download {cluster.hub_model.name} --revision {cluster.hub_model.revision}"
            f" --local-dir {folder}"
        )
    if folders:
        lines.append(f"  mkdir -p {' '.join(folders)}  # of the user of the containers")
    return [
        *lines,
        "  docker compose -f deploy/docker-compose.yml -f THIS-FILE up -d",
    ]


def _comments(lines: Sequence[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
