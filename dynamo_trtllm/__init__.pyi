from dynamo_trtllm.config.engine_names import EngineTraits
from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.arguments import engine_arguments
from dynamo_trtllm.engines.capabilities import (
    ChecksHealth,
    MeasuresSteps,
    PublishesKvEvents,
    ReportsProgress,
    RunsPreflight,
    Sleeps,
    TransfersKv,
)
from dynamo_trtllm.engines.engine_interface import (
    Engine,
    EngineInfo,
    EngineStats,
    Finding,
    check_request,
    stop_token_ids,
)
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.frontend.http.hooks import FrontendRequest, FrontendResponse, Refusal
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.launch.embedded import EmbeddedDeployment, serve
from dynamo_trtllm.protocol.cost_model import StepSample
from dynamo_trtllm.protocol.errors import (
    ConfigError,
    ContextTooLong,
    DynamoError,
    EngineFailed,
    KvTransferError,
    Overloaded,
    RequestRejected,
    TransferExpired,
    TransferFailed,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvBlock,
    OnKvEvents,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Instance,
    KvLayout,
    KvTransferParams,
    Limits,
    Phase,
    PhaseTimings,
    ReleaseOutcome,
    Role,
    Sampling,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import OnEvent, Stream, StreamHandle, TaskStream, as_stream
from dynamo_trtllm.worker.worker import Worker

__version__: str

__all__ = [
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "ChecksHealth",
    "Chunk",
    "ConfigError",
    "ContextTooLong",
    "DynamoError",
    "EmbeddedDeployment",
    "Engine",
    "EngineFailed",
    "EngineInfo",
    "EngineStats",
    "EngineTraits",
    "Finding",
    "FinishReason",
    "Frontend",
    "FrontendConfig",
    "FrontendRequest",
    "FrontendResponse",
    "GenerateRequest",
    "Instance",
    "KvBlock",
    "KvLayout",
    "KvTransferError",
    "KvTransferParams",
    "Limits",
    "MeasuresSteps",
    "OnEvent",
    "OnKvEvents",
    "Overloaded",
    "Phase",
    "PhaseTimings",
    "PublishesKvEvents",
    "Refusal",
    "ReleaseOutcome",
    "ReportsProgress",
    "RequestRejected",
    "Role",
    "RunsPreflight",
    "Sampling",
    "Sleeps",
    "StepSample",
    "Stream",
    "StreamHandle",
    "TaskStream",
    "TokenLogprob",
    "TransferExpired",
    "TransferFailed",
    "TransferMismatch",
    "TransferTimeout",
    "TransfersKv",
    "Worker",
    "WorkerConfig",
    "as_stream",
    "check_request",
    "create_engine",
    "engine_arguments",
    "serve",
    "stop_token_ids",
    "token_ids",
]
