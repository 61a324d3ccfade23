"""Map the environment variables of NVIDIA Dynamo to our options, or say why one has no effect.

The names are those of ai-dynamo/dynamo 1.0 to 1.6 and of its main branch for 1.7, in these files:
- lib/runtime/src/config/environment_names.rs (commit 00ebc550)
- notes/env-vars/perf-classification.md (commit 6bdfae9d), a catalog of all launch settings
- components/src/dynamo/{frontend,router,trtllm,vllm}/*args.py
- components/src/dynamo/common/configuration/groups/*.py (commits 021d6169, 007ec174)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from dynamo_trtllm.config.dynamo_values import (
    FALSE,
    TRUE,
    bytes_of_mebibytes,
    console_format,
    endpoint,
    log_level,
    port,
    seconds_of_milliseconds,
    word,
)

PREFIX = "DYN_"
# The kinds of process that read a variable. An engine's name means: workers with that engine.
FRONTEND = "frontend"
WORKER = "worker"
VLLM = "vllm"
OTHER = "other"
BOTH = (FRONTEND, WORKER)


class Variable(NamedTuple):
    """A variable of Dynamo. An option that has its name as `env` takes its value."""

    processes: tuple[str, ...]
    reason: str = ""  # why it has no effect in a process without such an option, and what to do
    no_op_values: tuple[str, ...] = ()  # values that ask for what happens anyway
    convert: Callable[[str, str], str | None] | None = None  # value and name -> value of the option
    form: str = ""  # how the value differs from the option's


_OF_OPTIONS: dict[str, Variable] = {
    "DYN_NAMESPACE": Variable(BOTH),
    "DYN_LOG": Variable(
        BOTH,
        convert=log_level,
        form="the part without a module counts; warn is warning, trace is debug, off is error",
    ),
    "DYN_LOGGING_JSONL": Variable(
        BOTH,
        convert=word("json", "text"),
        form="true is json, false is text",
    ),
    "DYN_LOGGING_CONSOLE_FORMAT": Variable(
        BOTH,
        convert=console_format,
        form="jsonl is json, readable is text",
    ),
    "DYN_HTTP_HOST": Variable((FRONTEND,)),
    "DYN_HTTP_PORT": Variable((FRONTEND,)),
    "DYN_TLS_CERT_PATH": Variable(BOTH),
    "DYN_TLS_KEY_PATH": Variable(BOTH),
    "DYN_TLS_CLIENT_CA_CERT_PATH": Variable(BOTH),
    "DYN_HTTP_BODY_LIMIT_MB": Variable(
        (FRONTEND,),
        convert=bytes_of_mebibytes,
        form="in MiB",
    ),
    "DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS": Variable(
        (FRONTEND,),
        convert=seconds_of_milliseconds,
        form="in milliseconds",
    ),
    "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": Variable(
        (FRONTEND,),
        convert=word("ignore", "reject"),
        form="true is ignore, false is reject",
    ),
    "DYN_ROUTER_MODE": Variable((FRONTEND,)),
    "DYN_ROUTER_USE_KV_EVENTS": Variable((FRONTEND,)),
    "DYN_USE_KV_EVENTS": Variable((FRONTEND,)),
    "DYN_ROUTER_TTL_SECS": Variable((FRONTEND,)),
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": Variable((FRONTEND,)),
    "DYN_ROUTER_TEMPERATURE": Variable((FRONTEND,)),
    "DYN_MIGRATION_LIMIT": Variable((FRONTEND,)),
    "DYN_CANARY_WAIT_TIME": Variable(BOTH, "set it, or --probe-interval-s, for the frontend"),
    "DYN_ENDPOINT": Variable(
        (WORKER,),
        convert=endpoint,
        form="with or without dyn://",
    ),
    "DYN_SYSTEM_HOST": Variable((WORKER,)),
    "DYN_SYSTEM_PORT": Variable(
        (WORKER,),
        convert=port,
        form="-1 is the default",
    ),
    "DYN_PREFILL_DRAIN_TIMEOUT_S": Variable((WORKER,)),
    "DYN_TOOL_CALL_PARSER": Variable((WORKER,)),
    "DYN_REASONING_PARSER": Variable((WORKER,)),
    "DYN_CUSTOM_JINJA_TEMPLATE": Variable((WORKER,)),
    "DYN_DUMP_CONFIG_TO": Variable(BOTH, "--print-config shows the settings"),
    "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS": Variable((WORKER,)),
    "DYN_VLLM_DISAGGREGATION_MODE": Variable((VLLM,)),
    "DYN_VLLM_IS_PREFILL_WORKER": Variable(
        (VLLM,),
        convert=word("prefill", None),
        form="true is prefill",
    ),
    "DYN_VLLM_IS_DECODE_WORKER": Variable(
        (VLLM,),
        convert=word("decode", None),
        form="true is decode",
    ),
}


class _Group(NamedTuple):
    """Variables that have no effect for the same reason. A `*` at the end stands for any rest."""

    processes: tuple[str, ...]
    reason: str
    names: str
    no_op_values: tuple[str, ...] = ()


_NATS = "requests, tokens and events always travel over NATS"
_DISCOVERY = "discovery is always etcd"
_IMAGES = "only text models are supported"
_QUEUE = "requests queue: see --max-inflight and --max-queued"
_TRACES = "see --otlp-endpoint and dynamo-trtllm explain"
_TUNING = "--router-mode kv has no such setting"

_IGNORED: tuple[_Group, ...] = (
    # transport and discovery
    _Group(
        BOTH,
        _NATS,
        "DYN_REQUEST_PLANE DYN_EVENT_PLANE DYN_RESPONSE_PLANE",
        ("nats",),
    ),
    _Group(
        BOTH,
        _NATS,
        "DYN_REQUEST_PLANE_* DYN_EVENT_PLANE_* DYN_TCP_* DYN_ZMQ_* DYN_NATS_*",
    ),
    _Group(
        BOTH,
        _DISCOVERY,
        "DYN_DISCOVERY_BACKEND DYN_STORE_KV",
        ("etcd",),
    ),
    _Group(
        BOTH,
        _DISCOVERY,
        "DYN_KUBE_DISCOVERY_MODE DYN_FILE_KV",
    ),
    _Group(
        BOTH,
        "set ETCD_ENDPOINTS",
        "DYN_ETCD_ENDPOINTS",
    ),
    _Group(
        (FRONTEND,),
        "a frontend serves one namespace: see --namespace",
        "DYN_NAMESPACE_PREFIX",
    ),
    _Group(
        (WORKER,),
        "the namespace has no suffix: see --namespace",
        "DYN_NAMESPACE_WORKER_SUFFIX",
    ),
    _Group(
        BOTH,
        "Dynamo's operator is not used here",
        "DYN_COMPONENT DYN_PARENT_DGD_* DYN_DEPLOYMENT_CONFIG",
    ),
    _Group(
        BOTH,
        "each start of a worker has its own id and record",
        "DYN_STABLE_ROUTING_ID DYN_SELF_HOST_METADATA",
    ),
    # router
    _Group(
        (FRONTEND,),
        "use --router-mode least-loaded",
        "DYN_ROUTER_LOAD_AWARE",
        FALSE,
    ),
    _Group(
        (FRONTEND,),
        "always on, unless --decode-fallback is given",
        "DYN_ENFORCE_DISAGG",
        TRUE,
    ),
    _Group(
        (FRONTEND,),
        "a request waits for workers: see --hold-for-roles-s",
        "DYN_ROUTER_MIN_INITIAL_WORKERS",
        ("0",),
    ),
    _Group(
        (FRONTEND,),
        _QUEUE,
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD* "
        "DYN_ADMISSION_CONTROL DYN_ROUTER_QUEUE_THRESHOLD DYN_ROUTER_QUEUE_POLICY "
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
        ("none", "None"),
    ),
    _Group(
        (FRONTEND,),
        "use DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT DYN_OVERLAP_SCORE_WEIGHT",
    ),
    _Group(
        (FRONTEND,),
        "workers publish their block size: see their --kv-block-size",
        "DYN_KV_CACHE_BLOCK_SIZE DYN_ROUTER_BLOCK_SIZE",
    ),
    _Group(
        (FRONTEND,),
        _TUNING,
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS DYN_ROUTER_APPROXIMATE_CACHE_POLICY "
        "DYN_ROUTER_ASSUME_KV_REUSE DYN_ROUTER_CONDITIONAL_* DYN_ROUTER_DECODE_* "
        "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT DYN_ROUTER_DURABLE_KV_EVENTS DYN_ROUTER_ENDPOINT "
        "DYN_ROUTER_EVENT_THREADS DYN_ROUTER_HOST_CACHE_HIT_WEIGHT "
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY DYN_ROUTER_MAX_TREE_SIZE "
        "DYN_ROUTER_POLICY_CONFIG DYN_ROUTER_PREDICTED_TTL_SECS DYN_ROUTER_PREFILL_* "
        "DYN_ROUTER_PRUNE_TARGET_RATIO DYN_ROUTER_REPLICA_SYNC DYN_ROUTER_RESET_STATES "
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS DYN_ROUTER_SNAPSHOT_THRESHOLD DYN_ROUTER_TRACK_* "
        "DYN_ROUTER_TRACKING_* DYN_SHARED_CACHE_* DYN_USE_REMOTE_INDEXER DYN_SERVE_INDEXER "
        "DYN_ENABLE_SESSION_PREFIX_INDEX DYN_MOONCAKE_KV_EVENTS_ENDPOINT "
        "DYN_ENCODER_CUDA_TO_CPU_RATIO DYN_AIC_* DYN_AIS_*",
    ),
    # HTTP and API
    _Group(
        (FRONTEND,),
        "run dynamo-trtllm chat",
        "DYN_INTERACTIVE",
        FALSE,
    ),
    _Group(
        (FRONTEND,),
        "workers register their models: see --served-model-name",
        "DYN_MODEL_NAME DYN_MODEL_PATH",
    ),
    _Group(
        (FRONTEND,),
        "see --stall-timeout-s and --request-timeout-s",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
    ),
    _Group(
        (FRONTEND,),
        "running requests have 30 s at shutdown",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    ),
    _Group(
        (FRONTEND,),
        "an error before the first token has its own status: see --sse-keep-alive-s",
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS",
    ),
    _Group(
        (FRONTEND,),
        "paths of the API are fixed",
        "DYN_HTTP_SVC_*",
    ),
    _Group(
        (FRONTEND,),
        "names and buckets of metrics are fixed",
        "DYN_METRICS_* DYN_HISTOGRAM_*",
    ),
    _Group(
        (FRONTEND,),
        "use --max-seq-len of the workers",
        "DYN_CONTEXT_WINDOW DYN_MAX_OUTPUT_TOKENS",
    ),
    _Group(
        (FRONTEND,),
        "requests of any length can migrate",
        "DYN_MIGRATION_MAX_SEQ_LEN",
    ),
    _Group(
        (FRONTEND,),
        "the limit is raised as far as the system allows",
        "DYN_FRONTEND_FD_LIMIT_TARGET",
    ),
    _Group(
        (FRONTEND,),
        "fastokens is used wherever it supports the tokenizer",
        "DYN_TOKENIZER",
        ("fastokens",),
    ),
    _Group(
        (FRONTEND,),
        "the tokenizer has no such setting",
        "DYN_TOKENIZER_*",
    ),
    _Group(
        (FRONTEND,),
        "prompts are always rendered by the frontend",
        "DYN_CHAT_PROCESSOR",
        ("dynamo",),
    ),
    _Group(
        (FRONTEND,),
        "use --workers for more processes",
        "DYN_PREPROCESS_WORKERS",
        ("0",),
    ),
    _Group(
        (FRONTEND,),
        "both fields have it: reasoning_content and reasoning",
        "DYN_REASONING_FIELD_NAME",
        ("reasoning_content", "reasoning"),
    ),
    _Group(
        (FRONTEND,),
        "code of a model's repository is never run in a frontend",
        "DYN_TRUST_REMOTE_CODE",
        FALSE,
    ),
    _Group(
        (FRONTEND,),
        "/v1/messages is always served",
        "DYN_ENABLE_ANTHROPIC_API",
        TRUE,
    ),
    _Group(
        (FRONTEND,),
        "the billing line of Claude Code is never part of a prompt",
        "DYN_STRIP_ANTHROPIC_PREAMBLE",
        TRUE,
    ),
    _Group(
        (FRONTEND,),
        "not supported",
        "DYN_KSERVE_GRPC_SERVER DYN_GRPC_METRICS_PORT DYN_ENABLE_STREAMING_TOOL_DISPATCH "
        "DYN_ENABLE_STREAMING_REASONING_DISPATCH DYN_ENABLE_FORCE_INCLUDE_USAGE "
        "DYN_ENABLE_EXPERIMENTAL_PARSERS_V2 DYN_DISABLE_FRONTEND_NVEXT "
        "DYN_DISABLE_FRONTEND_ADMIN_API DYN_METADATA_HEADER DYN_FRONTEND_ROUTE_EXTENSIONS "
        "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE DYN_VLLM_SKIP_REQUEST_VALIDATION "
        "DYN_VLLM_STREAM_INTERVAL DYN_SGLANG_STREAM_INTERVAL DYN_DEBUG_PERF DYN_RL_PORT "
        "DYN_BATCH_*",
        FALSE,
    ),
    # workers
    _Group(
        (WORKER,),
        "set DYN_SYSTEM_PORT",
        "DYN_SYSTEM_ENABLED",
    ),
    _Group(
        (WORKER,),
        "the path is fixed",
        "DYN_SYSTEM_HEALTH_PATH",
        ("/health",),
    ),
    _Group(
        (WORKER,),
        "the path is fixed",
        "DYN_SYSTEM_LIVE_PATH",
        ("/live",),
    ),
    _Group(
        (WORKER,),
        "a worker is not ready until it has registered",
        "DYN_SYSTEM_STARTING_HEALTH_STATUS",
        ("notready",),
    ),
    _Group(
        (WORKER,),
        "health is that of engine and registration",
        "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS",
    ),
    _Group(
        (WORKER,),
        "the frontend probes workers: see its --probe-interval-s",
        "DYN_HEALTH_CHECK_* DYN_ENGINE_HEALTH_*",
    ),
    _Group(
        (WORKER,),
        "see --drain-timeout-s",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT DYN_WORKER_SHUTDOWN_* "
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    ),
    _Group(
        (WORKER,),
        "see --max-batch-size and --max-queued-requests",
        "DYN_ENGINE_REQUEST_LIMIT DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
    ),
    _Group(
        (WORKER,),
        "the engine's arguments choose how KV is transferred",
        "DYN_CONNECTOR",
        ("nixl", "null", "none"),
    ),
    _Group(
        (WORKER,),
        "chat and completions are always served",
        "DYN_ENDPOINT_TYPES",
        ("chat,completions",),
    ),
    _Group(
        (WORKER,),
        "requests ask for it, with response_format or tools",
        "DYN_ENABLE_STRUCTURAL_TAG DYN_STRUCTURAL_TAG*",
    ),
    _Group(
        (WORKER,),
        "requests ask for it, with reasoning_effort",
        "DYN_DEFAULT_THINKING_MODE",
    ),
    _Group(
        BOTH,
        "tools are left out of the prompt",
        "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        TRUE,
    ),
    _Group(
        (WORKER,),
        "set kv_cache_routing_conversation_affinity in the file of --extra-engine-args",
        "DYN_ENGINE_CONV_AFFINITY*",
        FALSE,
    ),
    _Group(
        (WORKER,),
        "a worker publishes KV events at its own endpoint",
        "DYN_KV_STATE_ENDPOINT",
    ),
    _Group(
        (WORKER,),
        "workers are not paired by topology",
        "DYN_TOPOLOGY_* DYN_KV_TRANSFER_*",
    ),
    _Group(
        (WORKER,),
        "use the engine's own offloading",
        "DYN_KVBM_* DYN_RUNTIME_ENABLED_KVBM DYN_FATBIN_PATH",
    ),
    _Group(
        BOTH,
        "LoRA adapters are not supported",
        "DYN_LORA_*",
        FALSE,
    ),
    _Group(
        BOTH,
        "reinforcement learning is not supported",
        "DYN_ENABLE_RL",
        FALSE,
    ),
    _Group(
        BOTH,
        _IMAGES,
        "DYN_MM_* DYN_MULTIMODAL_* DYN_MEDIA_OUTPUT_* DYN_CUSTOM_ENCODER_CLASS DYN_SPLIT_ENCODE "
        "DYN_HTTP_CONCURRENCY DYN_HTTP_MAX_CONNECTIONS DYN_HTTP_TIMEOUT "
        "DYN_HTTP_CONNECT_TIMEOUT DYN_HTTP_POOL_TIMEOUT DYN_HTTP_MAX_KEEPALIVE "
        "DYN_HTTP_KEEPALIVE_TIMEOUT",
    ),
    _Group(
        (WORKER,),
        _IMAGES,
        "DYN_OUTPUT_MODALITIES DYN_TRTLLM_MODALITY",
        ("text",),
    ),
    _Group(
        (WORKER,),
        _IMAGES,
        "DYN_TRTLLM_ENABLE_MULTIMODAL DYN_TRTLLM_ENCODE_ENDPOINT "
        "DYN_TRTLLM_ALLOWED_LOCAL_MEDIA_PATH DYN_TRTLLM_MAX_FILE_SIZE_MB "
        "DYN_TRTLLM_FRONTEND_DECODING DYN_TRTLLM_QUANT_ALGO DYN_TRTLLM_QUANT_DYNAMIC "
        "DYN_TRTLLM_ENABLE_TEACACHE DYN_TRTLLM_TEACACHE_USE_RET_STEPS "
        "DYN_TRTLLM_TEACACHE_THRESH DYN_TRTLLM_TORCH_DTYPE DYN_TRTLLM_DISABLE_TORCH_COMPILE "
        "DYN_TRTLLM_ENABLE_FULLGRAPH DYN_TRTLLM_ENABLE_CUDA_GRAPH DYN_TRTLLM_ATTN_BACKEND "
        "DYN_TRTLLM_DIT_ULYSSES_SIZE DYN_TRTLLM_DIT_RING_SIZE DYN_TRTLLM_DIT_CFG_SIZE "
        "DYN_TRTLLM_ENABLE_LAYERWISE_NVTX_MARKER DYN_TRTLLM_SKIP_WARMUP "
        "DYN_TRTLLM_DEFAULT_HEIGHT DYN_TRTLLM_DEFAULT_WIDTH DYN_TRTLLM_DEFAULT_NUM_FRAMES "
        "DYN_TRTLLM_DEFAULT_NUM_IMAGES_PER_PROMPT DYN_TRTLLM_DEFAULT_NUM_INFERENCE_STEPS "
        "DYN_TRTLLM_DEFAULT_GUIDANCE_SCALE",
        FALSE,
    ),
    _Group(
        (WORKER,),
        "it is for a weight loader of Dynamo",
        "DYN_TRTLLM_MODEL_LOADER_EXTRA_CONFIG DYN_GMS_* DYN_VLLM_GMS_*",
    ),
    _Group(
        (WORKER,),
        "not supported",
        "DYN_TRTLLM_SERVER_DISABLE_GC DYN_ENABLE_TEST_LOGITS_PROCESSOR",
        FALSE,
    ),
    _Group(
        (VLLM,),
        "prompts are always rendered by the frontend",
        "DYN_VLLM_USE_TOKENIZER",
        FALSE,
    ),
    _Group(
        (VLLM,),
        "not supported with --engine vllm",
        "DYN_VLLM_*",
        FALSE,
    ),
    _Group(
        (VLLM,),
        "run dynamo-trtllm bench",
        "DYN_BENCHMARK_* DYN_PREFILL_MAX_* DYN_PREFIX_MAX_* DYN_DECODE_MAX_*",
    ),
    # observation
    _Group(
        BOTH,
        "use DYN_LOG, or --log-level",
        "DYN_LOGGING_CONFIG_PATH",
    ),
    _Group(
        BOTH,
        "the format of log lines is that of --log-format",
        "DYN_LOG_USE_LOCAL_TZ DYN_LOGGING_SPAN_EVENTS DYN_SDK_DISABLE_ANSI_LOGGING",
    ),
    _Group(
        BOTH,
        _TRACES,
        "DYN_REQUEST_TRACE* DYN_AUDIT_* DYN_FPM_* DYN_FORWARDPASS_METRIC_PORT",
        FALSE,
    ),
    _Group(
        BOTH,
        "not supported",
        "DYN_ENABLE_RUST_NVTX DYN_NVTX DYN_ENABLE_POLL_HISTOGRAM",
        FALSE,
    ),
    _Group(
        BOTH,
        "Dynamo's Rust runtime is not used here",
        "DYN_RUNTIME_* DYN_COMPUTE_* DYN_MEMORY_DISABLE_NUMA",
    ),
    # processes that are not part of this package
    _Group(
        (OTHER,),
        "it is of another process of Dynamo",
        "DYN_SGL_* DYN_SGLANG_* DYN_SKIP_SGLANG_LOG_FORMATTING DYN_PLANNER_* DYN_MOCKER_* "
        "DYN_RL_ENDPOINT DYN_QUEUED_UP_PROCESSING DYN_SOAK_*",
    ),
)

# The variables by name, or by a pattern with `*`. A name overrides a pattern, and a longer pattern
# a shorter one.
VARIABLES: Mapping[str, Variable] = _OF_OPTIONS | {
    name: Variable(group.processes, group.reason, group.no_op_values)
    for group in _IGNORED
    for name in group.names.split()
}
# The longest pattern that fits counts, so it is tried first.
_PATTERNS = sorted((name for name in VARIABLES if name.endswith("*")), key=len, reverse=True)


def find(name: str) -> Variable | None:
    """Return the variable of Dynamo with this name; None if Dynamo has none."""
    if name in VARIABLES:
        return VARIABLES[name]
    for pattern in _PATTERNS:
        if name.startswith(pattern.removesuffix("*")):
            return VARIABLES[pattern]
    return None


def is_read_by(name: str, processes: AbstractSet[str]) -> bool:
    """Return True unless only processes of other kinds read this variable.

    `processes` are kinds of process. Without any, and for a variable of another project, return
    True.
    """
    variable = VARIABLES.get(name)
    if variable is None or not processes:
        return True
    return not processes.isdisjoint(variable.processes)


def option_value(name: str, text: str) -> str | None:
    """Return the value of an option for the value of a variable; None if it means the default.

    Raises:
        ConfigError: the value is wrong. The message names the variable.
    """
    variable = VARIABLES.get(name)
    if variable is None or variable.convert is None or not text.strip():
        return text
    return variable.convert(text, name)
