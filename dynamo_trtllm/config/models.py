"""Define the settings of workers and frontends.

Each field is a flag, an environment variable and a line of help.

The models are frozen pydantic models. `load.load` fills them from argv and environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dynamo_trtllm.config.config_base import (
    INPROC,
    MEMORY,
    ClusterRole,
    Endpoint,
    EngineName,
    Fraction,
    IpAddress,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    Origins,
    OtlpEndpoint,
    Port,
    PositiveFloat,
    PositiveInt,
    ReachableHost,
    RoleName,
    option,
)
from dynamo_trtllm.config.engine_names import BUILT_IN
from dynamo_trtllm.config.http_access import HttpAccessConfig
from dynamo_trtllm.config.routing import RoutingConfig
from dynamo_trtllm.config.token_counts import TokenCount
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.shares import Shares

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out


class WorkerConfig(HttpAccessConfig):
    """Run one worker: an engine that serves prefill, decode or complete requests of one model.

    examples, one prefill and one decode worker of the same model:
      %(prog)s --model-path /models/tiny --engine torch --disaggregation-mode prefill \\
        --max-num-tokens 8192
      %(prog)s --model-path /models/tiny --engine torch --disaggregation-mode decode \\
        --max-batch-size 64
    """

    cluster_role: ClassVar[ClusterRole] = ClusterRole.WORKER

    # In the fields below, None selects the engine's own default.
    model_path: str = option(
        "model", ..., aliases=("--model",), help="Model folder or bundled model name."
    )
    served_model_name: NonEmpty | None = option(
        "model", None, help="Name that clients send as `model`. Default: the name of the folder."
    )
    dyn_reasoning_parser: Literal["gpt_oss", "basic", "deepseek_r1", "none"] | None = option(
        "model",
        None,
        env="DYN_REASONING_PARSER",
        help="Reasoning parser: gpt_oss (Harmony), basic (text between <think> and </think>),"
        " deepseek_r1 (text up to </think>), none. Default: chosen by the model's format.",
    )
    dyn_tool_call_parser: Literal["harmony", "hermes", "json", "none"] | None = option(
        "model",
        None,
        env="DYN_TOOL_CALL_PARSER",
        help="Tool-call parser: harmony, hermes (JSON in <tool_call> tags), json (the answer is a"
        " call), none. Default: chosen by the model's format.",
    )
    generation_config: Literal["auto", "none"] = option(
        "model",
        "auto",
        help="auto: requests default to temperature, top_p, top_k, min_p and repetition_penalty of"
        " the model's generation_config.json. none: they use the API's defaults.",
    )
    custom_jinja_template: Path | None = option(
        "model",
        None,
        env="DYN_CUSTOM_JINJA_TEMPLATE",
        help="Chat template (Jinja) instead of the model's own. Pass it to all workers of the"
        " model. Not for gpt-oss, whose format (Harmony) has no template.",
    )
    max_seq_len: TokenCount | None = option(
        "model",
        None,
        aliases=("--max-model-len",),
        help="Maximum prompt and output tokens per request, such as 8192, 8k (8,000) or 8K"
        " (8,192).",
    )
    engine: EngineName | None = option(
        "engine",
        None,
        words=tuple(BUILT_IN),
        help="Inference engine: trtllm (TensorRT-LLM), vllm, torch (transformers on CPU or GPU),"
        " mock (no weights), or an engine that another package provides. Default: trtllm if"
        " TensorRT-LLM is installed; otherwise this flag is required.",
    )
    extra_engine_args: Path | None = option(
        "engine", None, help="YAML file of engine arguments. Flags override its values."
    )
    kernels_profile: str | None = option(
        "engine",
        None,
        help="Kernel profile: a name in kernels_config/, or a file. Default: chosen by the GPU.",
    )
    override_engine_args: dict[str, Any] | None = option(
        "engine", None, help="JSON object of engine arguments. It overrides file and flags."
    )
    dump_config_to: Path | None = option(
        "engine",
        None,
        env="DYN_DUMP_CONFIG_TO",
        help="Write the merged engine arguments to this YAML file, each with its source.",
    )
    print_environment: bool = option(
        "engine",
        False,
        help="Print the variables that TensorRT-LLM reads on each node of an engine on several"
        " nodes (of the kernel profile and --compile-cache), as lines for a shell, and exit. A"
        " variable that is set keeps its value.",
    )
    load_format: Literal["auto", "dummy"] | None = option(
        "engine",
        None,
        help="auto: read the model's weights. dummy: use random weights, which need no weight"
        " files and give meaningless answers.",
    )
    compile_cache: Path | None = option(
        "engine",
        None,
        help="Folder for compiled kernels (vllm, trtllm). Later starts with the same model, GPU,"
        " engine version and arguments use them, on other machines, too. Default: the libraries'"
        " own folders.",
    )
    warm_up_budget_s: NonNegativeFloat = option(
        "engine",
        120.0,
        help="Maximum seconds of the warm-up before the worker registers, in which kernels are"
        " compiled. A step that runs at its end is finished. 0: only one request.",
    )
    max_num_tokens: TokenCount | None = option(
        "engine", None, help="Maximum tokens in one engine step, such as 8192, 8k or 8K."
    )
    max_batch_size: PositiveInt | None = option(
        "engine", None, help="Maximum requests in one engine step."
    )
    tensor_parallel_size: PositiveInt | None = option(
        "engine", None, aliases=("--tp",), help="Number of GPUs over which each layer is split."
    )
    expert_parallel_size: PositiveInt | None = option(
        "engine", None, help="Number of GPUs over which experts are spread."
    )
    pipeline_parallel_size: PositiveInt | None = option(
        "engine", None, help="Number of GPUs over which layers are spread."
    )
    enable_attention_dp: bool | None = option(
        "engine",
        None,
        help="Attention data parallelism (trtllm): each of the GPUs of --tensor-parallel-size"
        " computes the attention of its own requests.",
    )
    gpus_per_node: PositiveInt | None = option(
        "engine",
        None,
        help="GPUs on each node of an engine on several nodes (trtllm). Default: TensorRT-LLM"
        " counts them.",
    )
    max_beam_width: PositiveInt | None = option(
        "engine",
        None,
        help="Maximum beams of a request (trtllm). Requests to this frontend use one.",
    )
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = option(
        "engine",
        None,
        help="Library for structured output (trtllm). Default: none; requests for structured"
        " output are rejected.",
    )
    disaggregation_mode: RoleName = option(
        "role",
        Role.AGGREGATED,
        env=(
            "DYN_VLLM_DISAGGREGATION_MODE",
            "DYN_VLLM_IS_PREFILL_WORKER",
            "DYN_VLLM_IS_DECODE_WORKER",
        ),
        const_flags={"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"},
        help="Role of this worker; with --engine vllm it is decode unless it is set. agg and pd"
        " are other names of prefill_and_decode. elastic: any of them, chosen for each request by"
        " shares that can change at any time (mock, torch, vllm).",
    )
    prefill_share: Fraction = option(
        "role",
        1.0,
        help="How much of a prefill worker's work an elastic worker takes, from 0 to 1, until"
        " `dynamo-trtllm shares` or a planner sets another share.",
    )
    decode_share: Fraction = option(
        "role",
        1.0,
        help="How much of a decode worker's work an elastic worker takes, from 0 to 1. It can't be"
        " 0 if --prefill-share is 0.",
    )
    disaggregation_strategy: Literal["prefill_first", "decode_first"] = option(
        "role",
        "prefill_first",
        help="Phase that starts first. decode_first reserves a decode slot before the prompt is"
        " processed. Prefill and decode workers need the same value.",
    )
    endpoint: Endpoint | None = option(
        "role",
        None,
        env="DYN_ENDPOINT",
        help="Endpoint as dyn://NAMESPACE.COMPONENT.ENDPOINT. Default: chosen by role.",
    )
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = option(
        "KV cache and transfer",
        None,
        aliases=("--gpu-memory-utilization",),
        help="Fraction of the GPU memory left after weights that the KV cache takes. With --engine"
        " vllm: fraction of the whole GPU memory that the engine takes, weights included.",
    )
    kv_block_size: PositiveInt | None = option(
        "KV cache and transfer",
        None,
        help="Tokens per KV block. Prefill and decode workers need the same value.",
    )
    publish_kv_events: bool = option(
        "KV cache and transfer",
        False,
        env="DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS",
        help="Publish which prompt prefixes the prefix cache has, for frontends with --router-mode"
        " kv.",
    )
    max_transfer_kv_fraction: Annotated[float, Field(gt=0, lt=1)] = option(
        "KV cache and transfer",
        0.4,
        help="Fraction of the KV blocks of an elastic worker that KV for other workers may take."
        " Prefill calls beyond it go to other workers. The rest is for its own decode calls, which"
        " have prompts and output.",
    )
    kv_transfer_ttl_s: PositiveFloat = option(
        "KV cache and transfer", 60.0, help="Seconds until KV that was not fetched is freed."
    )
    kv_fetch_timeout_s: PositiveFloat = option(
        "KV cache and transfer", 30.0, help="Maximum seconds to fetch a prompt's KV."
    )
    kv_transfer_host: ReachableHost | None = option(
        "KV cache and transfer",
        None,
        help="Address or name at which other workers reach this host for KV over TCP, or for the"
        " handshake of --engine vllm. Default: the local address that routes to NATS, else to"
        " etcd, else 127.0.0.1.",
    )
    kv_transfer_bind_host: IpAddress | None = option(
        "KV cache and transfer",
        None,
        help="IP address to listen on for KV over TCP; 0.0.0.0 and :: mean every interface."
        " Default: --kv-transfer-host.",
    )
    kv_transfer_key_file: Path | None = option(
        "KV cache and transfer",
        None,
        help="File with one key per line, the same for all workers: the first signs KV transfers,"
        " all verify them. Read again when it changes. Default: KV transfers are not signed.",
    )
    max_queued_requests: NonNegativeInt = option(
        "engine",
        1024,
        help="Maximum requests that a worker accepts beyond --max-batch-size. Further ones are"
        " rejected.",
    )
    lease_ttl_s: PositiveFloat = option(
        "control plane", 10.0, help="Seconds until a dead worker's lease expires."
    )
    stall_timeout_s: PositiveFloat = option(
        "control plane",
        10.0,
        help="Seconds without an answer after which a frontend counts as dead and the worker"
        " cancels its requests.",
    )
    system_host: NonEmpty = option(
        "process",
        "0.0.0.0",
        env="DYN_SYSTEM_HOST",
        help="Address that --system-port listens on. The default accepts connections from other"
        " machines, which get only /live and /ready unless they have an API key, or"
        " --allow-anonymous is set. The launcher sets 127.0.0.1.",
    )
    system_port: Port | None = option(
        "process",
        None,
        env="DYN_SYSTEM_PORT",
        help="Port for /live, /ready, /health and /metrics; 0 takes a free one. Default: disabled,"
        " or a free loopback port when the launcher starts the worker.",
    )
    drain_timeout_s: PositiveFloat = option(
        "process",
        30.0,
        env="DYN_PREFILL_DRAIN_TIMEOUT_S",
        help="Maximum time in seconds to drain at shutdown.",
    )

    @model_validator(mode="after")
    def _has_valid_shares(self) -> WorkerConfig:
        is_elastic = self.disaggregation_mode is Role.ELASTIC
        if not is_elastic and (self.prefill_share, self.decode_share) != (1.0, 1.0):
            raise ValueError(
                "--prefill-share and --decode-share are for --disaggregation-mode elastic; the role"
                f" {self.disaggregation_mode} fixes them; leave them out"
            )
        if not is_elastic and "max_transfer_kv_fraction" in self.model_fields_set:
            raise ValueError(
                "--max-transfer-kv-fraction has an effect only with --disaggregation-mode elastic,"
                f" not {self.disaggregation_mode}; leave it out"
            )
        problem = Shares(self.prefill_share, self.decode_share).problem
        if problem:
            raise ValueError(f"--prefill-share and --decode-share: {problem}")
        return self

    @property
    def model_name(self) -> str:
        """Return the name that clients send as `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        _, _, folder_name = self.model_path.rstrip("/").rpartition("/")
        return folder_name

    @model_validator(mode="before")
    @classmethod
    def _role_of_engine(cls, data: Any) -> Any:
        """Default the role to that of the engine, as Dynamo does."""
        if not isinstance(data, dict):
            return data  # pydantic reports it
        engine = BUILT_IN.get(str(data.get("engine")))
        if engine is None or engine.default_role is Role.AGGREGATED:
            return data
        return {"disaggregation_mode": engine.default_role, **data}


class FrontendConfig(RoutingConfig):
    """OpenAI-compatible HTTP frontend: renders prompts, routes to prefill and decode workers,
    streams output.
    """

    cluster_role: ClassVar[ClusterRole] = ClusterRole.FRONTEND

    http_port: Port = option(
        "HTTP and routing",
        8000,
        env="DYN_HTTP_PORT",
        aliases=("--port",),
        help="Port to listen on; 0 takes a free one.",
    )
    cors_origins: Origins | None = option(
        "HTTP and routing",
        None,
        help="Origins whose pages browsers let call this server (CORS), separated by commas; * for"
        " all. Default: none.",
    )
    workers: PositiveInt = option(
        "HTTP and routing",
        1,
        help="Number of frontend processes that share the port. Limits of connections, generations"
        " and queues apply to each process.",
    )
    unknown_fields: Literal["reject", "warn", "ignore"] = option(
        "HTTP and routing",
        "warn",
        env="DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS",
        help="Unknown fields of requests: warn (ignore them, name them in the response header"
        " x-dynamo-ignored-fields, in the log and in /metrics, and reject misspelled ones), reject"
        " (status 400), ignore (all of them, naming none).",
    )
    console: bool = option(
        "HTTP and routing",
        True,
        help="Serve the console at /: a page that shows the deployment live. With API keys, it asks"
        " for one.",
    )
    request_timeout_s: PositiveFloat = option(
        "HTTP and routing",
        600.0,
        help="Maximum seconds of a request. A request can set a shorter limit with `timeout`.",
    )
    max_connections: PositiveInt = option(
        "HTTP and routing",
        8192,
        help="Maximum connections that run requests; further requests get 429. If more than this"
        " number and 256 are open, idle ones are closed.",
    )
    max_header_bytes: PositiveInt = option(
        "HTTP and routing",
        64 << 10,
        help="Maximum bytes of a request head (else 431). It has at most 100 headers.",
    )
    receive_timeout_s: PositiveFloat = option(
        "HTTP and routing",
        60.0,
        help="Maximum seconds to receive the head of a request, and then its body. Slower ones are"
        " answered with 408.",
    )
    keep_alive_timeout_s: PositiveFloat = option(
        "HTTP and routing", 75.0, help="Seconds until an idle connection is closed."
    )
    sse_keep_alive_s: NonNegativeFloat = option(
        "HTTP and routing",
        0.0,
        aliases=("--sse-keep-alive-interval",),
        env="DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS",
        help="Seconds of silence after which a streamed response sends its headers, and then SSE"
        " comments, so that proxies do not close the connection. Later errors are events of the"
        " stream. 0: off.",
    )
    max_body_bytes: PositiveInt = option(
        "HTTP and routing",
        8 << 20,
        env="DYN_HTTP_BODY_LIMIT_MB",
        help="Maximum size of a request body in bytes. Larger bodies are answered with 413.",
    )
    max_total_body_bytes: PositiveInt = option(
        "HTTP and routing",
        256 << 20,
        help="Maximum bytes of all request bodies together that are being received or parsed."
        " Further bodies wait for at most 5 s, then they are answered with 429.",
    )
    max_inflight: PositiveInt = option(
        "HTTP and routing",
        4096,
        help="Maximum concurrent generations (n=4 counts as 4). Others are queued.",
    )
    max_queued: NonNegativeInt = option(
        "HTTP and routing",
        1024,
        help="Maximum queued requests while --max-inflight is reached. Clients take turns. Further"
        " ones are answered with 429.",
    )
    retry_limit: NonNegativeInt = option(
        "HTTP and routing",
        3,
        help="Maximum retries of a request that fails before its decode worker has sent a token, on"
        " another worker if there is one.",
    )
    migration_limit: NonNegativeInt = option(
        "HTTP and routing",
        3,
        env="DYN_MIGRATION_LIMIT",
        help="Maximum migrations of a request. When its worker dies, another one continues from"
        " the tokens so far.",
    )
    hold_for_roles_s: NonNegativeFloat = option(
        "HTTP and routing",
        5.0,
        aliases=("--hold-for-roles",),
        help="Maximum seconds that a request waits for a role that has no worker, before 503.",
    )
    early_token_pause_ms: NonNegativeFloat | None = option(
        "HTTP and routing",
        None,
        help="Send the first token of a request when its prefill worker answers, if the decode"
        " worker lately answered within these milliseconds. The client then waits for the KV after"
        " its first token, and not before it; an error after it is an event of the stream. 0:"
        " never. Default: three quarters of --slo-itl-ms, and 75 without it.",
    )
    decode_fallback: bool = option(
        "HTTP and routing",
        False,
        help="If no prefill worker is available, send aggregated requests to decode workers whose"
        " engine supports them.",
    )
    probe_interval_s: NonNegativeFloat = option(
        "HTTP and routing",
        30.0,
        env="DYN_CANARY_WAIT_TIME",
        help="Seconds after which an idle pair is probed. 0: no probes, and a model is ready as"
        " soon as matching workers of each role are registered.",
    )
    probe_timeout_s: PositiveFloat = option(
        "HTTP and routing", 10.0, help="Maximum seconds for each request of a probe."
    )
    stall_timeout_s: PositiveFloat = option(
        "HTTP and routing",
        5.0,
        aliases=("--stall-timeout",),
        help="Seconds without an answer after which a worker counts as dead; also the maximum wait"
        " for the acknowledgment of a request. Streams are checked for lost messages three times"
        " in this time.",
    )
    otlp_endpoint: OtlpEndpoint | None = option(
        "HTTP and routing",
        None,
        env="OTEL_EXPORTER_OTLP_ENDPOINT",
        help="Base URL of an OpenTelemetry collector, Jaeger or Tempo, which gets a trace of each"
        " request (OTLP over HTTP, as JSON). Default: no traces.",
    )
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = option(
        "HTTP and routing",
        1.0,
        env="OTEL_TRACES_SAMPLER_ARG",
        help="Share of the requests with a trace, from 0 to 1. The sampling flag of a client's"
        " traceparent header takes precedence.",
    )
    response_store: Literal["auto", "memory", "jetstream"] = option(
        "HTTP and routing",
        "auto",
        help="Store of responses for previous_response_id and GET: memory (of one frontend"
        " process), jetstream (NATS, shared by all frontends of the namespace; needs nats-server"
        " -js), auto (jetstream with several --workers, else memory).",
    )
    response_store_entries: PositiveInt = option(
        "HTTP and routing",
        10_000,
        help="Maximum responses stored in memory. Beyond it, the client address with the most"
        " loses its oldest.",
    )
    response_store_bytes: PositiveInt = option(
        "HTTP and routing",
        256 << 20,
        help="Maximum bytes of stored responses. Beyond it, the client address with the most loses"
        " its oldest (memory), or the oldest are deleted (jetstream).",
    )
    response_store_entry_bytes: PositiveInt = option(
        "HTTP and routing",
        4 << 20,
        help="Maximum bytes of one stored response with its conversation. Longer ones need store:"
        " false.",
    )
    response_store_ttl_s: PositiveFloat = option(
        "HTTP and routing", 86_400.0, help="Seconds until a stored response is deleted."
    )

    @property
    def allowed_origins(self) -> frozenset[str]:
        """Return the origins of --cors-origins as browsers send them; "*" means all."""
        if not self.cors_origins:
            return frozenset()
        origins = set()
        for origin in self.cors_origins.lower().split(","):
            scheme, _, _ = origin.partition("://")
            origins.add(origin.removesuffix(_DEFAULT_PORTS.get(scheme, "")))
        return frozenset(origins)

    @property
    def shares_responses(self) -> bool:
        """Return True if all frontend processes use the same response store."""
        if self.response_store == "auto":
            return self.workers > 1
        return self.response_store == "jetstream"

    @model_validator(mode="after")
    def _settings_fit(self) -> FrontendConfig:
        """Reject limits and stores that contradict."""
        if 2 * self.max_body_bytes > self.max_total_body_bytes:
            raise ValueError(
                f"--max-total-body-bytes {self.max_total_body_bytes} must be at least twice"
                f" --max-body-bytes {self.max_body_bytes}; raise it or lower --max-body-bytes"
            )
        if self.workers > 1 and (self.uses_inproc_plane or self.uses_memory_discovery):
            raise ValueError(
                f"--workers {self.workers} starts several processes, which {MEMORY} and {INPROC} do"
                " not connect; use etcd and NATS servers, or --workers 1"
            )
        if self.shares_responses and self.uses_inproc_plane:
            raise ValueError(
                f"--response-store jetstream is in a NATS server, which --nats-server {INPROC} is"
                " not; use --response-store memory, or a NATS server"
            )
        if self.workers > 1 and not self.shares_responses:
            raise ValueError(
                f"--response-store memory cannot be combined with --workers {self.workers} (each"
                " process has its own store); use --response-store jetstream or --workers 1"
            )
        return self
