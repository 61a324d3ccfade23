"""Every setting of a worker and a frontend: one field, one flag, one environment twin, one line of help.

Plain frozen pydantic models; building one reads no environment. `load` fills them from argv, environment and YAML.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dynamo_trtllm.messages import Role

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
EngineName = Literal["torch", "mock"]


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ConnectionConfig(Config):
    """What worker and frontend share."""

    namespace: str = Field("dynamo", description="deployment name; workers and frontends see only their own")
    etcd_endpoints: str = Field("http://localhost:2379", description="etcd addresses, comma-separated")
    nats_server: str = Field("nats://localhost:4222", description="NATS address")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")


class WorkerConfig(ConnectionConfig):
    """`python -m dynamo_trtllm`. None means: the engine's own default."""

    model_path: str = Field(description="model folder")
    served_model_name: str | None = Field(None, description="name clients send as `model`; default: the folder's name")
    engine: EngineName | None = Field(None, description="what computes tokens")
    disaggregation_mode: Role = Field(Role.AGGREGATED, description="what this worker does")
    disaggregation_strategy: Literal["prefill_first"] = Field("prefill_first", description="which leg begins")
    endpoint: str | None = Field(None, description="dyn://NAMESPACE.COMPONENT.ENDPOINT; default by role")
    extra_engine_args: Path | None = Field(None, description="YAML file of engine arguments")
    override_engine_args: dict[str, Any] | None = Field(None, description="JSON object of engine arguments; beats all")
    max_num_tokens: PositiveInt | None = Field(None, description="tokens in one engine step")
    max_batch_size: PositiveInt | None = Field(None, description="requests in one engine step")
    max_seq_len: PositiveInt | None = Field(None, description="prompt and output tokens of one request")
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share of the GPU memory left after weights that KV takes"
    )
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs over which each layer is split")
    expert_parallel_size: PositiveInt | None = Field(None, description="GPUs over which experts are spread")
    pipeline_parallel_size: PositiveInt = Field(1, description="GPUs over which layers are spread")
    kv_block_size: PositiveInt | None = Field(None, description="tokens in one KV block")
    publish_kv_events: bool = Field(False, description="publish stored and removed KV blocks")
    dyn_reasoning_parser: str | None = Field(None, description="how reasoning is parsed: gpt_oss")
    dyn_tool_call_parser: str | None = Field(None, description="how tool calls are parsed: harmony")
    system_port: Port | None = Field(None, description="port of /live /ready /health /metrics; 0 takes a free one")
    lease_ttl_s: PositiveFloat = Field(10.0, description="a worker that dies is forgotten after this")
    ticket_ttl_s: PositiveFloat = Field(60.0, description="KV that nobody fetched is freed after this")
    drain_timeout_s: PositiveFloat = Field(30.0, description="longest wait for running requests when stopping")


class FrontendConfig(ConnectionConfig):
    """`python -m dynamo_trtllm.frontend`."""

    http_host: str = Field("0.0.0.0", description="address to listen on")
    http_port: Port = Field(8000, description="port to listen on; 0 takes a free one")
    router_mode: Literal["round-robin"] = Field("round-robin", description="how an instance is chosen")
    request_timeout_s: PositiveFloat = Field(600.0, description="deadline of a request")
    max_body_bytes: PositiveInt = Field(32 << 20, description="largest request body")
    max_inflight: PositiveInt = Field(4096, description="requests at once; one more is answered 429")
