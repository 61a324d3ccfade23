"""Serve one model on this machine: choose engine, devices and workers, and launch them.

`python -m dynamo_trtllm.launch.serve MODEL` does this. The command launches the deployment file
that it would write with --dry-run.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dynamo_trtllm import models as bundled_models
from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.config_base import Config
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.config.environ import command_line
from dynamo_trtllm.config.flags import ENV_PREFIX
from dynamo_trtllm.config.load import command_errors, load, process_environment, program
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.config.parser import command_streams
from dynamo_trtllm.config.split_flags import split_words
from dynamo_trtllm.engines.gpu import list_gpus
from dynamo_trtllm.launch.cluster_files import (
    ClusterDeployment,
    cluster_facts,
    compose_file,
    kubernetes_file,
)
from dynamo_trtllm.launch.main import run
from dynamo_trtllm.launch.process_output import LAUNCHER
from dynamo_trtllm.launch.topology import (
    MachineFacts,
    ModelFacts,
    choose,
    deployment_data,
    reads_model,
)
from dynamo_trtllm.models.checkpoint import (
    CONFIG,
    Checkpoint,
    model_file,
    read_checkpoint,
    weight_bytes,
)
from dynamo_trtllm.models.hub import Hub, HubModel
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.observability.outputs import OUTPUTS
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.sanitize import escape_controls
from dynamo_trtllm.support.subprocesses import RunFailed

PROG = "python -m dynamo_trtllm.launch.serve"
# Modules by engine. An engine is installed if its module is found.
_PACKAGES = {"trtllm": "tensorrt_llm", "vllm": "vllm", "torch": "torch"}
_OWN_SERVERS = (
    "this command starts its own servers; print the deployment with --dry-run, edit and launch it"
)
# Flags of workers and frontends that this command does not take, and what to do instead.
_NOT_TAKEN = {
    "model_path": "the model is the first argument, without a flag",
    "disaggregation_mode": "use --prefill and --decode",
    "etcd_endpoints": _OWN_SERVERS,
    "nats_server": _OWN_SERVERS,
    "etcd_credentials_file": _OWN_SERVERS,
    "nats_credentials_file": _OWN_SERVERS,
    "nats_inbox_prefix": _OWN_SERVERS,
}
# Number of weights of the bundled model, whose files exist only after a worker has expanded it.
_TINY_VALUES = 30_000_000


@command_errors(PROG, RunFailed)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 after a stop by signal or `--dry-run`.

    Exit with status 2 for a wrong setting, and 1 if the deployment failed.

    Args:
        argv: command line without the program name. Default: that of this process.
    """
    words = list(command_line() if argv is None else argv)
    if "--" in words:
        raise ConfigError("remove --: flags of workers and of the frontend need no mark")
    own, of_workers, of_frontend = split_words(words, (ServeConfig, WorkerConfig, FrontendConfig))
    config = load(ServeConfig, prog=PROG, argv=own, others=(WorkerConfig, FrontendConfig))
    observe_logging.setup(config.log_level, "serve", config.log_format)
    # Workers require a model. Here it is the first argument, and not one of their flags.
    environ = {f"{ENV_PREFIX}MODEL_PATH": "-"}
    if config.elastic is not None:
        # Flags such as --prefill-share are rejected with other roles.
        environ[f"{ENV_PREFIX}DISAGGREGATION_MODE"] = Role.ELASTIC.value
    worker_flags = _values(WorkerConfig, of_workers, environ)
    frontend_flags = _values(FrontendConfig, of_frontend, {})
    hub_model, model = _model(config)
    machine = machine_facts(process_environment())
    if config.format != "launch":
        machine = cluster_facts(machine, config)
    chosen = choose(machine, model, config)
    if config.format == "kubernetes" and chosen.gpus:
        # The GPUs are those of an imaginary machine, so their numbers are not shown.
        size_gib = machine.gpus[0].total_bytes >> 30
        chosen.reasons["devices"] = (
            f"{counted(chosen.tensor_parallel_size, 'GPU')} of {size_gib} GiB per worker"
            " (--gpu-memory-gib, --tensor-parallel-size)"
        )
    data = deployment_data(chosen, model, config, worker_flags, frontend_flags)
    deployment = checked_deployment(data, "flags of this command")
    lines = [f"{subject + ':':<10} {reason}" for subject, reason in chosen.reasons.items()]
    if config.dry_run:
        head = [escape_controls(f"Written by {program(PROG)} {shlex.join(words)}"), *lines]
        if config.format == "launch":
            sys.stdout.write(_deployment_file(data, head, hub_model))
        else:
            in_cluster = ClusterDeployment(
                config=config, deployment=deployment, model=model, hub_model=hub_model, head=head
            )
            write = kubernetes_file if config.format == "kubernetes" else compose_file
            sys.stdout.write(write(in_cluster))
        return 0
    if hub_model is not None and hub_model.download_bytes:
        for line in lines:
            _show(line)
        lines = []
        Hub().download(hub_model, _show)
    OUTPUTS.start(LAUNCHER, config.log_format)
    asyncio.run(run(deployment, log_format=config.log_format, preface=lines))
    return 0


