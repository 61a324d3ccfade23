from dynamo_trtllm.config.models import FrontendConfig, WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo
from dynamo_trtllm.engines.factory import create_engine
from dynamo_trtllm.frontend.http.hooks import FrontendRequest, FrontendResponse, Refusal
from dynamo_trtllm.frontend.process.frontend import Frontend
from dynamo_trtllm.launch.embedded import EmbeddedDeployment, serve
from dynamo_trtllm.protocol.errors import ConfigError, DynamoError
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, Phase, Role, Sampling
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.worker.worker import Worker

__version__: str
__all__ = [
    "Chunk",
    "ConfigError",
    "DynamoError",
    "EmbeddedDeployment",
    "Engine",
    "EngineInfo",
    "Frontend",
    "FrontendConfig",
    "FrontendRequest",
    "FrontendResponse",
    "GenerateRequest",
    "Phase",
    "Refusal",
    "Role",
    "Sampling",
    "Worker",
    "WorkerConfig",
    "as_stream",
    "create_engine",
    "serve",
]
