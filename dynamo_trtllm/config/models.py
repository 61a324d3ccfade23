"""Define the settings of workers and frontends. Each field is a flag, an environment variable and a line of help.

The models are frozen pydantic models. `load.load` fills them from argv and environment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from dynamo_trtllm.config.base import (
    CONTROL,
    ENGINE,
    HTTP,
    KV,
    MODEL,
    PROCESS,
    ROLE,
    ConnectionConfig,
    EngineName,
    IpAddress,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    ReachableHost,
    cli_option,
)
from dynamo_trtllm.messages import Role

_ENDPOINT = re.compile(r"dyn://[^/.*>\s]+\.[^/.*>\s]+\.[^/.*>\s]+")


class WorkerConfig(ConnectionConfig):
    """Settings of `python -m dynamo_trtllm`. None selects the engine's own default."""

    examples: ClassVar[str] = """\
examples, one prefill and one decode worker of the same model:
  python -m dynamo_trtllm --model-path /models/tiny --engine torch --disaggregation-mode prefill --max-num-tokens 8192
  python -m dynamo_trtllm --model-path /models/tiny --engine torch --disaggregation-mode decode --max-batch-size 64
"""

    model_path: str = Field(
        description="Model folder or bundled model name.", json_schema_extra=cli_option(MODEL, "--model")
    )
    served_model_name: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Name that clients send as `model`. Default: the name of the folder.",
        json_schema_extra=cli_option(MODEL),
    )
    dyn_reasoning_parser: Literal["gpt_oss", "basic", "deepseek_r1", "none"] | None = Field(
        default=None,
        description="Reasoning parser: gpt_oss (Harmony), basic (text between <think> and </think>), deepseek_r1 (text "
        "up to </think>), none. Default: chosen by the model's format.",
        json_schema_extra=cli_option(MODEL),
    )
    dyn_tool_call_parser: Literal["harmony", "hermes", "json", "none"] | None = Field(
        default=None,
        description="Tool-call parser: harmony, hermes (JSON in <tool_call> tags), json (the answer is a call), none. "
        "Default: chosen by the model's format.",
        json_schema_extra=cli_option(MODEL),
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: requests default to temperature, top_p, top_k, min_p and repetition_penalty of the model's "
        "generation_config.json. none: they use the API's defaults.",
        json_schema_extra=cli_option(MODEL),
    )
    max_seq_len: PositiveInt | None = Field(
        default=None, description="Maximum prompt and output tokens per request.", json_schema_extra=cli_option(MODEL)
    )
    engine: EngineName | None = Field(
        default=None,
        description="Inference engine: trtllm (TensorRT-LLM), vllm, torch (transformers on CPU or GPU), mock (no "
        "weights). Default: trtllm if TensorRT-LLM is installed; otherwise this flag is required.",
        json_schema_extra=cli_option(ENGINE),
    )
    extra_engine_args: Path | None = Field(
        default=None,
        description="YAML file of engine arguments. Flags override its values.",
        json_schema_extra=cli_option(ENGINE),
    )
    kernels_profile: str | None = Field(
        default=None,
        description="Kernel profile: a name in kernels_config/, or a file. Default: chosen by the GPU.",
        json_schema_extra=cli_option(ENGINE),
    )
    override_engine_args: dict[str, Any] | None = Field(
        default=None,
        description="JSON object of engine arguments. It overrides file and flags.",
        json_schema_extra=cli_option(ENGINE),
    )
    dump_config_to: Path | None = Field(
        default=None,
        description="Write the merged engine arguments to this YAML file, each with its source.",
        json_schema_extra=cli_option(ENGINE),
    )
    load_format: Literal["auto", "dummy"] | None = Field(
        default=None,
        description="auto: read the model's weights. dummy: use random weights, which need no weight files and give "
        "meaningless answers.",
        json_schema_extra=cli_option(ENGINE),
    )
    max_num_tokens: PositiveInt | None = Field(
        default=None, description="Maximum tokens in one engine step.", json_schema_extra=cli_option(ENGINE)
    )
    max_batch_size: PositiveInt | None = Field(
        default=None, description="Maximum requests in one engine step.", json_schema_extra=cli_option(ENGINE)
    )
    tensor_parallel_size: PositiveInt | None = Field(
        default=None, description="Number of GPUs over which each layer is split.", json_schema_extra=cli_option(ENGINE)
    )
    expert_parallel_size: PositiveInt | None = Field(
        default=None, description="Number of GPUs over which experts are spread.", json_schema_extra=cli_option(ENGINE)
    )
    pipeline_parallel_size: PositiveInt | None = Field(
        default=None, description="Number of GPUs over which layers are spread.", json_schema_extra=cli_option(ENGINE)
    )
    disaggregation_mode: Role = Field(
        default=Role.AGGREGATED,
        description="Role of this worker. Default with --engine vllm: decode.",
        json_schema_extra=cli_option(
            ROLE, const_flags={"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}
        ),
    )
    disaggregation_strategy: Literal["prefill_first", "decode_first"] = Field(
        default="prefill_first",
        description="Phase that starts first. decode_first reserves a decode slot before the prompt is processed. "
        "Prefill and decode workers need the same value.",
        json_schema_extra=cli_option(ROLE),
    )
    endpoint: str | None = Field(
        default=None,
        description="Endpoint as dyn://NAMESPACE.COMPONENT.ENDPOINT. Default: chosen by role.",
        json_schema_extra=cli_option(ROLE),
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Fraction of the GPU memory left after weights that the KV cache takes. With --engine vllm: "
        "fraction of the whole GPU memory that the engine takes, weights included.",
        json_schema_extra=cli_option(KV),
    )
    kv_block_size: PositiveInt | None = Field(
        default=None,
        description="Tokens per KV block. Prefill and decode workers need the same value.",
        json_schema_extra=cli_option(KV),
    )
    publish_kv_events: bool = Field(
        default=False,
        description="Publish events for stored and removed KV blocks. No engine supports it in this version.",
        json_schema_extra=cli_option(KV),
    )
    ticket_ttl_s: PositiveFloat = Field(
        default=60.0, description="Seconds until KV that was not fetched is freed.", json_schema_extra=cli_option(KV)
    )
    handoff_timeout_s: PositiveFloat = Field(
        default=30.0, description="Maximum seconds to fetch a prompt's KV.", json_schema_extra=cli_option(KV)
    )
    kv_transfer_host: ReachableHost | None = Field(
        default=None,
        description="Address or name at which other workers reach this host for KV over TCP, or for the handshake of "
        "--engine vllm. Default: the local address that routes to NATS, else to etcd, else 127.0.0.1.",
        json_schema_extra=cli_option(KV),
    )
    kv_transfer_bind_host: IpAddress | None = Field(
        default=None,
        description="IP address to listen on for KV over TCP; 0.0.0.0 and :: mean every interface. Default: "
        "--kv-transfer-host.",
        json_schema_extra=cli_option(KV),
    )
    max_ticket_kv_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="Maximum fraction of the KV blocks in transfers that are not yet fetched. Above it a prefill "
        "worker rejects requests.",
        json_schema_extra=cli_option(KV),
    )
    max_queued_requests: NonNegativeInt = Field(
        default=1024,
        description="Maximum requests that a worker accepts beyond --max-batch-size. Further ones are rejected.",
        json_schema_extra=cli_option(ENGINE),
    )
    lease_ttl_s: PositiveFloat = Field(
        default=10.0, description="Seconds until a dead worker's lease expires.", json_schema_extra=cli_option(CONTROL)
    )
    stall_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="Seconds without an answer after which a frontend counts as dead and the worker cancels its "
        "requests.",
        json_schema_extra=cli_option(CONTROL),
    )
    system_host: Annotated[str, Field(min_length=1)] = Field(
        default="0.0.0.0",
        description="Address that --system-port listens on. The default accepts connections from other machines. "
        "Default when the launcher starts the worker: 127.0.0.1.",
        json_schema_extra=cli_option(PROCESS, env="DYN_SYSTEM_HOST"),
    )
    system_port: Port | None = Field(
        default=None,
        description="Port for /live, /ready, /health and /metrics; 0 takes a free one. Default: disabled, or a free "
        "loopback port when the launcher starts the worker.",
        json_schema_extra=cli_option(PROCESS, env="DYN_SYSTEM_PORT"),
    )
    drain_timeout_s: PositiveFloat = Field(
        default=30.0, description="Maximum time in seconds to drain at shutdown.", json_schema_extra=cli_option(PROCESS)
    )

    @field_validator("publish_kv_events")
    @classmethod
    def _no_kv_events(cls, value: bool) -> bool:
        if value:
            raise ValueError("no engine of this version can publish KV events; remove the flag")
        return value

    @model_validator(mode="before")
    @classmethod
    def _role_of_vllm(cls, data: Any) -> Any:
        """Default the role of a vLLM worker to decode, as Dynamo does."""
        if isinstance(data, dict) and data.get("engine") == "vllm":
            return {"disaggregation_mode": Role.DECODE, **data}
        return data

    @model_validator(mode="after")
    def _kv_transfer_hosts_are_used(self) -> WorkerConfig:
        """Reject addresses that the engine's own KV transfer would ignore."""
        engines = ("torch", "mock")
        for flag, value, users in (
            ("--kv-transfer-host", self.kv_transfer_host, (*engines, "vllm")),
            ("--kv-transfer-bind-host", self.kv_transfer_bind_host, engines),
        ):
            if value is not None and self.engine not in users:
                raise ValueError(f"{flag} has an effect only with --engine {' or '.join(users)}; remove it")
        return self

    @field_validator("endpoint")
    @classmethod
    def _endpoint_form(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError("expected dyn://NAMESPACE.COMPONENT.ENDPOINT")
        return value


class FrontendConfig(ConnectionConfig):
    """Settings of `python -m dynamo_trtllm.frontend`."""

    http_host: str = Field(
        default="0.0.0.0",
        description="Address to listen on. The default accepts connections from other machines. Default when the "
        "launcher starts the frontend: 127.0.0.1.",
        json_schema_extra=cli_option(HTTP),
    )
    http_port: Port = Field(
        default=8000,
        description="Port to listen on; 0 takes a free one.",
        json_schema_extra=cli_option(HTTP, env="DYN_HTTP_PORT"),
    )
    workers: PositiveInt = Field(
        default=1,
        description="Number of frontend processes that share the port. Limits of connections, generations and queues "
        "apply to each process.",
        json_schema_extra=cli_option(HTTP),
    )
    router_mode: Literal["round-robin"] = Field(
        default="round-robin",
        description="Load-balancing policy. There is only round-robin so far.",
        json_schema_extra=cli_option(HTTP),
    )
    request_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="Maximum seconds of a request. A request can set a shorter limit with `timeout`.",
        json_schema_extra=cli_option(HTTP),
    )
    max_connections: PositiveInt = Field(
        default=8192,
        description="Maximum open connections. Further ones are answered with 429 and closed.",
        json_schema_extra=cli_option(HTTP),
    )
    max_header_bytes: PositiveInt = Field(
        default=64 << 10, description="Maximum bytes of a request head (else 431).", json_schema_extra=cli_option(HTTP)
    )
    receive_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="Maximum seconds to receive the head of a request, and then its body. Slower ones are answered "
        "with 408.",
        json_schema_extra=cli_option(HTTP),
    )
    keep_alive_timeout_s: PositiveFloat = Field(
        default=75.0, description="Seconds until an idle connection is closed.", json_schema_extra=cli_option(HTTP)
    )
    max_body_bytes: PositiveInt = Field(
        default=8 << 20,
        description="Maximum size of a request body in bytes. Larger bodies are answered with 413.",
        json_schema_extra=cli_option(HTTP),
    )
    max_total_body_bytes: PositiveInt = Field(
        default=256 << 20,
        description="Maximum bytes of all request bodies together that are being received or parsed. Further bodies "
        "wait for at most 5 s, then they are answered with 429.",
        json_schema_extra=cli_option(HTTP),
    )
    max_inflight: PositiveInt = Field(
        default=4096,
        description="Maximum concurrent generations (n=4 counts as 4). Others are queued.",
        json_schema_extra=cli_option(HTTP),
    )
    max_queued: NonNegativeInt = Field(
        default=1024,
        description="Maximum queued requests, processed in order of arrival. Further ones are answered with 429.",
        json_schema_extra=cli_option(HTTP),
    )
    retry_limit: NonNegativeInt = Field(
        default=3,
        description="Maximum retries of a request that fails before its first token, on another worker if there is "
        "one.",
        json_schema_extra=cli_option(HTTP),
    )
    migration_limit: NonNegativeInt = Field(
        default=3,
        description="Maximum migrations of a request. When its worker dies, another one continues from the tokens so "
        "far.",
        json_schema_extra=cli_option(HTTP),
    )
    hold_for_roles_s: NonNegativeFloat = Field(
        default=5.0,
        description="Maximum seconds that a request waits for a role that has no worker, before 503.",
        json_schema_extra=cli_option(HTTP, "--hold-for-roles"),
    )
    decode_fallback: bool = Field(
        default=False,
        description="If no prefill worker is available, send aggregated requests to decode workers whose engine "
        "supports them.",
        json_schema_extra=cli_option(HTTP),
    )
    canary_interval_s: NonNegativeFloat = Field(
        default=30.0,
        description="Seconds after which an idle pair is probed with a request whose answer is known. 0: no probes, "
        "and a model is ready as soon as matching workers of each role are registered.",
        json_schema_extra=cli_option(HTTP),
    )
    canary_timeout_s: PositiveFloat = Field(
        default=10.0, description="Maximum seconds for each request of a probe.", json_schema_extra=cli_option(HTTP)
    )
    stall_timeout_s: PositiveFloat = Field(
        default=5.0,
        description="Seconds without an answer after which a worker counts as dead; also the maximum wait for the "
        "acknowledgment of a request. Streams are checked for lost messages three times in this time.",
        json_schema_extra=cli_option(HTTP, "--stall-timeout"),
    )
    response_store: Literal["auto", "memory", "jetstream"] = Field(
        default="auto",
        description="Store of responses for previous_response_id and GET: memory (of one frontend process), jetstream "
        "(NATS, shared by all frontends of the namespace; needs nats-server -js), auto (jetstream with several "
        "--workers, else memory).",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_entries: PositiveInt = Field(
        default=10_000,
        description="Maximum responses stored in memory. Beyond it, the client address with the most loses its oldest.",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_bytes: PositiveInt = Field(
        default=256 << 20,
        description="Maximum bytes of stored responses. Beyond it, the client address with the most loses its oldest "
        "(memory), or the oldest are deleted (jetstream).",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_entry_bytes: PositiveInt = Field(
        default=4 << 20,
        description="Maximum bytes of one stored response with its conversation. Longer ones need store: false.",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_ttl_s: PositiveFloat = Field(
        default=86_400.0, description="Seconds until a stored response is deleted.", json_schema_extra=cli_option(HTTP)
    )

    @property
    def shares_responses(self) -> bool:
        """Return True if all frontend processes use the same response store."""
        return self.response_store == "jetstream" or (self.response_store == "auto" and self.workers > 1)

    @model_validator(mode="after")
    def _one_body_fits(self) -> FrontendConfig:
        if 2 * self.max_body_bytes > self.max_total_body_bytes:
            raise ValueError(
                f"--max-total-body-bytes {self.max_total_body_bytes} must be at least twice --max-body-bytes "
                f"{self.max_body_bytes}; raise it or lower --max-body-bytes"
            )
        return self

    @model_validator(mode="after")
    def _store_fits_workers(self) -> FrontendConfig:
        if self.workers > 1 and not self.shares_responses:
            raise ValueError(
                f"--response-store memory cannot be combined with --workers {self.workers} (each process has its own "
                "store); use --response-store jetstream or --workers 1"
            )
        return self