def _show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _values(
    model: type[Config], words: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of flags by field name.

    Args:
        model: settings of a worker or of a frontend.
        words: flags with their values.
        environ: environment variables that the settings are read from, too.

    Raises:
        ConfigError: a value is wrong, or this command does not take the flag.
    """
    if not words:
        return {}
    config = load(model, prog=PROG, argv=words, environ=environ)
    values = {
        name: getattr(config, name)
        for name in model.model_fields
        if config.source_of(name).startswith("flag ")
    }
    for name in sorted(values):
        if name in _NOT_TAKEN:
            flag = config.source_of(name).removeprefix("flag ")
            raise ConfigError(f"{flag} can't be used here: {_NOT_TAKEN[name]}")
    # A deployment file may be launched in another folder, so its paths are absolute.
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = os.path.realpath(os.path.expanduser(value))
    return values


def machine_facts(environment: Mapping[str, str]) -> MachineFacts:
    """Return what this machine has, for processes with this environment."""
    gpus, why = list_gpus(environment)
    installed = [name for name, package in _PACKAGES.items() if importlib.util.find_spec(package)]
    return MachineFacts(
        gpus=gpus,
        no_gpu_reason=why,
        cpus=_num_cpus(),
        memory_bytes=_available_bytes(),
        engines=frozenset(installed),
    )


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not Linux


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            kibibytes = line.split()[1]
            return int(kibibytes) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _model(config: ServeConfig) -> tuple[HubModel | None, ModelFacts]:
    """Find the model. Return its revision on the Hub, or None for another model, and its facts.

    Only config.json of a model on the Hub is downloaded, unless the cache has the model.

    Raises:
        ConfigError: there is no such model, or its files can't be read.
    """
    name = config.model
    path = os.path.expanduser(name)  # `Path.expanduser` raises if there is no such user
    is_folder = os.path.isdir(path)
    is_bundled = name in bundled_models.BUNDLED
    is_hub_name = bundled_models.HUB_NAME.fullmatch(name) is not None
    is_on_hub = is_hub_name and not is_bundled and not is_folder
    if config.revision is not None and not is_on_hub:
        raise ConfigError(f"--revision needs a model on the Hub, not {name}; remove it")
    path = os.path.realpath(path) if is_folder else name
    default_name = Path(path).name if is_folder else name
    served_name = config.served_model_name or default_name
    facts = ModelFacts(
        path=path, name=served_name, weight_bytes=None, torch_values=None, num_heads=None
    )
    if config.engine is not None and not reads_model(config.engine):
        return None, facts
    if is_on_hub:
        hub_model = Hub().find(name, config.revision)
        checkpoint = read_checkpoint(hub_model.folder)
        facts = replace(facts, path=str(hub_model.folder))
        return hub_model, _with_weights(facts, checkpoint, hub_model.weight_bytes)
    folder = bundled_models.locate(name)
    if folder is None:
        return None, replace(facts, weight_bytes=4 * _TINY_VALUES, torch_values=_TINY_VALUES)
    file = model_file(folder)
    if file.name != CONFIG:
        return None, replace(facts, is_gguf=True, weight_bytes=file.stat().st_size)
    checkpoint = read_checkpoint(folder)
    return None, _with_weights(facts, checkpoint, checkpoint.index_bytes)


def _with_weights(
    facts: ModelFacts, checkpoint: Checkpoint, stored_bytes: int | None
) -> ModelFacts:
    """Return the facts, completed by what the checkpoint says of its weights.

    Args:
        facts: what is known without the checkpoint.
        checkpoint: the checkpoint.
        stored_bytes: size of the files of weights. With None or 0, it is computed from the
            checkpoint.
    """
    in_bfloat16 = replace(checkpoint, quantization=None, dtype="bfloat16")
    return replace(
        facts,
        weight_bytes=stored_bytes or weight_bytes(checkpoint).total,
        torch_values=weight_bytes(in_bfloat16).total // 2,  # two bytes per value
        num_heads=checkpoint.num_attention_heads,
    )


def _deployment_file(
    data: Mapping[str, Any], head: Sequence[str], hub_model: HubModel | None
) -> str:
    """Return a deployment file that the launcher runs like this command."""
    head = [*head]
    if hub_model is not None and hub_model.download_bytes:
        gib = math.ceil(hub_model.download_bytes / (1 << 30))
        head.append(
            f"First download {gib} GiB: hf download {hub_model.name} --revision"
            f" {hub_model.revision}"
        )
    comments = "".join(f"# {escape_controls(line)}\n" for line in head)
    return comments + yaml.safe_dump(_with_escaped_dollars(data), sort_keys=False)


def _with_escaped_dollars(value: Any) -> Any:
    """Double dollar signs, with which references to variables begin in a deployment file."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: _with_escaped_dollars(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_escaped_dollars(item) for item in value]
    return value


if __name__ == "__main__":
    with command_streams(PROG):
        raise SystemExit(main())
