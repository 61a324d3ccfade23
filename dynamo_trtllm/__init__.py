"""Disaggregated serving of large language models: prefill and decode run in separate workers.

`docs/embedding.md` describes the public names. Importing the package imports none of them: each is
imported when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# Public names, by the module that has them. `__init__.pyi` has their types.
_MODULES = {
    "BlocksCleared": "protocol.kv_events",
    "BlocksRemoved": "protocol.kv_events",
    "BlocksStored": "protocol.kv_events",
    "ChecksHealth": "engines.capabilities",
    "Chunk": "protocol.messages",
    "ConfigError": "protocol.errors",
    "ContextTooLong": "protocol.errors",
    "DynamoError": "protocol.errors",
    "EmbeddedDeployment": "launch.embedded",
    "Engine": "engines.engine_interface",
    "EngineFailed": "protocol.errors",
    "EngineInfo": "engines.engine_interface",
    "EngineStats": "engines.engine_interface",
    "EngineTraits": "config.engine_names",
    "Finding": "engines.engine_interface",
    "FinishReason": "protocol.messages",
    "Frontend": "frontend.process.frontend",
    "FrontendConfig": "config.models",
    "FrontendRequest": "frontend.http.hooks",
    "FrontendResponse": "frontend.http.hooks",
    "GenerateRequest": "protocol.messages",
    "GuardsKvTransfers": "engines.capabilities",
    "Instance": "protocol.messages",
    "KvBlock": "protocol.kv_events",
    "KvLayout": "protocol.messages",
    "KvTransferError": "protocol.errors",
    "KvTransferParams": "protocol.messages",
    "Limits": "protocol.messages",
    "MeasuresSteps": "engines.capabilities",
    "OnEvent": "protocol.streams",
    "OnKvEvents": "protocol.kv_events",
    "Overloaded": "protocol.errors",
    "Phase": "protocol.messages",
    "PhaseTimings": "protocol.messages",
    "PublishesKvEvents": "engines.capabilities",
    "Refusal": "frontend.http.hooks",
    "ReleaseOutcome": "protocol.messages",
    "ReportsProgress": "engines.capabilities",
    "RequestRejected": "protocol.errors",
    "Role": "protocol.messages",
    "RunsPreflight": "engines.capabilities",
    "Sampling": "protocol.messages",
    "Sleeps": "engines.capabilities",
    "StepSample": "protocol.cost_model",
    "Stream": "protocol.streams",
    "StreamHandle": "protocol.streams",
    "TaskStream": "protocol.streams",
    "TokenLogprob": "protocol.messages",
    "TransferExpired": "protocol.errors",
    "TransferFailed": "protocol.errors",
    "TransferGuard": "kv_transfer.guard",
    "TransferMismatch": "protocol.errors",
    "TransferRejected": "protocol.errors",
    "TransferTimeout": "protocol.errors",
    "TransfersKv": "engines.capabilities",
    "Worker": "worker.worker",
    "WorkerConfig": "config.models",
    "as_stream": "protocol.streams",
    "check_request": "engines.engine_interface",
    "create_engine": "engines.factory",
    "engine_arguments": "engines.arguments",
    "serve": "launch.embedded",
    "stop_token_ids": "engines.engine_interface",
    "token_ids": "protocol.messages",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
