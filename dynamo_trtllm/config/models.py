"""Every setting of a worker and a frontend: one field, one flag, one environment variable, one line of help.

Plain frozen pydantic models; building one reads no environment. `load` fills them from argv, environment and YAML.
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
    """`python -m dynamo_trtllm`. None means: the engine's own default."""

    examples: ClassVar[str] = """\
examples, one prefill and one decode worker of the same model:
  python -m dynamo_trtllm --model-path /models/tiny --engine torch --disaggregation-mode prefill --max-num-tokens 8192
  python -m dynamo_trtllm --model-path /models/tiny --engine torch --disaggregation-mode decode --max-batch-size 64
"""

    model_path: str = Field(description="model folder", json_schema_extra=cli_option(MODEL, "--model"))
    served_model_name: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="name clients send as `model`; without it the folder's name",
        json_schema_extra=cli_option(MODEL),
    )
    dyn_reasoning_parser: Literal["gpt_oss", "basic", "deepseek_r1", "none"] | None = Field(
        default=None,
        description="how reasoning is split from the answer: gpt_oss (Harmony), basic (between <think> and </think>), "
        "deepseek_r1 (up to </think>), none; without it by the model's format",
        json_schema_extra=cli_option(MODEL),
    )
    dyn_tool_call_parser: Literal["harmony", "hermes", "json", "none"] | None = Field(
        default=None,
        description="how tool calls are read from the output: harmony, hermes (JSON in <tool_call> tags), json (the "
        "answer is a call), none; without it by the model's format",
        json_schema_extra=cli_option(MODEL),
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: temperature, top_p, top_k, min_p and repetition_penalty of the model's "
        "generation_config.json are the defaults of requests; none: the API's defaults are",
        json_schema_extra=cli_option(MODEL),
    )
    max_seq_len: PositiveInt | None = Field(
        default=None, description="prompt and output tokens of one request", json_schema_extra=cli_option(MODEL)
    )
    engine: EngineName | None = Field(
        default=None,
        description="inference engine: trtllm (TensorRT-LLM; the default where it is installed), vllm, torch "
        "(transformers on CPU or GPU), mock (no weights)",
        json_schema_extra=cli_option(ENGINE),
    )
    extra_engine_args: Path | None = Field(
        default=None,
        description="YAML file of engine arguments; a typed flag overrides it",
        json_schema_extra=cli_option(ENGINE),
    )
    kernels_profile: str | None = Field(
        default=None,
        description="profile in kernels_config/ (or a file) with what suits the GPU; without it chosen by the GPU",
        json_schema_extra=cli_option(ENGINE),
    )
    override_engine_args: dict[str, Any] | None = Field(
        default=None,
        description="JSON object of engine arguments; overrides file and flags",
        json_schema_extra=cli_option(ENGINE),
    )
    dump_config_to: Path | None = Field(
        default=None,
        description="write the merged engine arguments to this YAML file, each with its source, and go on",
        json_schema_extra=cli_option(ENGINE),
    )
    load_format: Literal["auto", "dummy"] | None = Field(
        default=None,
        description="auto reads the model's weights, dummy makes some up: the shape and cost of the model without its "
        "files, and answers that mean nothing",
        json_schema_extra=cli_option(ENGINE),
    )
    max_num_tokens: PositiveInt | None = Field(
        default=None, description="tokens in one engine step", json_schema_extra=cli_option(ENGINE)
    )
    max_batch_size: PositiveInt | None = Field(
        default=None, description="requests in one engine step", json_schema_extra=cli_option(ENGINE)
    )
    tensor_parallel_size: PositiveInt | None = Field(
        default=None, description="GPUs over which each layer is split", json_schema_extra=cli_option(ENGINE)
    )
    expert_parallel_size: PositiveInt | None = Field(
        default=None, description="GPUs over which experts are spread", json_schema_extra=cli_option(ENGINE)
    )
    pipeline_parallel_size: PositiveInt | None = Field(
        default=None, description="GPUs over which layers are spread", json_schema_extra=cli_option(ENGINE)
    )
    disaggregation_mode: Role = Field(
        default=Role.AGGREGATED,
        description="which phases of a request this worker serves; with --engine vllm the default is decode",
        json_schema_extra=cli_option(
            ROLE, const_flags={"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}
        ),
    )
    disaggregation_strategy: Literal["prefill_first", "decode_first"] = Field(
        default="prefill_first",
        description="which phase begins; decode_first reserves a decode slot before the prompt is processed; must be "
        "equal on prefill and decode workers",
        json_schema_extra=cli_option(ROLE),
    )
    endpoint: str | None = Field(
        default=None,
        description="dyn://NAMESPACE.COMPONENT.ENDPOINT; without it chosen by role",
        json_schema_extra=cli_option(ROLE),
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="share of the GPU memory left after weights that KV takes; with --engine vllm the share of all of "
        "it that the engine takes, weights included",
        json_schema_extra=cli_option(KV),
    )
    kv_block_size: PositiveInt | None = Field(
        default=None,
        description="tokens in one KV block; equal on prefill and decode",
        json_schema_extra=cli_option(KV),
    )
    publish_kv_events: bool = Field(
        default=False, description="publish stored and removed KV blocks", json_schema_extra=cli_option(KV)
    )
    ticket_ttl_s: PositiveFloat = Field(
        default=60.0,
        description="seconds after which KV that was not fetched is freed",
        json_schema_extra=cli_option(KV),
    )
    handoff_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="longest time in seconds for a prompt's KV to come from the prefill worker",
        json_schema_extra=cli_option(KV),
    )
    kv_transfer_host: ReachableHost | None = Field(
        default=None,
        description="address or name under which other workers reach this host for KV over TCP, or for the handshake "
        "of --engine vllm. Default: the address that leads to NATS, else to etcd, else 127.0.0.1",
        json_schema_extra=cli_option(KV),
    )
    kv_transfer_bind_host: IpAddress | None = Field(
        default=None,
        description="IP address to listen on for KV over TCP; 0.0.0.0 and :: mean every interface. Default: "
        "--kv-transfer-host",
        json_schema_extra=cli_option(KV),
    )
    max_ticket_kv_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="share of the KV blocks that hand-offs not yet fetched may hold; beyond it a prefill worker "
        "refuses requests",
        json_schema_extra=cli_option(KV),
    )
    max_queued_requests: NonNegativeInt = Field(
        default=1024,
        description="requests beyond --max-batch-size that a worker takes; one more is refused",
        json_schema_extra=cli_option(ENGINE),
    )
    lease_ttl_s: PositiveFloat = Field(
        default=10.0,
        description="seconds after which a dead worker is forgotten",
        json_schema_extra=cli_option(CONTROL),
    )
    stall_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="seconds without an answer after which a frontend counts as dead and the worker ends its requests",
        json_schema_extra=cli_option(CONTROL),
    )
    system_host: Annotated[str, Field(min_length=1)] = Field(
        default="0.0.0.0",
        description="address that --system-port listens on; the default accepts connections from other machines. "
        "Default when the launcher starts the worker: 127.0.0.1",
        json_schema_extra=cli_option(PROCESS, env="DYN_SYSTEM_HOST"),
    )
    system_port: Port | None = Field(
        default=None,
        description="port for /live, /ready, /health and /metrics; 0 takes a free one. Default: disabled, or a free "
        "loopback port when the launcher starts the worker",
        json_schema_extra=cli_option(PROCESS, env="DYN_SYSTEM_PORT"),
    )
    drain_timeout_s: PositiveFloat = Field(
        default=30.0,
        description="longest wait in seconds for running requests when stopping",
        json_schema_extra=cli_option(PROCESS),
    )

    @field_validator("publish_kv_events")
    @classmethod
    def _no_kv_events(cls, value: bool) -> bool:
        if value:
            raise ValueError("no engine of this version publishes KV events; leave it out")
        return value

    @model_validator(mode="before")
    @classmethod
    def _role_of_vllm(cls, data: Any) -> Any:
        """A vLLM worker that is not called a prefill worker is a decode worker to those who know it from Dynamo."""
        if isinstance(data, dict) and data.get("engine") == "vllm":
            return {"disaggregation_mode": Role.DECODE, **data}
        return data

    @model_validator(mode="after")
    def _kv_transfer_hosts_are_used(self) -> WorkerConfig:
        """Refuse addresses that the engine's own KV transfer would ignore."""
        engines = ("torch", "mock")
        for flag, value, users in (
            ("--kv-transfer-host", self.kv_transfer_host, (*engines, "vllm")),
            ("--kv-transfer-bind-host", self.kv_transfer_bind_host, engines),
        ):
            if value is not None and self.engine not in users:
                raise ValueError(f"{flag} has an effect only with --engine {' or '.join(users)}; leave it out")
        return self

    @field_validator("endpoint")
    @classmethod
    def _endpoint_form(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError("expected dyn://NAMESPACE.COMPONENT.ENDPOINT")
        return value


class FrontendConfig(ConnectionConfig):
    """`python -m dynamo_trtllm.frontend`."""

    http_host: str = Field(
        default="0.0.0.0",
        description="address to listen on; the default accepts connections from other machines. Default when the "
        "launcher starts the frontend: 127.0.0.1",
        json_schema_extra=cli_option(HTTP),
    )
    http_port: Port = Field(
        default=8000,
        description="port to listen on; 0 takes a free one",
        json_schema_extra=cli_option(HTTP, env="DYN_HTTP_PORT"),
    )
    workers: PositiveInt = Field(
        default=1,
        description="frontend processes that share the port; limits of connections, choices and queues are those of "
        "each of them",
        json_schema_extra=cli_option(HTTP),
    )
    router_mode: Literal["round-robin"] = Field(
        default="round-robin", description="how an instance is chosen", json_schema_extra=cli_option(HTTP)
    )
    request_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="deadline of a request in seconds; a request may set a nearer one with `timeout`",
        json_schema_extra=cli_option(HTTP),
    )
    max_connections: PositiveInt = Field(
        default=8192,
        description="open connections; one more is answered 429 and closed",
        json_schema_extra=cli_option(HTTP),
    )
    max_header_bytes: PositiveInt = Field(
        default=64 << 10, description="largest request head; answered 431 beyond", json_schema_extra=cli_option(HTTP)
    )
    receive_timeout_s: PositiveFloat = Field(
        default=60.0,
        description="seconds in which a request's head must be here, and then its body; answered 408 beyond",
        json_schema_extra=cli_option(HTTP),
    )
    keep_alive_timeout_s: PositiveFloat = Field(
        default=75.0, description="seconds after which an idle connection is closed", json_schema_extra=cli_option(HTTP)
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
        description="choices at once, n of a request counted n times; more wait",
        json_schema_extra=cli_option(HTTP),
    )
    max_queued: NonNegativeInt = Field(
        default=1024,
        description="requests that wait for their turn, in order of arrival; one more is answered 429",
        json_schema_extra=cli_option(HTTP),
    )
    retry_limit: NonNegativeInt = Field(
        default=3,
        description="how often a request that failed before its first token is tried again, on another worker if "
        "there is one",
        json_schema_extra=cli_option(HTTP),
    )
    migration_limit: NonNegativeInt = Field(
        default=3,
        description="how often a request whose worker dies is continued on another one from the tokens so far",
        json_schema_extra=cli_option(HTTP),
    )
    hold_for_roles_s: NonNegativeFloat = Field(
        default=5.0,
        description="longest wait in seconds for a role that has no worker, before 503",
        json_schema_extra=cli_option(HTTP, "--hold-for-roles"),
    )
    decode_fallback: bool = Field(
        default=False,
        description="decode workers whose engine can do whole requests while there is no prefill worker",
        json_schema_extra=cli_option(HTTP),
    )
    canary_interval_s: NonNegativeFloat = Field(
        default=30.0,
        description="seconds after which an idle pair is tested with a canary, a request with a known answer; 0: "
        "never, and a model is ready as soon as its roles are there",
        json_schema_extra=cli_option(HTTP),
    )
    canary_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="seconds within which each request of a canary must be answered",
        json_schema_extra=cli_option(HTTP),
    )
    stall_timeout_s: PositiveFloat = Field(
        default=5.0,
        description="seconds without an answer after which a worker counts as dead; also the longest wait for the "
        "acknowledgment of a request. Streams are checked for lost messages three times in this time",
        json_schema_extra=cli_option(HTTP, "--stall-timeout"),
    )
    response_store: Literal["auto", "memory", "jetstream"] = Field(
        default="auto",
        description="where responses are kept for previous_response_id and GET: memory (of one frontend process), "
        "jetstream (NATS, shared by all frontends of the namespace; needs nats-server -js), auto (jetstream with "
        "several --workers, else memory)",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_entries: PositiveInt = Field(
        default=10_000,
        description="maximum responses stored in memory; then the client address with the most loses its oldest",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_bytes: PositiveInt = Field(
        default=256 << 20,
        description="maximum bytes of stored responses; then the client address with the most loses its oldest "
        "(memory), or the oldest are dropped (jetstream)",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_entry_bytes: PositiveInt = Field(
        default=4 << 20,
        description="maximum bytes of one stored response with its conversation; longer ones must be requested with "
        "store: false",
        json_schema_extra=cli_option(HTTP),
    )
    response_store_ttl_s: PositiveFloat = Field(
        default=86_400.0, description="seconds after which a kept response goes", json_schema_extra=cli_option(HTTP)
    )

    @property
    def shares_responses(self) -> bool:
        """Whether other processes find the responses that this one keeps."""
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
    def _responses_are_found_by_all(self) -> FrontendConfig:
        if self.workers > 1 and not self.shares_responses:
            raise ValueError(
                f"--response-store memory is one process's own, and --workers {self.workers} take turns: a response "
                "would be found only by chance; use jetstream, or one worker"
            )
        return self
