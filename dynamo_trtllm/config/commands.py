"""Define the settings of commands, and import those that other modules define.

`load` finds the settings of all commands here, and those of one process of a multi-process
frontend.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dynamo_trtllm.config.client_commands import ChatConfig as ChatConfig
from dynamo_trtllm.config.client_commands import ExplainConfig as ExplainConfig
from dynamo_trtllm.config.client_commands import LogsConfig as LogsConfig
from dynamo_trtllm.config.client_commands import StatusConfig as StatusConfig
from dynamo_trtllm.config.client_commands import StopConfig as StopConfig
from dynamo_trtllm.config.config_base import (
    LOG_FORMAT,
    LOG_LEVEL,
    Config,
    ConnectionConfig,
    EngineName,
    LogFormat,
    LogLevel,
    Namespace,
    NonEmpty,
    Port,
    PositiveFloat,
    PositiveInt,
    matching,
    option,
)
from dynamo_trtllm.config.engine_names import BUILT_IN
from dynamo_trtllm.config.models import FrontendConfig as FrontendConfig
from dynamo_trtllm.config.models import WorkerConfig as WorkerConfig
from dynamo_trtllm.config.planner import PlannerConfig as PlannerConfig
from dynamo_trtllm.config.roles import RolesConfig as RolesConfig
from dynamo_trtllm.config.shares import SharesConfig as SharesConfig
from dynamo_trtllm.config.simulation import PlanConfig as PlanConfig
from dynamo_trtllm.config.simulation import ProfileConfig as ProfileConfig
from dynamo_trtllm.config.simulation import SimulateConfig as SimulateConfig
from dynamo_trtllm.config.token_counts import TokenCount
from dynamo_trtllm.protocol.number_types import (
    MAX_PRIORITY,
    MAX_WEIGHT,
    MIN_WEIGHT,
)


class PreflightConfig(Config):
    """Check TensorRT-LLM arguments without loading an engine: each role, the prefill/decode pair,
    and memory.

    example, the disaggregated Kubernetes target for gpt-oss-120b, without the model's files:
      %(prog)s --prefill engine_configs/gpt-oss-120b/k8s-disagg/prefill.yaml \\
        --decode engine_configs/gpt-oss-120b/k8s-disagg/decode.yaml --gpu gb200 \\
        --model gpt-oss-120b --isl 8192 --osl 1024 --concurrency 1536
    the workers of a deployment file:
      %(prog)s deploy/local/gpt-oss-120b-disagg.yaml --gpu b200
    exit status: 0 without errors (warnings are allowed), 1 with errors, 2 for a bad command line
    """

    deployment: Path | None = option(
        "role",
        None,
        positional=True,
        help="Deployment file of the launcher. Its workers and their flags are checked, instead of"
        " those of --prefill, --decode and --agg.",
    )
    prefill: Path | None = option(
        "role", None, help="YAML file of a prefill worker's engine arguments."
    )
    decode: Path | None = option(
        "role",
        None,
        help="YAML file of a decode worker's engine arguments. With --prefill the pair is checked"
        " too.",
    )
    agg: Path | None = option(
        "role", None, help="YAML file of an aggregated worker's engine arguments."
    )
    prefill_args: str | None = option(
        "role",
        None,
        help="More flags of the prefill worker, as one string: '--max-num-tokens 20000"
        " --max-batch-size 32'.",
    )
    decode_args: str | None = option(
        "role", None, help="More flags of the decode worker, as one string."
    )
    agg_args: str | None = option(
        "role", None, help="More flags of the aggregated worker, as one string."
    )
    gpu: str | None = option(
        "engine",
        None,
        help="GPU model, such as b200, gb200, b300, h100, h200, rtx-pro-6000. Default: the GPU of"
        " this machine.",
    )
    release: str = option("engine", "1.2.1", help="TensorRT-LLM release to check against.")
    model_path: str | None = option(
        "model",
        None,
        aliases=("--model",),
        help="Model folder, of which only the JSON files are read; or gpt-oss-120b or gpt-oss-20b"
        " for their published shape. Without it, the model's limits and memory are not checked.",
    )
    isl: TokenCount | None = option(
        "load",
        None,
        help="Tokens of the longest prompt, such as 8192, 8k (8,000) or 8K (8,192). Default: the"
        " smaller of max_seq_len and the transfer buffer.",
    )
    osl: TokenCount | None = option("load", None, help="Tokens of the longest output.")
    concurrency: PositiveInt | None = option("load", None, help="Number of concurrent requests.")
    json_output: bool = option(
        "process", False, aliases=("--json",), help="Print JSON instead of tables."
    )

    @model_validator(mode="after")
    def _has_a_role(self) -> PreflightConfig:
        if self.agg is not None and (self.prefill is not None or self.decode is not None):
            raise ValueError(
                "--agg can't be combined with --prefill or --decode; give it alone, or those two"
            )
        of_roles = (
            self.prefill,
            self.decode,
            self.agg,
            self.prefill_args,
            self.decode_args,
            self.agg_args,
        )
        if self.deployment is not None and any(value is not None for value in of_roles):
            raise ValueError(
                "a deployment file has all settings of its workers; give it without --prefill,"
                " --decode, --agg and their flags"
            )
        if self.deployment is None and of_roles[:3] == (None, None, None):
            raise ValueError(
                "nothing to check; give --prefill and --decode, --agg, or a deployment file"
            )
        if self.isl is None and (self.osl is not None or self.concurrency is not None):
            raise ValueError("--osl and --concurrency need --isl; add it")
        return self


class ClearNamespaceConfig(ConnectionConfig):
    """Remove records of a deployment from etcd and JetStream: instances without a lease, and stored
    responses.

    examples:
      %(prog)s --namespace dynamo
      %(prog)s --namespace dynamo --yes
    exit status: 0 if the namespace is clear, 1 if records are left or a server is unreachable, 2
    for a bad command line
    """

    yes: bool = option(
        "process", False, help="Remove without confirmation. Required when stdin is not a terminal."
    )
    force: bool = option(
        "process",
        False,
        help="Also remove live instances by revoking their leases. A worker that still runs"
        " registers again within seconds.",
    )


class LaunchConfig(Config):
    """Start etcd, NATS, a frontend and workers on this machine from a YAML file, and restart those
    that die.
    """

    deployment: Path = option(
        "process", ..., positional=True, help="YAML file that lists services, frontend and workers."
    )
    model: str | None = option(
        "model", None, help="Model for all workers, instead of the one in the file."
    )
    engine: EngineName | None = option(
        "engine",
        None,
        words=tuple(BUILT_IN),
        help="Engine for all workers, instead of the one in the file. Arguments of another engine"
        " are dropped.",
    )
    port: Port | None = option(
        "HTTP and routing",
        None,
        help="Port of the OpenAI-compatible API, instead of the one in the file; 0 takes a free"
        " one.",
    )
    host: NonEmpty | None = option(
        "HTTP and routing",
        None,
        help="Address that the API listens on, instead of the one in the file; 0.0.0.0 accepts"
        " connections from other machines. Default without a value in the file: 127.0.0.1.",
    )
    demo: bool = option(
        "process",
        False,
        help="Once all processes are ready, send a sample request and print which workers"
        " processed it.",
    )
    once: bool = option(
        "process", False, help="Stop all processes once they are ready and the demo is done."
    )
    dry_run: bool = option(
        "process",
        False,
        help="Check the file, print what would be started (flags, ports, GPUs, names of variables),"
        " and start nothing.",
    )
    log_level: LogLevel = option("process", "info", env=LOG_LEVEL, help="Minimum log level.")
    log_format: LogFormat = option(
        "process",
        "text",
        env=LOG_FORMAT,
        help="Format of log lines, also of the started processes: text, or json (one object per"
        " line).",
    )


class ServeConfig(Config):
    """Serve one model on this machine: etcd, NATS, a frontend and workers that fit its GPUs or its
    CPU.

    examples:
      %(prog)s tiny-gpt-oss
      %(prog)s openai/gpt-oss-20b --prefill 1 --decode 1 --port 8001
      %(prog)s /models/llama --replicas 2 --max-seq-len 8192 --api-keys-file keys.jsonl
      %(prog)s openai/gpt-oss-20b --dry-run --format kubernetes > gpt-oss-20b.yaml
    Flags of `dynamo-trtllm worker` are for every worker, those of `dynamo-trtllm frontend` for the
    frontend, and those that both have for all.
    """

    # In the fields below, None selects what fits the machine and the model.
    model: str = option(
        "model",
        ...,
        positional=True,
        help="Model folder, bundled model (tiny-gpt-oss, smollm2), or ORG/NAME on the Hugging Face"
        " Hub, which is downloaded unless it is in the cache.",
    )
    revision: NonEmpty | None = option(
        "model", None, help="Branch, tag or commit of a model on the Hub. Default: its main branch."
    )
    served_model_name: NonEmpty | None = option(
        "model",
        None,
        help="Name that clients send as `model`. Default: MODEL, or the name of the folder.",
    )
    engine: EngineName | None = option(
        "engine",
        None,
        words=tuple(BUILT_IN),
        help="Inference engine. Default: torch on a machine without GPU; with GPUs, the first of"
        " trtllm, vllm and torch that is installed.",
    )
    tensor_parallel_size: PositiveInt | None = option(
        "engine",
        None,
        aliases=("--tp",),
        help="GPUs per worker, over which each layer is split. Default: as few as the weights"
        " need.",
    )
    prefill: PositiveInt | None = option(
        "role",
        None,
        help="Number of prefill workers. Default: 1 if there are enough devices for two workers.",
    )
    decode: PositiveInt | None = option(
        "role",
        None,
        help="Number of decode workers. Default: 1 if there are enough devices for two workers.",
    )
    replicas: PositiveInt | None = option(
        "role",
        None,
        help="Number of aggregated workers, in place of prefill and decode workers.",
    )
    elastic: PositiveInt | None = option(
        "role",
        None,
        help="Number of elastic workers, in place of prefill and decode workers: each does both, as"
        " `dynamo-trtllm shares` says.",
    )
    port: Port = option(
        "HTTP and routing",
        8000,
        env="DYN_HTTP_PORT",
        aliases=("--http-port",),
        help="Port of the OpenAI-compatible API; 0 takes a free one.",
    )
    host: NonEmpty | None = option(
        "HTTP and routing",
        None,
        aliases=("--http-host",),
        help="Address that the API listens on; 0.0.0.0 accepts connections from other machines."
        " Default: 127.0.0.1.",
    )
    namespace: Namespace = option(
        "control plane",
        "dynamo",
        env="DYN_NAMESPACE",
        help="Name of the deployment. Each has its own etcd and NATS.",
    )
    dry_run: bool = option(
        "process",
        False,
        help="Print the deployment file that the launcher would run, and start nothing. For a"
        " model on the Hub, only config.json is downloaded.",
    )
    format: Literal["launch", "kubernetes", "compose"] = option(
        "process",
        "launch",
        help="What --dry-run prints: a file for `launch`, the objects of Kubernetes, or services"
        " for Docker Compose beside deploy/docker-compose.yml.",
    )
    worker_image: NonEmpty | None = option(
        "process",
        None,
        help="Container image of the workers, for --format kubernetes and compose. Default:"
        " dynamo-trtllm/ENGINE of this version.",
    )
    gpu_memory_gib: PositiveFloat | None = option(
        "process",
        None,
        help="Memory of a GPU of the cluster in GiB, for --format kubernetes. Default: that of this"
        " machine's GPUs, otherwise 80.",
    )
    log_level: LogLevel = option("process", "info", env=LOG_LEVEL, help="Minimum log level.")
    log_format: LogFormat = option(
        "process",
        "text",
        env=LOG_FORMAT,
        help="Format of log lines, also of the started processes: text, or json (one object per"
        " line).",
    )

    @model_validator(mode="after")
    def _format_is_used(self) -> ServeConfig:
        if self.format != "launch" and not self.dry_run:
            raise ValueError(f"--format {self.format} needs --dry-run, which prints it; add it")
        if self.format == "launch" and (self.worker_image or self.gpu_memory_gib):
            raise ValueError(
                "--worker-image and --gpu-memory-gib need --format kubernetes or compose; add it"
            )
        return self


class DemoConfig(LaunchConfig):
    """Start the sample deployment. The settings are those of launch, with other defaults.

    examples:
      %(prog)s
      %(prog)s --once --port 0
      %(prog)s --failover --port 0
    """

    deployment: Path = option(
        "process",
        Path("deploy/local/demo.yaml"),
        positional=True,
        help="YAML file that lists services, frontend and workers.",
    )
    demo: bool = option(
        "process",
        True,
        help="Once all processes are ready, send a sample request and print which workers"
        " processed it.",
    )
    failover: bool = option(
        "process",
        False,
        help="Instead, stream an answer, kill the decode worker that generates it with SIGKILL,"
        " show the pause and the life of the request, and stop. The exit status is 1 if the text"
        " differs from that of an undisturbed run, or if the pause is longer than 10 s.",
    )


def _in_utc(value: datetime) -> datetime:
    """Return a time without a time zone as one in UTC."""
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value


class KeysConfig(Config):
    """Add, list and revoke the API keys in a file that frontends read (--api-keys-file).

    Running frontends use a changed file within about a second.

    examples:
      %(prog)s add --file keys.jsonl --name alice --tokens-per-minute 100000
      %(prog)s add --file keys.jsonl --name prometheus --scope status
      %(prog)s list --file keys.jsonl
      %(prog)s revoke --file keys.jsonl --name alice
    `add` prints the new key, and nothing else, to stdout. It can't be shown again.
    """

    action: Literal["add", "list", "revoke"] = option(
        "process", ..., positional=True, help="What to do: add, list or revoke."
    )
    api_keys_file: Path = option(
        "HTTP access",
        ...,
        aliases=("--file",),
        help="File of API keys. add creates it, readable by this user only.",
    )
    name: (
        Annotated[
            str,
            matching(r"[A-Za-z0-9._-]{1,64}", "expected 1 to 64 letters, digits, '.', '_' or '-'"),
        ]
        | None
    ) = option("HTTP access", None, help="Name of the key, which logs show. For add and revoke.")
    scope: Literal["api", "status", "all"] = option(
        "HTTP access",
        "api",
        help="What the key is for: api; status (/health, /metrics, the console); all.",
    )
    models: tuple[str, ...] = option(
        "HTTP access",
        (),
        aliases=("--model",),
        help="Model that the key may use. May be repeated. Default: all.",
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = option(
        "HTTP access",
        0,
        help="Priority of its requests; lower values first. A request may ask for a higher value"
        " only. Other values than 0 need workers that support priorities.",
    )
    weight: Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = option(
        "HTTP access",
        1.0,
        help="Share of the workers, relative to those of other keys whose requests wait.",
    )
    requests_per_minute: PositiveInt | None = option(
        "HTTP access", None, help="Maximum requests per minute. Default: no limit."
    )
    tokens_per_minute: PositiveInt | None = option(
        "HTTP access",
        None,
        help="Maximum tokens of prompts and outputs per minute. Default: no limit.",
    )
    concurrent_generations: PositiveInt | None = option(
        "HTTP access",
        None,
        help="Maximum concurrent generations (n=4 counts as 4). Default: no limit.",
    )
    expires: Annotated[datetime, AfterValidator(_in_utc)] | None = option(
        "HTTP access",
        None,
        help="Time at which the key expires, like 2027-01-31 or 2027-01-31T12:00:00+01:00; UTC"
        " without a time zone. Default: never.",
    )

    @property
    def key_name(self) -> str:
        """Return the name of the key to add or revoke."""
        assert self.name is not None
        return self.name

    @model_validator(mode="after")
    def _settings_fit_the_action(self) -> KeysConfig:
        """Reject settings that the action would ignore, and a missing name."""
        for field in sorted(self.model_fields_set - {"action", "api_keys_file"}):
            is_used = self.action == "add" or (self.action == "revoke" and field == "name")
            if not is_used:
                raise ValueError(
                    f"--{field.replace('_', '-')} has no effect with {self.action}; remove it"
                )
        if self.action != "list" and self.name is None:
            raise ValueError(f"{self.action} needs --name; add the name of the key")
        return self


class VersionConfig(Config):
    """Show the version of this package, and which engines, GPUs, libraries and servers are
    found.
    """

    json_output: bool = option("process", False, aliases=("--json",), help="Print JSON.")


class CompletionConfig(Config):
    """Print a completion script for bash, zsh or fish.

    examples:
      %(prog)s bash > ~/.local/share/bash-completion/completions/dynamo-trtllm
      %(prog)s zsh > ~/.zfunc/_dynamo-trtllm
      %(prog)s fish > ~/.config/fish/completions/dynamo-trtllm.fish
    New shells then complete commands and flags. If the folder does not exist, create it first with
    mkdir -p. For zsh, $fpath must have it before compinit runs. Only for the current bash:
    source <(dynamo-trtllm completion bash)
    """

    shell: Literal["bash", "zsh", "fish"] = option(
        "process", ..., positional=True, help="Shell to print a script for."
    )


class FrontendProcessConfig(FrontendConfig):
    """One process of a frontend with several `workers`. The frontend starts these processes."""

    number: PositiveInt = option(
        "process", ..., help="Number of this process among the processes of the frontend, from 1."
    )
    hooks: dict[str, Any] | None = option(
        "process", None, help="Names of the middleware and routes of the program, as JSON."
    )
